"""Root-mean-square normalisation."""

import torch
from torch import Tensor, nn
from typing_extensions import override


class RMSNorm(nn.Module):
    """Compute ``γ · x · (mean(x²) + eps)^-½`` over the last dim.

    The statistic is taken in fp32 at least and the normalised value is rounded before γ is applied: the order of
    Hugging Face's LLaMA, so that its checkpoints give its numbers.

    Args:
        hidden_size: Features of ``x``, ``D``.
        eps: Added to the mean square.
    """

    def __init__(self, hidden_size: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[…, D]``."""
        return self.weight * normalize(x, self.eps)


def normalize(x: Tensor, eps: float) -> Tensor:
    """Return ``x · (mean(x²) + eps)^-½`` over the last dim, in the dtype of ``x``."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
