"""Rotary position embedding in the half-rotation layout of LLaMA."""

import math

import torch
from torch import Tensor

from lightning_boost.config import LlamaConfig, RopeScaling


def rotary_tables(num_tokens: int, config: LlamaConfig, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary angles, each ``[T, E]``.

    They are made on every forward from positions, in fp32, so that no buffer can go stale or be left uninitialised.

    Args:
        num_tokens: Positions, ``T``.
        config: Head size, base and scaling.
        like: A tensor whose device and dtype the tables take.
    """
    frequencies = _frequencies(num_tokens, config, like.device)
    positions = torch.arange(num_tokens, device=like.device, dtype=torch.float32)
    angles = positions[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn ``heads`` of shape ``[B, H, T, E]`` by their positions' angles."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat([-second, first], dim=-1) * sines


def _frequencies(num_tokens: int, config: LlamaConfig, device: torch.device) -> Tensor:
    """Return the angle per position of each pair of features, ``[E / 2]``."""
    scaling, theta, size = config.rope_scaling, config.rope_theta, config.head_size
    if scaling is not None and scaling.rope_type == "dynamic":
        context = scaling.original_max_position_embeddings
        if num_tokens > context:
            growth = scaling.factor * num_tokens / context - (scaling.factor - 1.0)
            theta *= growth ** (size / (size - 2))
    frequencies = theta ** (-torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    if scaling is not None and scaling.rope_type == "linear":
        return frequencies / scaling.factor
    if scaling is not None and scaling.rope_type == "llama3":
        return _blended(frequencies, scaling)
    return frequencies


def _blended(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and go over linearly between them.

    What counts is how many turns a frequency makes within the context of the training.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2.0 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / scaling.factor + kept * frequencies
