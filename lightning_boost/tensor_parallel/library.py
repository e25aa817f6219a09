"""Registration of this package's operators with torch.

What computes and communicates in one step is a ``torch.library`` operator: dispatch modes, recompute policies and
compilers then see one call with a name. Gradients are given by an ``autograd.Function`` beside each operator, which
costs less per call than registering them with the library.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

NAMESPACE = "lightning_boost"
_library = torch.library.Library(NAMESPACE, "DEF")

COMMUNICATING: set[OpOverload] = set()
"""The operators that communicate: those that take a group."""

Operator = Callable[..., Any]


def operator(schema: str) -> Callable[[Operator], Operator]:
    """Register the decorated function under ``schema`` and return the operator that dispatches to it."""

    def register(function: Operator) -> Operator:
        _library.define(schema)
        name = schema.partition("(")[0]
        _library.impl(name, function, "CompositeExplicitAutograd")
        dispatching: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
        if "str group" in schema:
            COMMUNICATING.add(dispatching)
        return dispatching

    return register


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which statistics of a tensor of ``dtype`` are computed: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)


def gemm_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype matrices multiply in: autocast's where it is on, else the weight's."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
