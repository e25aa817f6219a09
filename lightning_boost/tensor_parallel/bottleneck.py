"""Scheme ``bottleneck``: the decoder's chunks are cut where they are narrowest.

A chunk starts at a ``factor_b``, split over output features, runs through attention or the gate, and ends at the next
``factor_a``, split over input features. The model's own ``forward`` is left alone; the cut is made by place:

====================  =================================================================================
in the place of       stands
====================  =================================================================================
a norm                ``NormalizedProjections``: γ, every ``A`` that reads the norm, one all-reduce, σ,
                      every ``B``; hands out the projections' outputs
such a projection     ``LowRankMember``, ``DenseMember``: takes its own part of them
o, down               ``BottleneckParallelLinear``: ``A``, one all-reduce, σ, ``B``
a dense o, down       ``RowParallelLinear``: a reduce-scatter over features
the embedding         ``FeatureShardedEmbedding``
====================  =================================================================================

Each keeps owning the parameters of what it replaces, so names do not change.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import embedding, linear
from typing_extensions import override

from lightning_boost.kernels import reference
from lightning_boost.model.crossing import Crossing, LayerLatents
from lightning_boost.model.factor_pair import activation_name, factor_names, find_activation
from lightning_boost.model.low_rank import CrossingLinear
from lightning_boost.tensor_parallel.dense import Rows, SplitReader, num_rows, own_rows
from lightning_boost.tensor_parallel.gathered_norm import NormGather
from lightning_boost.tensor_parallel.handing_out import GroupedNorm, GroupMember, hand_out
from lightning_boost.tensor_parallel.library import apply, gemm_dtype
from lightning_boost.tensor_parallel.local_parameter import local, local_size
from lightning_boost.tensor_parallel.ops import Expand, NormProjectReduce, ProjectReduce


class FactorPair(nn.Module):
    """The two factors of a projection, in whatever form and under its names, with parameters that hold a share.

    Args:
        pair: The projection that is replaced.
        rows: Of the factor out of the bottleneck, where it is replicated because it has fewer heads than there are
            processes.
    """

    def __init__(self, pair: nn.Module, rows: Rows | None = None) -> None:
        super().__init__()
        names, sigma = factor_names(pair), find_activation(pair)
        assert names is not None
        assert sigma is not None
        # the very parts, each of which keeps its parameters under its name
        self._parameters.update(pair._parameters)
        self._modules.update(pair._modules)
        self.names, self.rows = names, rows
        self.sigma = activation_name(sigma)
        self.latent_name = pair.name if isinstance(pair, CrossingLinear) else None
        """By which its latent crosses from layer to layer, if it does."""

        self.bottleneck_size = self.get_parameter(names.factor_a).shape[1 - names.in_dim]
        """``R`` of the whole group."""

    def factor(self, name: str) -> Tensor:
        """Return a factor as it stands there: in a compiler's graph it is this process's share, and no parameter."""
        owner, _, leaf = name.rpartition(".")
        factor: Tensor = getattr(self.get_submodule(owner), leaf)
        return factor

    @property
    def local_width(self) -> int:
        """This process's output features."""
        return num_rows(self.factor(self.names.factor_b), self.rows, self.names.out_dim)

    def upright(self, factor: Tensor) -> Tensor:
        """Return a factor as a linear keeps it, ``[R, in]`` or ``[out, R]``."""
        return factor.t() if self.names.is_transposed else factor

    def local_a(self) -> Tensor:
        """Return this process's share of ``A``, ``[R, in/tp]``."""
        return self.upright(local(self.factor(self.names.factor_a)))

    def local_b(self, group: str, chunk: str) -> Tensor:
        """Return this process's share of ``B``, ``[out/tp, R]``."""
        share = self.upright(local(self.factor(self.names.factor_b)))
        return own_rows(share, self.rows, group, chunk)

    def output_bias(self) -> Tensor | None:
        """Return the bias as it is kept, if there is one."""
        owner, _, leaf = self.names.bias.rpartition(".")
        bias: Tensor | None = getattr(self.get_submodule(owner), leaf, None)
        return bias


class CommunicatingPair(FactorPair):
    """A factor pair with collectives of its own; a group's are those of what stands in its norm's place.

    Args:
        pair: The projection that is replaced.
        group: Name of the tensor axis's group.
        chunk: Label of the collectives.
        rows: As in ``FactorPair``.
    """

    def __init__(self, pair: nn.Module, group: str, chunk: str, rows: Rows | None = None) -> None:
        super().__init__(pair, rows)
        self.group = group
        self.chunk = chunk
        self.takes_latents = self.latent_name is not None


