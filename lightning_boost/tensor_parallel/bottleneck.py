"""Scheme ``bottleneck``: the decoder's chunks are cut where they are narrowest.

A chunk starts at a ``factor_b``, split over output features, runs through attention or the gate, and ends at the next
``factor_a``, split over input features. The model's own ``forward`` is left alone; the cut is made by place:

====================  =================================================================================
in the place of       stands
====================  =================================================================================
a norm                ``NormalizedProjections``: γ, every ``A`` that reads the norm, one all-reduce, σ,
                      every ``B``; gives the projections' outputs side by side
such a projection     ``ProjectionSlice``: takes its own part of them
o, down               ``BottleneckParallelLinear``: ``A``, one all-reduce, σ, ``B``
the embedding         ``FeatureShardedEmbedding``
====================  =================================================================================

Each keeps owning the parameters of what it replaces, so names do not change.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from typing_extensions import override

from lightning_boost.model.low_rank import LowRankLinear
from lightning_boost.tensor_parallel.local_parameter import local, local_size
from lightning_boost.tensor_parallel.ops import Expand, NormProjectReduce, ProjectReduce


class FactorPair(nn.Module):
    """The parts of a ``LowRankLinear``, under its names, with parameters that hold a share of it."""

    def __init__(self, pair: LowRankLinear) -> None:
        super().__init__()
        self.factor_a = pair.factor_a
        self.activation = pair.activation
        self.factor_b = pair.factor_b

    @property
    def bottleneck_size(self) -> int:
        """``R``, never split."""
        return self.factor_a.weight.shape[0]

    @property
    def local_width(self) -> int:
        """This process's output features."""
        return local_size(self.factor_b.weight, 0)


class ProjectionSlice(FactorPair):
    """Take one projection's part of its group's outputs.

    Args:
        pair: The projection that is replaced.
        index: Its position in the group.
        members: Every projection of the group, this one included once all are made. The list itself is kept, hidden
            from torch: the others own their parameters in their own places.
    """

    def __init__(self, pair: LowRankLinear, index: int, members: list["ProjectionSlice"]) -> None:
        super().__init__(pair)
        self.index = index
        self.__dict__["members"] = members

    @override
    def forward(self, outputs: Tensor) -> Tensor:
        """Cut ``[…, w_i]`` out of ``[…, w]``."""
        widths = [member.local_width for member in self.__dict__["members"]]
        if outputs.shape[-1] != sum(widths):
            raise RuntimeError(
                f"a projection of a group got {outputs.shape[-1]} features where its norm gives {sum(widths)}:"
                " something stands between the two. Describe the model's parts with a DecoderLayout."
            )
        return outputs.narrow(-1, sum(widths[: self.index]), widths[self.index])


class NormalizedProjections(nn.Module):
    """Online RMSNorm and all low-rank projections that read it, with one all-reduce forward and one backward.

    Args:
        norm: The norm that is replaced.
        eps: Its eps.
        members: The slices that stand in its projections' places, in order.
        hidden_size: ``D`` over the whole group.
        group: Name of the tensor axis's group.
        chunk: Label of the collectives.
    """

    def __init__(
        self,
        norm: nn.Module,
        eps: float,
        members: Sequence[ProjectionSlice],
        hidden_size: int,
        group: str,
        chunk: str,
    ) -> None:
        super().__init__()
        self.weight = norm.get_parameter("weight")
        self.eps = eps
        self.hidden_size = hidden_size
        self.group = group
        self.chunk = chunk
        self.__dict__["members"] = tuple(members)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map this process's features ``[…, D/tp]`` to its features of every projection, ``[…, w]``."""
        members: tuple[ProjectionSlice, ...] = self.__dict__["members"]
        dtype = gemm_dtype(members[0].factor_a.weight)
        factors_a = [local(member.factor_a.weight).to(dtype) for member in members]
        rows = x.flatten(0, -2)
        z, _ = NormProjectReduce.apply(
            rows, local(self.weight), self.eps, self.hidden_size, self.group, self.chunk, *factors_a
        )
        y = expand(activate(z, members), members, self.group, self.chunk)
        return y.view(*x.shape[:-1], -1)


class BottleneckParallelLinear(FactorPair):
    """A low-rank linear whose input is sharded over features and whose output is too.

    Communication: forward one all-reduce of ``N R`` values, backward the same.

    Args:
        pair: The projection that is replaced.
        group: Name of the tensor axis's group.
        chunk: Label of the collectives.
    """

    def __init__(self, pair: LowRankLinear, group: str, chunk: str) -> None:
        super().__init__(pair)
        self.group = group
        self.chunk = chunk

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map ``[…, in/tp]`` to ``[…, out/tp]``."""
        factor_a = local(self.factor_a.weight)
        z = ProjectReduce.apply(x.flatten(0, -2), factor_a.to(gemm_dtype(factor_a)), self.group, self.chunk)
        y = expand(activate(z, [self]), [self], self.group, self.chunk)
        return y.view(*x.shape[:-1], -1)


class FeatureShardedEmbedding(nn.Module):
    """Look up this process's features of every token: no communication in either pass.

    Args:
        embedding: The table that is replaced, ``[V, D]``; this process's share is ``[V, D/tp]``.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.padding_idx = embedding.padding_idx

    @override
    def forward(self, input_ids: Tensor) -> Tensor:
        """Map ``[B, T]`` to ``[B, T, D/tp]``."""
        return embedding(input_ids, local(self.weight), self.padding_idx)


def activate(z: Tensor, pairs: Sequence[FactorPair]) -> Tensor:
    """Apply each pair's σ to its part of the latents ``[N, R]``; once for all where they agree."""
    if len({type(pair.activation) for pair in pairs}) == 1:
        activated: Tensor = pairs[0].activation(z)
        return activated
    parts = z.split([pair.bottleneck_size for pair in pairs], -1)
    return torch.cat([pair.activation(part) for pair, part in zip(pairs, parts, strict=True)], -1)


def expand(z: Tensor, pairs: Sequence[FactorPair], group: str, chunk: str) -> Tensor:
    """Map latents ``[N, R]`` to this process's outputs of every pair, side by side, biases added."""
    y: Tensor = Expand.apply(z, group, chunk, *(local(pair.factor_b.weight).to(z.dtype) for pair in pairs))
    if all(pair.factor_b.bias is None for pair in pairs):
        return y
    biases = [
        y.new_zeros(pair.local_width) if pair.factor_b.bias is None else local(pair.factor_b.bias).to(y.dtype)
        for pair in pairs
    ]
    return y + torch.cat(biases)


def gemm_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype matrices multiply in: autocast's where it is on, else the weight's."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
