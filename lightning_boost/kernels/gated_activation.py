"""Triton: the product in a gated MLP, ``φ(gate) · up``, in one pass forward and one backward.

Backward: ``d gate = φ'(gate) · up · grad``, ``d up = φ(gate) · grad``; φ is computed once more, so that neither it nor
anything else but ``gate`` and ``up`` is kept.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_boost.kernels.activations import activated, derivative
from lightning_boost.kernels.tiles import TILE, cover


@triton.jit
def _gated_activation_forward(gate, up, product, size, ACTIVATION: tl.constexpr, SIZE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = place < size
    left = activated(tl.load(gate + place, mask, other=0.0).to(tl.float32), ACTIVATION)
    right = tl.load(up + place, mask, other=0.0).to(tl.float32)
    tl.store(product + place, (left * right).to(product.dtype.element_ty), mask)


@triton.jit
def _gated_activation_backward(
    grad, gate, up, grad_gate, grad_up, size, ACTIVATION: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = place < size
    incoming = tl.load(grad + place, mask, other=0.0).to(tl.float32)
    left = tl.load(gate + place, mask, other=0.0).to(tl.float32)
    right = tl.load(up + place, mask, other=0.0).to(tl.float32)
    of_gate = incoming * right * derivative(left, ACTIVATION)
    of_up = incoming * activated(left, ACTIVATION)
    tl.store(grad_gate + place, of_gate.to(grad_gate.dtype.element_ty), mask)
    tl.store(grad_up + place, of_up.to(grad_up.dtype.element_ty), mask)


def gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """As ``reference.gated_activation``."""
    gate, up = gate.contiguous(), up.contiguous()
    product = torch.empty_like(gate)
    if gate.numel():
        grid = (cover(gate.numel(), TILE),)
        _gated_activation_forward[grid](gate, up, product, gate.numel(), ACTIVATION=activation, SIZE=TILE)
    return product


def gated_activation_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """As ``reference.gated_activation_backward``."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    if gate.numel():
        grid = (cover(gate.numel(), TILE),)
        _gated_activation_backward[grid](
            grad, gate, up, grad_gate, grad_up, gate.numel(), ACTIVATION=activation, SIZE=TILE
        )
    return grad_gate, grad_up
