"""Scheme ``full_rank``: dense layers in Megatron's form, the hidden stream whole on every process.

====================  =================================================================================
in the place of       stands
====================  =================================================================================
a norm                ``ColumnParallelNorm``: the norm of the whole hidden state and every projection that
                      reads it
such a projection     ``ColumnParallelMember``: takes its own output features, those of this process
o, down               ``RowParallelLinear``: from this process's input features, one all-reduce
the final norm        ``ReplicatedNorm``: the same on every process
the embedding         ``GatheredEmbedding``: its features are split, and gathered
====================  =================================================================================

Per block two all-reduces of ``D`` values per token forward and two backward, the latter in flight while the weights'
gradients are computed.

Letters: ``N`` rows (micro-batch × tokens), ``D`` hidden, ``w`` this process's output features of a projection.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding
from typing_extensions import override

from lightning_boost.collectives import Label, group_index, start_all_reduce
from lightning_boost.tensor_parallel.bottleneck import DenseMember, add_bias
from lightning_boost.tensor_parallel.dense import CopyToGroup, GatherFeatures, Rows, own_rows
from lightning_boost.tensor_parallel.handing_out import GroupedNorm, hand_out
from lightning_boost.tensor_parallel.library import apply, gemm_dtype, gemm_flops, operator
from lightning_boost.tensor_parallel.local_parameter import local
from lightning_boost.tensor_parallel.ops import expand_backward_fake, expand_backward_flops, group_gradients
from lightning_boost.tensor_parallel.whole_norm import whole_norm


@operator(
    "project_columns(Tensor x, Tensor[] weights) -> Tensor[]",
    fake=lambda x, weights: [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights],
    flops=lambda x, weights: gemm_flops(x[0], *weights),
)
def _project_columns(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return [torch.mm(x, weight.t()) for weight in weights]


@operator(
    "project_columns_backward(Tensor[] grads_y, Tensor x, Tensor[] weights, bool[] needed, str group, str chunk)"
    " -> (Tensor, Tensor[])",
    fake=expand_backward_fake,
    flops=expand_backward_flops,
)
def _project_columns_backward(
    grads_y: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], needed: Sequence[bool], group: str, chunk: str
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of ``x`` and of the weights; empty ones where ``needed`` says so, ``x`` first."""
    is_x_needed, *are_weights_needed = needed
    grad_x, in_flight = x.new_empty(0), None
    if is_x_needed:
        # one sum over projections and processes: what each projection gives is added where it is reduced
        grad_x = torch.mm(grads_y[0], weights[0])
        for grad, weight in zip(grads_y[1:], weights[1:], strict=True):
            grad_x.addmm_(grad, weight)
        in_flight = start_all_reduce(grad_x, group, Label(chunk, "backward"))
    # the weights' gradients do not wait for the sum: they are computed while it travels
    grads_weights = [
        torch.mm(grad.t(), x) if is_needed else x.new_empty(0)
        for grad, is_needed in zip(grads_y, are_weights_needed, strict=True)
    ]
    if in_flight is not None:
        in_flight.wait()
    return grad_x, grads_weights


class ProjectColumns(torch.autograd.Function):
    """Compute ``W x`` of every projection that reads a whole ``x``, each process its own output features.

    ``x`` is ``[N, D]``, ``weights`` ``[w_i, D]`` each, column-parallel, ``y_i`` ``[N, w_i]``.

    Communication: forward none; backward one all-reduce of ``N D`` values, in flight while the gradients of the weights
    are computed; none where nothing below is trained.
    Saved for backward: ``x`` (and the parameters).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, chunk: str, *weights: Tensor) -> tuple[Tensor, ...]:
        """Return every ``y_i``."""
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.chunk = group, chunk
        return tuple(_project_columns(x, weights))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_y: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``x``, whole, and of the weights."""
        return group_gradients(ctx, grads_y, _project_columns_backward)


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
        y: Tensor = CopyToGroup.apply(whole_norm(x, local(self.weight), self.eps), self.group, self.chunk)
        return y.view_as(x)


class ColumnParallelMember(DenseMember):
    """In the place of a projection behind a norm: a dense linear split over output features.

    Of what its norm gave it takes its own part. Of anything else, something that a model's forward does between the
    two, it computes that part by itself.

    Communication: none; where it computes, backward one all-reduce of ``N D`` values.

    Args:
        layer: The layer that is replaced; this process's share of its weight is ``[out/tp, in]``.
        rows: Where the weight is replicated instead, because it has fewer heads than there are processes: the rows that
            this process reads. The gradients of all are then summed, one all-reduce of the weight's size.
        group: Name of the tensor axis's group.
        chunk: Label of the collectives.
    """

    def __init__(self, layer: nn.Linear, rows: Rows | None, group: str, chunk: str) -> None:
        super().__init__(layer, rows)
        self.group = group
        self.chunk = chunk

    @override
    def forward(self, outputs: Tensor) -> Tensor:
        """Map what the norm gave, or any other whole ``[…, in]``, to ``[…, out/tp]``."""
        if self.is_given(outputs):
            return super().forward(outputs)
        (y,) = project_columns(outputs.flatten(0, -2), [self], self.group, self.chunk)
        return y.view(*outputs.shape[:-1], y.shape[-1])


class ColumnParallelNorm(GroupedNorm):
    """In a norm's place: RMSNorm of the whole hidden state, and this process's part of all projections behind it.

    ``weight`` is replicated. Its gradient is whole on every process, since that of the norm's output is.
    Communication: forward none, backward one all-reduce of ``N D`` values, in flight while the weights' gradients are
    computed.
    """

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map ``[…, D]`` to the norm's output ``[…, D]``, from which projections take theirs, ``[…, out/tp]``."""
        hidden = whole_norm(x, local(self.weight), self.eps)
        outputs = project_columns(hidden, self.members, self.group, self.chunk)
        return hand_out(outputs, x.shape[:-1], self.members, hidden)


def project_columns(x: Tensor, members: Sequence[ColumnParallelMember], group: str, chunk: str) -> list[Tensor]:
    """Map a whole ``[N, in]`` to this process's output features of every projection, ``[N, w_i]``, biases added."""
    weights = [own_rows(member.weight, member.rows, group, chunk) for member in members]
    dtype = gemm_dtype(weights[0])
    outputs = apply(ProjectColumns, x.to(dtype), group, chunk, *(weight.to(dtype) for weight in weights))
    return [add_bias(y, member.bias, member.rows, group, chunk) for y, member in zip(outputs, members, strict=True)]


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
