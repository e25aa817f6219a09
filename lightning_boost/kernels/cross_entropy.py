"""Triton: cross-entropy over a share of the vocabulary, without a wide copy of the logits.

With smoothing ``ε`` a row's loss is ``log Σ exp(x) - (1 - ε) x_target - ε/V Σ x``. The first pass reads a row of this
process's logits once and gives its maximum, its sum of exponentials below that maximum, and its part of what is
subtracted. Behind the exchange of these three, the second pass writes the gradient
``scale (exp(x - max) / Σ exp - (1 - ε) [x is the target] - ε/V)`` over the logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_boost.kernels.tiles import TILE, cover, power_of_two


@triton.jit
def _cross_entropy_parts(
    logits, targets, parts, num_rows, width, stride, smoothing, spread, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * stride
    maximum = -float("inf")
    exponentials = 0.0
    values = 0.0
    for start in range(0, width, SIZE):
        column = start + tl.arange(0, SIZE)
        logit = tl.load(own + column, column < width, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(maximum, tl.max(logit, 0))
        exponentials = exponentials * tl.exp(maximum - higher) + tl.sum(tl.exp(logit - higher), 0)
        maximum = higher
        values += tl.sum(tl.where(column < width, logit, 0.0), 0)
    target = tl.load(targets + row)
    is_mine = (target >= 0) & (target < width)
    chosen = tl.load(own + target, is_mine, other=0.0).to(tl.float32)
    place = parts + row
    tl.store(place, maximum)
    tl.store(place + num_rows, exponentials)
    tl.store(place + num_rows + num_rows, (1.0 - smoothing) * chosen + spread * values)


@triton.jit
def _cross_entropy_gradient(
    logits, targets, maxima, sums, scales, width, stride, smoothing, spread, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    place = logits + row * stride + column
    logit = tl.load(place, column < width, other=0.0).to(tl.float32)
    share = tl.exp(logit - tl.load(maxima + row)) / tl.load(sums + row) - spread
    share -= tl.where(column == tl.load(targets + row), 1.0 - smoothing, 0.0)
    tl.store(place, (share * tl.load(scales + row)).to(logits.dtype.element_ty), column < width)


def cross_entropy_parts(logits: Tensor, targets: Tensor, smoothing: float, spread: float) -> Tensor:
    """As ``reference.cross_entropy_parts``, of logits of any dtype, which are left as they are; rows may lie apart."""
    num_rows, width = logits.shape
    parts = torch.empty(3, num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        _cross_entropy_parts[(num_rows,)](
            logits, targets.contiguous(), parts, num_rows, width, logits.stride(0), smoothing, spread,
            SIZE=_size(width),
        )  # fmt: skip
    return parts


def cross_entropy_gradient(
    work: Tensor,
    targets: Tensor,
    parts: Tensor,
    maxima: Tensor,
    sums: Tensor,
    scale: Tensor,
    smoothing: float,
    spread: float,
) -> None:
    """As ``reference.cross_entropy_gradient``; ``work`` are the logits, whose rows may lie apart."""
    num_rows, width = work.shape
    size = _size(width)
    if num_rows and width:
        _cross_entropy_gradient[(num_rows, cover(width, size))](
            work, targets.contiguous(), maxima.contiguous(), sums.contiguous(), scale.contiguous(), width,
            work.stride(0), smoothing, spread, SIZE=size,
        )  # fmt: skip


def _size(width: int) -> int:
    """Return how many logits a program holds at a time."""
    return min(power_of_two(max(width, 16)), TILE)
