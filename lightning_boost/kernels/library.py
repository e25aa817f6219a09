"""Registration of this package's operators with torch.

What computes or communicates in one step is a ``torch.library`` operator: dispatch modes, recompute policies and
compilers then see one call with a name. Gradients are given by an ``autograd.Function`` beside each operator, which
costs less per call than registering them with the library.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import register_flop_formula

NAMESPACE = "lightning_boost"
_library = torch.library.Library(NAMESPACE, "DEF")

APART: dict[OpOverload, Callable[..., Any]] = {}
"""Fused operators, and the same by several ones: recompute keeps the results of single ones."""

Operator = Callable[..., Any]
FlopFormula = Callable[..., int]


def register(
    schema: str,
    function: Operator,
    *,
    fake: Operator | None = None,
    flops: FlopFormula | None = None,
    apart: Operator | None = None,
) -> OpOverload:
    """Register ``function`` under ``schema`` and return the operator that dispatches to it.

    Args:
        schema: Name, arguments and results.
        function: What it computes, on any device.
        fake: Gives results of the right shapes, dtypes and strides from arguments without values; a compiler needs it.
        flops: Of its GEMMs, for ``torch.utils.flop_counter``; takes the arguments, shapes in the place of tensors.
        apart: The same by several operators.
    """
    _library.define(schema)
    name = schema.partition("(")[0]
    _library.impl(name, function, "CompositeExplicitAutograd")
    packet = getattr(getattr(torch.ops, NAMESPACE), name)
    if fake is not None:
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    if flops is not None:
        register_flop_formula(packet)(_without_output(flops))
    dispatching: OpOverload = packet.default
    if apart is not None:
        APART[dispatching] = apart
    return dispatching


def _without_output(flops: FlopFormula) -> FlopFormula:
    return lambda *args, out_shape=None, **kwargs: flops(*args, **kwargs)