class DenseLayer(nn.Module):
    """The parameters of a ``torch.nn.Linear``, under their names, that hold a share of its output features.

    Args:
        layer: The projection that is replaced.
        rows: Of the weight, where it is replicated because it has fewer heads than there are processes.
    """

    def __init__(self, layer: nn.Linear, rows: Rows | None = None) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self.rows = rows

    @property
    def local_width(self) -> int:
        """This process's output features."""
        return num_rows(self.weight, self.rows)


class LowRankMember(GroupMember, FactorPair):
    """A factor pair of a group."""


class DenseMember(GroupMember, DenseLayer):
    """A dense projection of a group."""


class NormalizedProjections(GroupedNorm):
    """Online RMSNorm and all projections that read it.

    Factor pairs share one all-reduce forward and one backward. Dense projections read the whole normalised hidden
    state, which is gathered for them; their gradient of it is scattered.

    Communication: for pairs, forward one all-reduce of ``N (R + statistic columns)`` values, backward one of ``N R``;
    for dense projections, forward one all-gather of ``(N + 1) D/tp``, backward one reduce-scatter of ``N D`` and the
    statistic's columns.

    Args:
        norm: The norm that is replaced.
        eps: Its eps.
        members: What stands in its projections' places, in order; the very list that they joined.
        hidden_size: ``D`` over the whole group.
        group: Name of the tensor axis's group.
        chunk: Label of the collectives.
    """

    def __init__(
        self,
        norm: nn.Module,
        eps: float,
        members: list[GroupMember],
        hidden_size: int,
        group: str,
        chunk: str,
    ) -> None:
        super().__init__(norm, eps, members, group, chunk)
        self.hidden_size = hidden_size
        self.takes_latents = any(member.latent_name for member in self.low_rank_members)

    @property
    def low_rank_members(self) -> list[LowRankMember]:
        """The factor pairs of the group, in order."""
        return [member for member in self.members if isinstance(member, LowRankMember)]

    @property
    def dense_members(self) -> list[DenseMember]:
        """The dense projections of the group, in order."""
        return [member for member in self.members if isinstance(member, DenseMember)]

    @override
    def forward(self, x: Tensor, latents: LayerLatents | None = None) -> Tensor:
        """Map this process's features ``[…, D/tp]`` to what its projections take their features from.

        ``latents`` of the layer, where latents cross: whole between the all-reduce and σ, so they cross at no cost.

        Raises:
            ValueError: If ``x`` has another width.
        """
        width = local_size(self.weight, 0)
        if x.shape[-1] != width:
            raise ValueError(
                f"the hidden state has {x.shape[-1]} features and must have this process's {width} of"
                f" {self.hidden_size}: let it come from the model's own embedding (inputs_embeds too), or set"
                " tensor_parallel_size to 1."
            )
        rows, pairs, dense = x.flatten(0, -2), self.low_rank_members, self.dense_members
        outputs: dict[GroupMember, Tensor] = {}
        if pairs:
            outputs |= zip(pairs, self._low_rank(rows, pairs, latents), strict=True)
        if dense:
            outputs |= zip(dense, self._dense(rows, dense), strict=True)
        return hand_out([outputs[member] for member in self.members], x.shape[:-1], self.members)

    def latents(self, rows: Tensor, chunk: str, activation: str = "none") -> Tensor:
        """Return the latents ``[N, R]`` of the group's pairs.

        Args:
            rows: The input, ``[N, D/tp]``.
            chunk: Label of the all-reduce.
            activation: Name of a σ that is applied to all of them.
        """
        shares = [member.local_a() for member in self.low_rank_members]
        dtype = gemm_dtype(shares[0])
        z: Tensor
        z, _ = apply(
            NormProjectReduce,
            rows,
            local(self.weight),
            self.eps,
            self.hidden_size,
            self.group,
            chunk,
            activation,
            *(share.to(dtype) for share in shares),
        )
        return z

    def _low_rank(self, rows: Tensor, pairs: Sequence[LowRankMember], latents: LayerLatents | None) -> list[Tensor]:
        common = common_activation(pairs)
        if latents is None and common is not None:
            z = self.latents(rows, self.chunk, common)
        else:
            z = activate(self.latents(rows, self.chunk), pairs, latents)
        return expand(z, pairs, self.group, self.chunk)

    def _dense(self, rows: Tensor, members: Sequence[DenseMember]) -> list[Tensor]:
        hidden: Tensor = NormGather.apply(rows, local(self.weight), self.eps, self.group, self.chunk)
        hidden = SplitReader.apply(hidden, self.group)
        dtype = gemm_dtype(members[0].weight)
        weight = torch.cat([own_rows(member.weight, member.rows, self.group, self.chunk) for member in members])
        outputs = linear(hidden.to(dtype), weight.to(dtype)).split([member.local_width for member in members], -1)
        return [
            add_bias(y, member.bias, member.rows, self.group, self.chunk)
            for y, member in zip(outputs, members, strict=True)
        ]


