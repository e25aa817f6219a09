"""Rotary position embedding in the half-rotation layout of LLaMA."""

import math

import torch
from torch import Tensor

from lightning_boost.config import LlamaConfig, RopeScaling


def rotary_tables(
    positions: Tensor, num_tokens: int | Tensor, config: LlamaConfig, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary angles, each ``[T, E]``, or ``[B, 1, T, E]``.

    They are made on every forward from positions, in fp32, so that no buffer can go stale or be left uninitialised.

    Args:
        positions: ``[T]`` if all sequences have the same, else ``[B, T]``.
        num_tokens: Tokens of the sequence or, ``[B, T]``, of each token's document; the dynamic form looks at it.
        config: Head size, base and scaling.
        like: A tensor whose device and dtype the tables take.
    """
    lengths = torch.as_tensor(num_tokens, device=positions.device)
    angles = positions[..., None].float() * _frequencies(lengths, config)
    angles = torch.cat([angles, angles], dim=-1)
    if positions.dim() > 1:
        angles = angles[:, None]
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _frequencies(num_tokens: Tensor, config: LlamaConfig) -> Tensor:
    """Return the angle per position of each pair of features, ``[E / 2]``; ``[B, T, E / 2]`` for lengths ``[B, T]``."""
    scaling, size = config.rope_scaling, config.head_size
    theta: float | Tensor = config.rope_theta
    if scaling is not None and scaling.rope_type == "dynamic":
        beyond = (num_tokens / scaling.original_max_position_embeddings).clamp(min=1.0)
        growth = 1.0 + scaling.factor * (beyond - 1.0)
        theta = (theta * growth ** (size / (size - 2)))[..., None]
    frequencies = theta ** (-torch.arange(0, size, 2, device=num_tokens.device, dtype=torch.float32) / size)
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
