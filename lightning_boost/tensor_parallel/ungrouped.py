"""Scheme ``bottleneck_ungrouped``: every projection by itself, to measure what it is worth that they go together.

What stands in a norm's place hands the hidden state on; each projection scales it by γ, multiplies it by its own ``A``
and sums over processes by itself: per block 7 all-reduces forward and 7 backward where the grouped form has 4 and 4,
as many latents, and the statistic once for each projection behind a norm.
"""

from torch import Tensor, nn
from typing_extensions import override

from lightning_boost.model.crossing import LayerLatents
from lightning_boost.tensor_parallel.bottleneck import CommunicatingPair, activate, expand
from lightning_boost.tensor_parallel.dense import Rows
from lightning_boost.tensor_parallel.library import apply, gemm_dtype
from lightning_boost.tensor_parallel.local_parameter import local
from lightning_boost.tensor_parallel.ops import NormProjectReduce


class UngroupedNorm(nn.Module):
    """In a norm's place: keeps γ for the projections behind it, and hands the hidden state on.

    Args:
        norm: The norm that is replaced.
        eps: Its eps.
        hidden_size: ``D`` over the whole group.
    """

    def __init__(self, norm: nn.Module, eps: float, hidden_size: int) -> None:
        super().__init__()
        self.weight = norm.get_parameter("weight")
        self.eps = eps
        self.hidden_size = hidden_size

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``, ``[…, D/tp]``."""
        return x


class UngroupedProjection(CommunicatingPair):
    """Online RMSNorm and one projection.

    Communication: forward one all-reduce of ``N (R + statistic columns)`` values, backward one of ``N R``.

    Args:
        pair: The projection that is replaced.
        rows: Of its factor out of the bottleneck, where that is replicated.
        norm: What stands in the place of the norm in front of it.
        group: Name of the tensor axis's group.
        chunk: Label of the collectives.
    """

    def __init__(self, pair: nn.Module, rows: Rows | None, norm: UngroupedNorm, group: str, chunk: str) -> None:
        super().__init__(pair, group, chunk, rows)
        # hidden from torch: it owns γ in its own place
        self.__dict__["norm"] = norm

    @override
    def forward(self, x: Tensor, latents: LayerLatents | None = None) -> Tensor:
        """Map the hidden state ``[…, D/tp]``, not normalised, to ``[…, out/tp]``; ``latents`` where they cross."""
        norm: UngroupedNorm = self.__dict__["norm"]
        factor_a = self.local_a()
        activation = self.sigma if latents is None else "none"
        z, _ = apply(
            NormProjectReduce,
            x.flatten(0, -2),
            local(norm.weight),
            norm.eps,
            norm.hidden_size,
            self.group,
            self.chunk,
            activation,
            factor_a.to(gemm_dtype(factor_a)),
        )
        if latents is not None:
            z = activate(z, [self], latents)
        (y,) = expand(z, [self], self.group, self.chunk)
        return y.view(*x.shape[:-1], y.shape[-1])
