"""Scheme ``full_rank``: dense layers in Megatron's form, the hidden stream whole on every process.

====================  =================================================================================
in the place of       stands
====================  =================================================================================
a norm                ``ReplicatedNorm``: the same on every process; its output's gradient is summed once
                      for all projections that read it
a projection of it    ``ColumnParallelLinear``: this process's output features
o, down               ``RowParallelLinear``: from this process's input features, one all-reduce
the embedding         ``GatheredEmbedding``: its features are split, and gathered
====================  =================================================================================

Per block two all-reduces of ``D`` values per token forward and two backward.
"""

from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from typing_extensions import override

from lightning_boost.collectives import group_index
from lightning_boost.model.norm import normalize
from lightning_boost.tensor_parallel.dense import CopyToGroup, GatherFeatures, Rows, SplitReader, own_rows
from lightning_boost.tensor_parallel.library import gemm_dtype
from lightning_boost.tensor_parallel.local_parameter import local


class ReplicatedNorm(nn.Module):
    """RMSNorm of a whole hidden state, handed to layers that are split over processes.

    ``weight`` is replicated. Its gradient is whole on every process, since that of the output is.
    Communication: forward none, backward one all-reduce of ``N D`` values.

    Args:
        norm: The norm that is replaced.
        eps: Its eps.
        group: Name of the tensor axis's group.
        chunk: Label of the collective.
    """

    def __init__(self, norm: nn.Module, eps: float, group: str, chunk: str) -> None:
        super().__init__()
        self.weight = norm.get_parameter("weight")
        self.eps = eps
        self.group = group
        self.chunk = chunk

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map ``[…, D]`` to ``[…, D]``."""
        y: Tensor = CopyToGroup.apply(local(self.weight) * normalize(x, self.eps), self.group, self.chunk)
        return y


class ColumnParallelLinear(nn.Module):
    """A dense linear split over output features: ``[…, in]`` to ``[…, out/tp]``, no communication forward.

    Args:
        linear: The layer that is replaced; this process's share of its weight is ``[out/tp, in]``.
        rows: Where the weight is replicated instead, because it has fewer heads than there are processes: the rows that
            this process reads. The gradients of all are then summed, one all-reduce of the weight's size.
        group: Name of the tensor axis's group.
        chunk: Label of the collectives.
    """

    def __init__(self, linear: nn.Linear, rows: Rows | None, group: str, chunk: str) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.rows = rows
        self.group = group
        self.chunk = chunk

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map ``[…, in]`` to ``[…, out/tp]``."""
        weight = own_rows(self.weight, self.rows, self.group, self.chunk)
        bias = None if self.bias is None else own_rows(self.bias, self.rows, self.group, self.chunk)
        dtype = gemm_dtype(weight)
        x = SplitReader.apply(x.to(dtype), self.group)
        return linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))


class GatheredEmbedding(nn.Module):
    """Look up this process's features of every token and gather the others'.

    Half the values of a vocabulary-parallel table's all-reduce.
    Communication: forward one all-gather of ``N D/tp`` values, backward none.

    Args:
        table: The embedding that is replaced; this process's share is ``[V, D/tp]``.
        group: Name of the tensor axis's group.
    """

    def __init__(self, table: nn.Embedding, group: str) -> None:
        super().__init__()
        self.weight = table.weight
        self.padding_idx = table.padding_idx
        self.group = group

    @override
    def forward(self, input_ids: Tensor) -> Tensor:
        """Map ``[B, T]`` to ``[B, T, D]``."""
        mine = embedding(input_ids, local(self.weight), self.padding_idx)
        whole: Tensor = GatherFeatures.apply(mine, self.group, "embedding", group_index(self.group))
        return whole
