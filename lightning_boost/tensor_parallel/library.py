"""The operators of the tensor axis: which of them communicate, and what is the same on every process behind them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from lightning_boost.kernels.library import FlopFormula, Operator, register

COMMUNICATING: set[OpOverload] = set()
"""The operators that communicate: those that take a group."""

REPLICATED: set[OpOverload] = set()
"""Those of them that a layer's forward runs and whose first result is the same on every process."""


def operator(
    schema: str,
    fake: Operator,
    flops: FlopFormula | None = None,
    *,
    is_replicated: bool = False,
    apart: Operator | None = None,
) -> Callable[[Operator], Operator]:
    """Register the decorated function under ``schema`` and return the operator that dispatches to it.

    Args:
        schema: Name, arguments and results.
        fake: Gives results of the right shapes, dtypes and strides from arguments without values, for a compiler.
        flops: Of its GEMMs, for ``torch.utils.flop_counter``; takes the arguments, shapes in the place of tensors.
        is_replicated: Whether its first result is the same on every process, bit for bit; it then takes the name of a
            ``group`` and of a ``chunk``.
        apart: The same by several operators, where more is fused than should be kept together.
    """

    def decorate(function: Operator) -> Operator:
        dispatching: OpOverload = register(schema, function, fake=fake, flops=flops, apart=apart)
        if "str group" in schema:
            COMMUNICATING.add(dispatching)
        if is_replicated:
            REPLICATED.add(dispatching)
        return dispatching

    return decorate


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
