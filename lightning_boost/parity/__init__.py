"""Proof that a layout trains the one-process model: every gradient, and every weight after steps.

The oracle is the plain model in a plain loop, one process, no Lightning. The other side runs through the strategy as a
user's run does: built on meta, swapped, its optimizer made and its gradients clipped by Lightning. Losses prove little,
since Adam hides a wrong scale; what is compared are gradients, gathered whole, and the change of the weights.
"""

from lightning_boost.parity.check import ParityReport, check_parity
from lightning_boost.parity.runs import SEQUENCE_LENGTH, Precision

__all__ = ["SEQUENCE_LENGTH", "ParityReport", "Precision", "check_parity"]
