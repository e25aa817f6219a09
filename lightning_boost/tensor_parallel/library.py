"""Registration of this package's operators with torch.

What computes and communicates in one step is a ``torch.library`` operator: dispatch modes, recompute policies and
compilers then see one call with a name. Gradients are given by an ``autograd.Function`` beside each operator, which
costs less per call than registering them with the library.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import register_flop_formula

NAMESPACE = "lightning_boost"
_library = torch.library.Library(NAMESPACE, "DEF")

COMMUNICATING: set[OpOverload] = set()
"""The operators that communicate: those that take a group."""

REPLICATED: set[OpOverload] = set()
"""Those of them that a layer's forward runs and whose first result is the same on every process."""

Operator = Callable[..., Any]
FlopFormula = Callable[..., int]


def operator(
    schema: str, flops: FlopFormula | None = None, *, is_replicated: bool = False
) -> Callable[[Operator], Operator]:
    """Register the decorated function under ``schema`` and return the operator that dispatches to it.

    Args:
        schema: Name, arguments and results.
        flops: Of its GEMMs, for ``torch.utils.flop_counter``; takes the arguments, shapes in the place of tensors.
        is_replicated: Whether its first result is the same on every process, bit for bit; it then takes the name of a
            ``group`` and of a ``chunk``.
    """

    def register(function: Operator) -> Operator:
        _library.define(schema)
        name = schema.partition("(")[0]
        _library.impl(name, function, "CompositeExplicitAutograd")
        packet = getattr(getattr(torch.ops, NAMESPACE), name)
        dispatching: OpOverload = packet.default
        if flops is not None:
            register_flop_formula(packet)(_without_output(flops))
        if "str group" in schema:
            COMMUNICATING.add(dispatching)
        if is_replicated:
            REPLICATED.add(dispatching)
        return dispatching

    return register


def _without_output(flops: FlopFormula) -> FlopFormula:
    return lambda *args, out_shape=None, **kwargs: flops(*args, **kwargs)


def gemm_flops(rows: int, *weights: Sequence[int]) -> int:
    """Return the FLOPs of multiplying so many rows by weights of the given shapes, an addition counted as one."""
    return sum(2 * rows * weight[0] * weight[1] for weight in weights)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which statistics of a tensor of ``dtype`` are computed: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)


def gemm_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype matrices multiply in: autocast's where it is on, else the weight's."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
