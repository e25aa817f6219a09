"""The operators of the tensor axis: which of them communicate, and what is the same on every process behind them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import Function

from lightning_boost.kernels.library import FlopFormula, Operator, register
from lightning_boost.torch_internals import private

_ORDERED = private("torch._higher_order_ops.effects", "_EffectType.ORDERED")
_register_effect = private("torch._higher_order_ops.effects", "_register_effectful_op")

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
            # a compiler may order what it finds independent by its cost, and so differently for shares of other sizes
            _register_effect(dispatching, _ORDERED)
        if is_replicated:
            REPLICATED.add(dispatching)
        return dispatching

    return decorate


class _NoContext:
    """Stands as an autograd function's context where no gradient is asked for."""

    def save_for_backward(self, *_: Any) -> None:
        """Save nothing."""

    def mark_non_differentiable(self, *_: Any) -> None:
        """Mark nothing."""


def apply(function: type[Function], *args: Any) -> Any:
    """Apply an autograd function whose last arguments may be any number of tensors.

    Where no gradient is asked for, torch 2.13's compiler tells by the number of arguments whether ``forward`` takes a
    context, and is wrong for two such tensors.
    """
    has_gradient = torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in args)
    if torch.compiler.is_compiling() and not has_gradient:
        return function.forward(_NoContext(), *args)
    return function.apply(*args)


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
