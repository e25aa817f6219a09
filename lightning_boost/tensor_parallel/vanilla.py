"""Scheme ``vanilla``: every pair of factors by itself in Megatron's form, the baseline of the BOOST paper.

``A`` is split over the bottleneck, column-parallel, and ``B`` with it, row-parallel: what a pair gives is summed over
processes at full width. These are the halves of scheme ``bottleneck`` changed round, and so the same operators.

====================  =================================================================================
in the place of       stands
====================  =================================================================================
a norm                ``VanillaNorm``: the norm of the whole hidden state and every ``A`` that reads it
such a projection     ``VanillaMember``: takes its latents; σ, ``B``, and one all-reduce
o, down               ``VanillaLinear``: ``A``, σ, ``B``, and one all-reduce
the ends              as in scheme ``full_rank``
====================  =================================================================================

Between projections everything is whole on every process: attention and the gate are computed by each of them. Form
``vanilla_sharded`` gives each process its own heads and features there: what goes into a group's projections' outputs
is scattered instead of summed whole, and gathered again in front of ``o`` and ``down``.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from typing_extensions import override

from lightning_boost.collectives import group_index, group_size
from lightning_boost.mesh import shard_bounds
from lightning_boost.model.norm import normalize
from lightning_boost.tensor_parallel.bottleneck import FactorPair, GroupMember, activate, mark_outputs
from lightning_boost.tensor_parallel.dense import CutRows, GatherToSplit, Rows, ScatterFeatures
from lightning_boost.tensor_parallel.library import gemm_dtype
from lightning_boost.tensor_parallel.local_parameter import local, local_size
from lightning_boost.tensor_parallel.ops import Expand, ProjectReduce


class VanillaMember(GroupMember, FactorPair):
    """In the place of a projection behind a norm.

    Communication: forward one all-reduce of ``N out`` values, backward none; sharded, forward one reduce-scatter of
    ``N out`` values, backward one all-gather of ``N out/tp``. Where the projection has fewer heads than there are
    processes, sharded too: an all-reduce in both passes.

    Args:
        pair: The projection that is replaced.
        rows: The output features of this process, where it has fewer heads than there are processes.
        group: Name of the tensor axis's group.
        chunk: Label of the collectives.
        is_sharded: Whether each process goes on with its own output features.
    """

    def __init__(self, pair: nn.Module, rows: Rows | None, group: str, chunk: str, *, is_sharded: bool) -> None:
        super().__init__(pair)
        self.own_features = rows
        self.group = group
        self.chunk = chunk
        self.is_sharded = is_sharded

    @property
    def local_width(self) -> int:
        """This process's part of the bottleneck."""
        return own_bottleneck(self)

    @override
    def forward(self, outputs: Tensor) -> Tensor:
        """Map the latents of the group's projections ``[…, ΣR_i/tp]`` to ``[…, out]``, or ``[…, out/tp]``."""
        z = activate(super().forward(outputs), [self])
        if not self.is_sharded:
            return reduced(z, self, self.group, self.chunk)
        bias = self.output_bias()
        if self.own_features is not None:
            whole = reduced(z, self, self.group, self.chunk).movedim(-1, 0)
            mine: Tensor = CutRows.apply(whole, *self.own_features, self.group, self.chunk)
            return mine.movedim(0, -1)
        factor_b = self.local_b(self.group, self.chunk)
        y = scattered(linear(z, factor_b.to(z.dtype)), self.group, self.chunk)
        return y if bias is None else y + local(bias).to(y.dtype)


