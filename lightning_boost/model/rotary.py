"""Rotary position embedding in the half-rotation layout of LLaMA."""

import torch
from torch import Tensor


def rotary_tables(num_tokens: int, head_size: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary angles, each ``[T, E]``.

    They are made on every forward from positions, in fp32, so that no buffer can go stale or be left uninitialised.

    Args:
        num_tokens: Positions, ``T``.
        head_size: Features of one head, ``E``.
        theta: Base of the frequencies.
        like: A tensor whose device and dtype the tables take.
    """
    exponents = torch.arange(0, head_size, 2, device=like.device, dtype=torch.float32) / head_size
    positions = torch.arange(num_tokens, device=like.device, dtype=torch.float32)
    angles = positions[:, None] * theta**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn ``heads`` of shape ``[B, H, T, E]`` by their positions' angles."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat([-second, first], dim=-1) * sines
