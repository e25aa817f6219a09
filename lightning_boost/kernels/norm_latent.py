"""Triton: what stands behind the all-reduce of a normalised projection, in one pass over the latents.

Forward, for rows of the summed buffer ``[u | statistic]``: ``ρ = (Σ x²/D + eps)^-½``, ``z = ρ u``, ``σ(z)``. Backward,
with ``g = σ'(z) grad``: ``u' = ρ g`` and ``c = ρ²/D ⟨g, z⟩``.

A program has some rows and goes along their latents. σ is taken of ``z`` as it is stored, so that whoever computes it
from the stored ``z`` once more gets the same.
"""

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_boost.kernels.activations import activated, derivative
from lightning_boost.kernels.statistic import LIMBS
from lightning_boost.kernels.tiles import TILE, cover, tile


@triton.jit
def _norm_latent_forward(
    buffer, z, rho, sigma, num_rows, width, hidden_size, eps, stride,
    NUM_PROCESSES: tl.constexpr, LIMBS: tl.constexpr, ACTIVATION: tl.constexpr, ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    # said, lest latents be read one by one: Triton itself sees no other multiples than those of 16
    own = buffer + tl.multiple_of(row * stride, ALIGNMENT)
    total = tl.zeros([ROWS], tl.float32)
    for process in tl.static_range(NUM_PROCESSES):
        part = tl.zeros([ROWS], tl.float32)
        # from the smallest limb up, as in the plain form: every process then has the same number
        for limb in tl.static_range(LIMBS):
            column = width + process * LIMBS + (LIMBS - 1 - limb)
            part += tl.load(own + column, is_row, other=0.0).to(tl.float32)
        total += part
    scale = 1.0 / tl.sqrt(total / hidden_size + eps)
    tl.store(rho + row, scale, is_row)
    for start in range(0, width, FEATURES):
        feature = start + tl.arange(0, FEATURES)
        mask = is_row[:, None] & (feature < width)[None, :]
        latent = tl.load(own[:, None] + feature[None, :], mask, other=0.0).to(tl.float32)
        rounded = (latent * scale[:, None]).to(z.dtype.element_ty)
        place = row[:, None] * width + feature[None, :]
        tl.store(z + place, rounded, mask)
        if ACTIVATION != "none":
            value = activated(rounded.to(tl.float32), ACTIVATION)
            tl.store(sigma + place, value.to(sigma.dtype.element_ty), mask)


@triton.jit
def _norm_latent_backward(
    grad, z, rho, grad_u, c, num_rows, width, hidden_size, stride,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    scale = tl.load(rho + row, is_row, other=0.0)
    inner = tl.zeros([ROWS], tl.float32)
    for start in range(0, width, FEATURES):
        feature = start + tl.arange(0, FEATURES)
        mask = is_row[:, None] & (feature < width)[None, :]
        place = row[:, None] * width + feature[None, :]
        latent = tl.load(z + place, mask, other=0.0).to(tl.float32)
        incoming = tl.load(grad + row[:, None] * stride + feature[None, :], mask, other=0.0).to(tl.float32)
        inwards = incoming * derivative(latent, ACTIVATION)
        tl.store(grad_u + place, (inwards * scale[:, None]).to(grad_u.dtype.element_ty), mask)
        inner += tl.sum(inwards * latent, 1)
    tl.store(c + row, inner * scale * scale / hidden_size, is_row)


@triton.jit
def _activate(z, sigma, size, ACTIVATION: tl.constexpr, SIZE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    value = activated(tl.load(z + place, place < size, other=0.0).to(tl.float32), ACTIVATION)
    tl.store(sigma + place, value.to(sigma.dtype.element_ty), place < size)


def norm_latent(
    buffer: Tensor, width: int, num_processes: int, hidden_size: int, eps: float, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``reference.norm_latent``."""
    num_rows = buffer.shape[0]
    z = buffer.new_empty(num_rows, width)
    rho = torch.empty(num_rows, 1, dtype=torch.float32, device=buffer.device)
    sigma = z.new_empty(0) if activation == "none" else torch.empty_like(z)
    is_split = buffer.dtype == torch.bfloat16
    rows, features = tile(width)
    if num_rows:
        _norm_latent_forward[(cover(num_rows, rows),)](
            buffer, z, rho, sigma, num_rows, width, hidden_size, eps, buffer.stride(0),
            NUM_PROCESSES=num_processes if is_split else 1, LIMBS=LIMBS if is_split else 1,
            ACTIVATION=activation, ALIGNMENT=gcd(buffer.stride(0), 16), ROWS=rows, FEATURES=features,
        )  # fmt: skip
    return z, rho, sigma


def norm_latent_backward(
    grad: Tensor, z: Tensor, rho: Tensor, hidden_size: int, activation: str
) -> tuple[Tensor, Tensor]:
    """As ``reference.norm_latent_backward``."""
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    z, rho = z.contiguous(), rho.contiguous()
    num_rows, width = z.shape
    grad_u, c = torch.empty_like(z), torch.empty_like(rho)
    rows, features = tile(width)
    if num_rows:
        _norm_latent_backward[(cover(num_rows, rows),)](
            grad, z, rho, grad_u, c, num_rows, width, hidden_size, grad.stride(0),
            ACTIVATION=activation, ROWS=rows, FEATURES=features,
        )  # fmt: skip
    return grad_u, c


def activate(z: Tensor, activation: str) -> Tensor:
    """As ``reference.activate``."""
    if activation == "none":
        return z
    z = z.contiguous()
    sigma = torch.empty_like(z)
    if z.numel():
        _activate[(cover(z.numel(), TILE),)](z, sigma, z.numel(), ACTIVATION=activation, SIZE=TILE)
    return sigma