class VanillaNorm(nn.Module):
    """In a norm's place: RMSNorm of the whole hidden state, and this process's latents of all projections behind it.

    Communication: forward none, backward one all-reduce of ``N D`` values, in flight while the factors' gradients are
    computed.

    Args:
        norm: The norm that is replaced; its weight is replicated.
        eps: Its eps.
        members: What stands in its projections' places, in order; the very list that they joined.
        group: Name of the tensor axis's group.
        chunk: Label of the collective.
    """

    def __init__(self, norm: nn.Module, eps: float, members: list[GroupMember], group: str, chunk: str) -> None:
        super().__init__()
        self.weight = norm.get_parameter("weight")
        self.eps = eps
        self.group = group
        self.chunk = chunk
        self.__dict__["members"] = members

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map ``[…, D]`` to the latents before σ, side by side: ``[…, ΣR_i/tp]``."""
        members: list[VanillaMember] = self.__dict__["members"]
        factor_a = torch.cat([member.local_a() for member in members])
        hidden = local(self.weight) * normalize(x, self.eps)
        return mark_outputs(into_bottleneck(hidden, factor_a, self.group, self.chunk), self.__dict__["members"])


class VanillaLinear(FactorPair):
    """In the place of a projection without a norm in front of it.

    Communication: forward one all-reduce of ``N out`` values, backward one of ``N in``; sharded, also one all-gather of
    ``N in/tp`` forward, and a reduce-scatter of ``N in`` backward instead of the all-reduce.

    Args:
        pair: The projection that is replaced.
        group: Name of the tensor axis's group.
        chunk: Label of the collectives.
        is_sharded: Whether each process comes with its own input features.
    """

    def __init__(self, pair: nn.Module, group: str, chunk: str, *, is_sharded: bool) -> None:
        super().__init__(pair)
        self.group = group
        self.chunk = chunk
        self.is_sharded = is_sharded

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map ``[…, in]``, or ``[…, in/tp]``, to ``[…, out]``."""
        factor_a = self.local_a()
        if self.is_sharded:
            dtype = gemm_dtype(factor_a)
            whole = gathered(x.to(dtype), factor_a.shape[1], self.group, self.chunk)
            z = linear(whole, factor_a.to(dtype))
        else:
            z = into_bottleneck(x, factor_a, self.group, self.chunk)
        return reduced(activate(z, [self]), self, self.group, self.chunk)


def own_bottleneck(pair: FactorPair) -> int:
    """Return this process's part of a pair's bottleneck."""
    return local_size(pair.get_parameter(pair.names.factor_a), 1 - pair.names.in_dim)


def into_bottleneck(x: Tensor, factor_a: Tensor, group: str, chunk: str) -> Tensor:
    """Map a whole ``[…, in]`` to this process's latents ``[…, R/tp]``; the gradient of ``x`` is summed in backward."""
    dtype = gemm_dtype(factor_a)
    z: Tensor = Expand.apply(x.flatten(0, -2).to(dtype), group, chunk, factor_a.to(dtype))
    return z.view(*x.shape[:-1], z.shape[-1])


def reduced(z: Tensor, pair: FactorPair, group: str, chunk: str) -> Tensor:
    """Map this process's latents ``[…, R/tp]`` to a pair's whole output ``[…, out]``, the bias added once."""
    factor_b, bias = pair.local_b(group, chunk), pair.output_bias()
    y: Tensor = ProjectReduce.apply(z.flatten(0, -2), factor_b.to(z.dtype), group, chunk)
    y = y.view(*z.shape[:-1], y.shape[-1])
    return y if bias is None else y + local(bias).to(y.dtype)


def scattered(partial: Tensor, group: str, chunk: str) -> Tensor:
    """Sum a partial ``[…, out]`` over processes and return this one's features, as many as parameters' shares have."""
    width, size = partial.shape[-1], group_size(group)
    start, stop = shard_bounds(width, size, group_index(group))
    mine: Tensor = ScatterFeatures.apply(pad(partial, (0, -width % size)), group, chunk)
    return mine.narrow(-1, 0, stop - start)


def gathered(mine: Tensor, width: int, group: str, chunk: str) -> Tensor:
    """Return all processes' features ``[…, width]``, for a reader that is split; the inverse of ``scattered``."""
    share = -(-width // group_size(group))
    whole: Tensor = GatherToSplit.apply(pad(mine, (0, share - mine.shape[-1])), group, chunk)
    return whole.narrow(-1, 0, width)
