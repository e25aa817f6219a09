"""Dense projections on the tensor axis: moves of full width, each with the gradient that mirrors it.

Letters: ``N`` rows (micro-batch × tokens), ``D`` hidden, ``d = D/tp``.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from typing_extensions import override

from lightning_boost.collectives import Label, Pass, all_gather, all_reduce, group_size, reduce_scatter
from lightning_boost.tensor_parallel.library import gemm_dtype, operator
from lightning_boost.tensor_parallel.local_parameter import local, local_size
from lightning_boost.tensor_parallel.ops import ProjectReduce

Rows = tuple[int, int]
"""Where the rows start and stop that this process reads of a replicated weight."""


@operator(
    "sum_over_group(Tensor x, str group, str chunk, str pass_) -> Tensor",
    fake=lambda x, *_: x.new_empty(x.shape),
    is_replicated=True,
)
def _sum_over_group(x: Tensor, group: str, chunk: str, pass_: Pass) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce(total, group, Label(chunk, pass_))
    return total


@operator(
    "average_over_group(Tensor x, str group, str chunk) -> Tensor",
    fake=lambda x, *_: x.new_empty(x.shape),
)
def _average_over_group(x: Tensor, group: str, chunk: str) -> Tensor:
    # divided before it is summed, which is the copy that summing in place needs
    average = (x / group_size(group)).contiguous()
    all_reduce(average, group, Label(chunk, "backward"))
    return average


@operator(
    "gather_features(Tensor x, str group, str chunk, str pass_) -> Tensor",
    fake=lambda x, group, *_: x.new_empty(*x.shape[:-1], group_size(group) * x.shape[-1]),
)
def _gather_features(x: Tensor, group: str, chunk: str, pass_: Pass) -> Tensor:
    gathered = all_gather(x.contiguous(), group, Label(chunk, pass_))
    return gathered.movedim(0, -2).flatten(-2)


@operator(
    "scatter_features(Tensor x, str group, str chunk, str pass_) -> Tensor",
    fake=lambda x, group, *_: x.new_empty(*x.shape[:-1], x.shape[-1] // group_size(group)),
)
def _scatter_features(x: Tensor, group: str, chunk: str, pass_: Pass) -> Tensor:
    parts = x.unflatten(-1, (group_size(group), -1)).movedim(-2, 0).contiguous()
    return reduce_scatter(parts, group, Label(chunk, pass_))


class CopyToGroup(torch.autograd.Function):
    """Hand a whole tensor on to all processes: identity forward, one all-reduce backward, which averages.

    What is split hands back its own part of the gradient times the number of processes (``SplitReader``), so that the
    average is the sum of the parts; what is not split counts once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, chunk: str) -> Tensor:
        """Return ``x``."""
        ctx.group, ctx.chunk = group, chunk
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the average of every process's gradient."""
        return _average_over_group(grad, ctx.group, ctx.chunk), None, None


class SplitReader(torch.autograd.Function):
    """Stand where something split reads a whole tensor: identity forward, backward times the number of processes.

    The tensor's gradient is averaged where it was made whole, and each process has a part of it here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        """Return ``x``."""
        ctx.factor = group_size(group)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient, scaled."""
        return grad * ctx.factor, None


class SumOverGroup(torch.autograd.Function):
    """Make a partial sum whole: one all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, chunk: str) -> Tensor:
        """Return the sum of every process's ``x``."""
        total: Tensor = _sum_over_group(x, group, chunk, "forward")
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient, which is whole."""
        return grad, None, None


class GatherFeatures(torch.autograd.Function):
    """Make a sharded hidden state whole where every process goes on with the same: ``[…, d]`` to ``[…, D]``.

    Communication: forward one all-gather of ``N d`` values, backward none.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, chunk: str, index: int) -> Tensor:
        """Return every process's features side by side."""
        ctx.start, ctx.width = index * x.shape[-1], x.shape[-1]
        whole: Tensor = _gather_features(x, group, chunk, "forward")
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return this process's part of the gradient."""
        return grad.narrow(-1, ctx.start, ctx.width), None, None, None


class ScatterFeatures(torch.autograd.Function):
    """Sum a partial hidden state over processes and keep this one's features: ``[…, D]`` to ``[…, d]``.

    Communication: forward one reduce-scatter of ``N D`` values, backward one all-gather of ``N d``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, chunk: str) -> Tensor:
        """Return this process's features of the sum."""
        ctx.group, ctx.chunk = group, chunk
        mine: Tensor = _scatter_features(x, group, chunk, "forward")
        return mine

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the whole gradient."""
        return _gather_features(grad, ctx.group, ctx.chunk, "backward"), None, None


class CutRows(torch.autograd.Function):
    """Read some rows of a replicated parameter where other processes read other rows.

    The gradient of every process is summed, so the copies stay equal.
    Communication: forward none, backward one all-reduce of the parameter's size.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, start: int, stop: int, group: str, chunk: str) -> Tensor:
        """Return ``weight[start:stop]``."""
        ctx.rows, ctx.shape, ctx.label = slice(start, stop), weight.shape, (group, chunk)
        return weight[start:stop]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the whole parameter."""
        whole = grad.new_zeros(ctx.shape)
        whole[ctx.rows] = grad
        return _sum_over_group(whole, *ctx.label, "backward"), None, None, None, None


class RowParallelLinear(nn.Module):
    """A dense linear split over input features (o, down); what it gives is whole, or split as its input is.

    Communication: where features stay sharded, forward one reduce-scatter of ``N out`` values and backward one
    all-gather of ``N out/tp``; where not, forward one all-reduce of ``N out`` values and backward none.

    Args:
        layer: The projection that is replaced; this process's share of its weight is ``[out, in/tp]``. Its bias is
            split as the output is, and added once, after the sum.
        group: Name of the tensor axis's group.
        chunk: Label of the collectives.
        shard_features: Whether the hidden stream is split over features.
    """

    def __init__(self, layer: nn.Linear, group: str, chunk: str, *, shard_features: bool) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self.group = group
        self.chunk = chunk
        self.shard_features = shard_features

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map ``[…, in/tp]`` to ``[…, out/tp]``, or ``[…, out]``."""
        weight = local(self.weight)
        dtype = gemm_dtype(weight)
        y: Tensor
        if self.shard_features:
            y = ScatterFeatures.apply(linear(x.to(dtype), weight.to(dtype)), self.group, self.chunk)
        else:
            y = ProjectReduce.apply(x.flatten(0, -2), weight.to(dtype), self.group, self.chunk)
            y = y.view(*x.shape[:-1], y.shape[-1])
        return y if self.bias is None else y + local(self.bias).to(dtype)


def own_rows(parameter: Tensor, rows: Rows | None, group: str, chunk: str) -> Tensor:
    """Return this process's rows of a parameter: its share, or the given rows of a replicated one."""
    share = local(parameter)
    if rows is None:
        return share
    cut: Tensor = CutRows.apply(share, *rows, group, chunk)
    return cut


def num_rows(parameter: Tensor, rows: Rows | None, dim: int = 0) -> int:
    """Return how many rows ``own_rows`` gives of a parameter that has them along ``dim``."""
    return local_size(parameter, dim) if rows is None else rows[1] - rows[0]
