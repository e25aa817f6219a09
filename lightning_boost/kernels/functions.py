"""What a model calls: a kernel with its gradient where Triton runs it, and plain torch where not.

Plain torch keeps its own autograd: on a CPU nothing is fused, and a backward of one piece would only compute more.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_boost.kernels import operators, reference
from lightning_boost.kernels.dispatch import why_not


def gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return ``φ(gate) · up``.

    Args:
        gate: ``[…, F]``.
        up: ``[…, F]``.
        activation: Name of φ; ``none`` for none.
    """
    if why_not("gated_activation", gate):
        return reference.gated_activation(gate, up, activation)
    product: Tensor = _GatedActivation.apply(gate, up, activation)
    return product


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn ``heads`` ``[B, H, T, E]`` by the angles of their positions; tables ``[T, E]`` or ``[B, 1, T, E]``."""
    if why_not("rotary", heads):
        return reference.rotary(heads, cosines, sines)
    turned: Tensor = _Rotary.apply(heads, cosines, sines)
    return turned


class _GatedActivation(torch.autograd.Function):
    """``φ(gate) · up``; saved for backward: ``gate`` and ``up``."""

    @staticmethod
    @override
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        product: Tensor = operators.gated_activation(gate, up, activation)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *operators.gated_activation_backward(grad, *ctx.saved_tensors, ctx.activation), None


class _Rotary(torch.autograd.Function):
    """Rotary embedding; saved for backward: the tables."""

    @staticmethod
    @override
    def forward(ctx: Any, heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        turned: Tensor = operators.rotary(heads, cosines, sines)
        return turned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return operators.rotary_backward(grad, *ctx.saved_tensors), None, None
