"""Triton: what stands before a normalised projection, in one pass over the hidden state.

Forward, for rows ``x`` of this process's ``d`` features: ``γ x``, which the GEMM reads, and ``Σ x²`` in the columns
that the all-reduce carries (``statistic.py``). Backward: ``dx = γ t - c x``, ``dγ = Σ_N x t``, and ``γ x`` once more.

A program has some rows; forward it goes along their features, backward along more rows of its features, so that each
value is read once and ``dγ`` is summed in registers before its parts are added up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_boost.kernels.statistic import LIMBS
from lightning_boost.kernels.tiles import cover, power_of_two, tile

ROWS_OF_PROGRAM = 64
"""Whose part of ``dγ`` one program sums up."""


@triton.jit
def _norm_input_forward(
    x, gamma, scaled, columns, num_rows, width, num_columns, first_limb, stride_x, stride_columns,
    LIMBS: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, width, FEATURES):
        feature = start + tl.arange(0, FEATURES)
        is_feature = feature < width
        mask = is_row[:, None] & is_feature[None, :]
        value = tl.load(x + row[:, None] * stride_x + feature[None, :], mask, other=0.0).to(tl.float32)
        scale = tl.load(gamma + feature, is_feature, other=0.0).to(tl.float32)
        out = scaled + row[:, None] * width + feature[None, :]
        tl.store(out, (value * scale[None, :]).to(scaled.dtype.element_ty), mask)
        total += tl.sum(value * value, 1)
    column = tl.arange(0, COLUMNS)
    written = tl.zeros([ROWS, COLUMNS], tl.float32)
    # an fp32 buffer takes the sum as it is, as its one limb
    for limb in tl.static_range(LIMBS):
        rounded = total.to(columns.dtype.element_ty).to(tl.float32)
        written = tl.where(column[None, :] == first_limb + limb, rounded[:, None], written)
        total -= rounded
    out = columns + row[:, None] * stride_columns + column[None, :]
    mask = is_row[:, None] & (column[None, :] < num_columns)
    tl.store(out, written.to(columns.dtype.element_ty), mask)


@triton.jit
def _norm_input_backward(
    x, gamma, t, c, grad_x, grad_gamma, scaled, num_rows, width, stride_x,
    IS_SCALED_NEEDED: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, ROWS_OF_PROGRAM: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS_OF_PROGRAM
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    is_feature = feature < width
    scale = tl.load(gamma + feature, is_feature, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([FEATURES], tl.float32)
    for start in range(0, ROWS_OF_PROGRAM, ROWS):
        row = first + start + tl.arange(0, ROWS)
        is_row = row < num_rows
        mask = is_row[:, None] & is_feature[None, :]
        place = row[:, None] * width + feature[None, :]
        value = tl.load(x + row[:, None] * stride_x + feature[None, :], mask, other=0.0).to(tl.float32)
        incoming = tl.load(t + place, mask, other=0.0).to(tl.float32)
        inner = tl.load(c + row, is_row, other=0.0).to(tl.float32)[:, None]
        tl.store(grad_x + place, (scale * incoming - inner * value).to(grad_x.dtype.element_ty), mask)
        if IS_SCALED_NEEDED:
            tl.store(scaled + place, (scale * value).to(scaled.dtype.element_ty), mask)
        total += tl.sum(value * incoming, 0)
    tl.store(grad_gamma + tl.program_id(0).to(tl.int64) * width + feature, total, is_feature)


def norm_input(x: Tensor, gamma: Tensor, columns: Tensor, index: int) -> Tensor:
    """As ``reference.norm_input``; rows may lie apart, features may not."""
    x, gamma = _rows(x), gamma.contiguous()
    num_rows, width = x.shape
    scaled = torch.empty(num_rows, width, dtype=columns.dtype, device=x.device)
    limbs = LIMBS if columns.dtype == torch.bfloat16 else 1
    rows, features = tile(width)
    if num_rows:
        _norm_input_forward[(cover(num_rows, rows),)](
            x, gamma, scaled, columns, num_rows, width, columns.shape[1], limbs * index if limbs > 1 else 0,
            x.stride(0), columns.stride(0),
            LIMBS=limbs, ROWS=rows, FEATURES=features, COLUMNS=power_of_two(columns.shape[1]),
        )  # fmt: skip
    return scaled


def norm_input_backward(
    x: Tensor, gamma: Tensor, t: Tensor, c: Tensor, is_scaled_needed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``reference.norm_input_backward``."""
    x, gamma, t, c = _rows(x), gamma.contiguous(), t.contiguous(), c.contiguous()
    num_rows, width = x.shape
    grad_x = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    scaled = torch.empty_like(t) if is_scaled_needed else t.new_empty(0)
    rows, features = tile(width)
    rows = min(rows, ROWS_OF_PROGRAM)
    programs = cover(num_rows, ROWS_OF_PROGRAM)
    parts = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    if num_rows and width:
        _norm_input_backward[(programs, cover(width, features))](
            x, gamma, t, c, grad_x, parts, scaled, num_rows, width, x.stride(0),
            IS_SCALED_NEEDED=is_scaled_needed, ROWS=rows, FEATURES=features, ROWS_OF_PROGRAM=ROWS_OF_PROGRAM,
        )  # fmt: skip
    return grad_x, parts.sum(0).to(gamma.dtype), scaled


def _rows(x: Tensor) -> Tensor:
    """Return a tensor ``[N, d]`` whose features lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
