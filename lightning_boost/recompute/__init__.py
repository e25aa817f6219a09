"""Recompute: a block's activations are computed a second time in backward instead of being kept from forward.

``low_rank`` keeps what is small or has cost a collective, the latents, and runs the rest of a block again. ``block``
keeps a block's input only and runs all of it again, its collectives too. Latents are the same on every process of the
tensor axis, so each may keep a share of them, which are gathered for the second run.
"""

from lightning_boost.recompute.layers import check_layers, recompute_layers
from lightning_boost.recompute.options import AsksForRecompute, LatentStore, Recompute, RecomputeOptions

__all__ = ["AsksForRecompute", "LatentStore", "Recompute", "RecomputeOptions", "check_layers", "recompute_layers"]
