"""Triton: rotary position embedding in the half-rotation layout of LLaMA, in one pass.

With a head's halves ``x₁, x₂`` and its position's cosines and sines: ``y₁ = x₁ c₁ - x₂ s₁``, ``y₂ = x₂ c₂ + x₁ s₂``;
backward the transpose, ``dx₁ = g₁ c₁ + g₂ s₂``, ``dx₂ = g₂ c₂ - g₁ s₁``. A program has one token and all its heads,
which share the table's row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_boost.kernels.tiles import TILE, cover, power_of_two


@triton.jit
def _rotary(
    x, y, cosines, sines, num_tokens, num_heads, half,
    x_batch, x_head, x_token, y_batch, y_head, y_token, table_batch, table_token,
    IS_BACKWARD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64) // num_tokens
    token = tl.program_id(0).to(tl.int64) % num_tokens
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    feature = tl.arange(0, HALF)
    is_feature = feature < half
    mask = (head < num_heads)[:, None] & is_feature[None, :]
    row = batch * table_batch + token * table_token
    cosine_1 = tl.load(cosines + row + feature, is_feature, other=0.0).to(tl.float32)[None, :]
    cosine_2 = tl.load(cosines + row + half + feature, is_feature, other=0.0).to(tl.float32)[None, :]
    sine_1 = tl.load(sines + row + feature, is_feature, other=0.0).to(tl.float32)[None, :]
    sine_2 = tl.load(sines + row + half + feature, is_feature, other=0.0).to(tl.float32)[None, :]
    source = x + batch * x_batch + token * x_token + head[:, None] * x_head + feature[None, :]
    first = tl.load(source, mask, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask, other=0.0).to(tl.float32)
    if IS_BACKWARD:
        turned_1 = first * cosine_1 + second * sine_2
        turned_2 = second * cosine_2 - first * sine_1
    else:
        turned_1 = first * cosine_1 - second * sine_1
        turned_2 = second * cosine_2 + first * sine_2
    target = y + batch * y_batch + token * y_token + head[:, None] * y_head + feature[None, :]
    tl.store(target, turned_1.to(y.dtype.element_ty), mask)
    tl.store(target + half, turned_2.to(y.dtype.element_ty), mask)


def rotary(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """As ``reference.rotary``; any strides but of features."""
    return _launch(heads, cosines, sines, is_backward=False)


def rotary_backward(grad: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """As ``reference.rotary_backward``."""
    return _launch(grad, cosines, sines, is_backward=True)


def _launch(x: Tensor, cosines: Tensor, sines: Tensor, *, is_backward: bool) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    cosines, sines = cosines.contiguous(), sines.contiguous()
    batch, num_heads, num_tokens, size = x.shape
    half = size // 2
    y = torch.empty_like(x)
    of_half = power_of_two(half)
    heads = min(power_of_two(num_heads), max(TILE // (2 * of_half), 1))
    if x.numel():
        _rotary[(batch * num_tokens, cover(num_heads, heads))](
            x, y, cosines, sines, num_tokens, num_heads, half,
            *x.stride()[:3], *y.stride()[:3], cosines.stride(0) if cosines.dim() > 2 else 0, size,
            IS_BACKWARD=is_backward, HEADS=heads, HALF=of_half,
        )  # fmt: skip
    return y