class BottleneckParallelLinear(CommunicatingPair):
    """A low-rank linear whose input is sharded over features and whose output is too.

    Communication: forward one all-reduce of ``N R`` values, backward the same.
    """

    @override
    def forward(self, x: Tensor, latents: LayerLatents | None = None) -> Tensor:
        """Map ``[…, in/tp]`` to ``[…, out/tp]``; ``latents`` of the layer, where latents cross."""
        factor_a = self.local_a()
        z = ProjectReduce.apply(x.flatten(0, -2), factor_a.to(gemm_dtype(factor_a)), self.group, self.chunk)
        (y,) = expand(activate(z, [self], latents), [self], self.group, self.chunk)
        return y.view(*x.shape[:-1], y.shape[-1])


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


class ReplicatedCrossing(nn.Module):
    """In the place of a crossing: the same on every process, which has all of it and of the latents.

    No communication: latents are whole, and so are their gradients, which ``Expand`` has summed behind them and the
    next layer's crossing, being the same on every process, gives whole. Those of the parameters are then whole, too.

    Args:
        crossing: That is replaced.
    """

    def __init__(self, crossing: Crossing) -> None:
        super().__init__()
        self._modules.update(crossing._modules)
        # hidden from torch, which knows its parts under their names already
        self.__dict__["crossing"] = crossing

    @override
    def forward(self, a: Tensor, z: Tensor) -> Tensor:
        """Map ``a`` ``[N, R]`` and the latent of the layer before to what σ is applied to, ``[N, R]``."""
        parameters = {name: local(parameter) for name, parameter in self.named_parameters()}
        u: Tensor = functional_call(self.__dict__["crossing"], parameters, (a, z))
        return u


def activate(z: Tensor, pairs: Sequence[FactorPair], latents: LayerLatents | None = None) -> Tensor:
    """Apply each pair's σ to its part of the latents ``[N, R]``; once for all where they agree.

    Args:
        z: Of all pairs side by side, whole.
        pairs: In order.
        latents: Of the layer, where latents cross; they do before σ, and are given on behind it.
    """
    sizes = [pair.bottleneck_size for pair in pairs]
    if latents is not None:
        parts = zip(pairs, z.split(sizes, -1), strict=True)
        received = [
            part if pair.latent_name is None else latents.receive(pair.latent_name, part) for pair, part in parts
        ]
        z = torch.cat(received, -1) if len(received) > 1 else received[0]
    common = common_activation(pairs)
    if common is not None:
        activated = reference.activate(z, common)
    else:
        parts = zip(pairs, z.split(sizes, -1), strict=True)
        activated = torch.cat([reference.activate(part, pair.sigma) for pair, part in parts], -1)
    if latents is not None:
        for pair, part in zip(pairs, activated.split(sizes, -1), strict=True):
            if pair.latent_name is not None:
                # a part of what the factors out of bottlenecks keep, not a copy
                latents.give(pair.latent_name, part)
    return activated


def common_activation(pairs: Sequence[FactorPair]) -> str | None:
    """Return the name of the σ that all pairs have; ``None`` if they differ."""
    names = {pair.sigma for pair in pairs}
    return names.pop() if len(names) == 1 else None


def expand(z: Tensor, pairs: Sequence[FactorPair], group: str, chunk: str) -> list[Tensor]:
    """Map latents ``[N, R]`` to this process's outputs of every pair, ``[N, w_i]``, biases added."""
    factors_b = [pair.local_b(group, chunk).to(z.dtype) for pair in pairs]
    outputs: Sequence[Tensor] = apply(Expand, z, group, chunk, *factors_b)
    return [add_bias(y, pair.output_bias(), pair.rows, group, chunk) for y, pair in zip(outputs, pairs, strict=True)]


def add_bias(y: Tensor, bias: Tensor | None, rows: Rows | None, group: str, chunk: str) -> Tensor:
    """Add this process's share of a projection's bias, if it has one."""
    return y if bias is None else y + own_rows(bias, rows, group, chunk).to(y.dtype)
