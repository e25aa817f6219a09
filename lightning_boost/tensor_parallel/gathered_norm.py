"""RMSNorm of a hidden state that is sharded over features, given whole: in front of the head and of dense projections.

Letters: ``N`` rows (micro-batch × tokens), ``D`` hidden, ``d = D/tp``.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_boost.collectives import Label, all_gather, group_index, group_size, reduce_scatter
from lightning_boost.kernels.statistic import read_statistic, statistic_columns, write_statistic
from lightning_boost.model.norm import normalize
from lightning_boost.tensor_parallel.library import operator, wide_dtype
from lightning_boost.tensor_parallel.local_parameter import local


def _norm_gather_fake(x: Tensor, _: Tensor, __: float, group: str, ___: str) -> tuple[Tensor, Tensor]:
    num_rows, width = x.shape
    return x.new_empty(num_rows, group_size(group) * width), x.new_empty(num_rows, 1, dtype=wide_dtype(x.dtype))


@operator(
    "norm_gather(Tensor x, Tensor gamma, float eps, str group, str chunk) -> (Tensor, Tensor)",
    fake=_norm_gather_fake,
    is_replicated=True,
)
def _norm_gather(x: Tensor, gamma: Tensor, eps: float, group: str, chunk: str) -> tuple[Tensor, Tensor]:
    # γ rides along as one more row, so that every process can normalise the whole hidden as one process would
    gathered = all_gather(torch.cat([x, gamma.to(x.dtype)[None]]), group, Label(chunk, "forward"))
    whole = gathered.transpose(0, 1).flatten(1)
    hidden, whole_gamma = whole[:-1], whole[-1]
    wide = hidden.to(wide_dtype(x.dtype))
    rho = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return whole_gamma * normalize(hidden, eps), rho


@operator(
    "norm_gather_backward(Tensor grad_y, Tensor x, Tensor gamma, Tensor y, Tensor rho, str group, str chunk)"
    " -> (Tensor, Tensor)",
    fake=lambda _, x, gamma, *__: (x.new_empty(x.shape), gamma.new_empty(gamma.shape)),
)
def _norm_gather_backward(
    grad_y: Tensor, x: Tensor, gamma: Tensor, y: Tensor, rho: Tensor, group: str, chunk: str
) -> tuple[Tensor, Tensor]:
    num_processes, (rows, width) = group_size(group), x.shape
    inner = (grad_y.to(rho.dtype) * y).sum(-1)
    columns = statistic_columns(grad_y.dtype, num_processes)
    buffer = grad_y.new_empty(num_processes, rows, width + columns)
    buffer[..., :width] = grad_y.unflatten(-1, (num_processes, width)).transpose(0, 1)
    write_statistic(buffer[..., width:], inner.expand(num_processes, -1), group_index(group))
    mine = reduce_scatter(buffer, group, Label(chunk, "backward"))
    grad = mine[:, :width].to(rho.dtype) / num_processes
    c = read_statistic(mine[:, width:], num_processes) / num_processes * rho.square() / (num_processes * width)
    wide = x.to(rho.dtype)
    grad_x = rho * gamma * grad - c * wide
    grad_gamma = (grad * wide * rho).sum(0)
    return grad_x.to(x.dtype), grad_gamma.to(gamma.dtype)


class NormGather(torch.autograd.Function):
    """Compute the RMSNorm of a hidden state that is sharded over features, and give it whole.

    ``x`` is ``[N, d]``, ``gamma`` ``[d]``, the result ``[N, D]``. The gradient that comes back differs from process to
    process where what reads the result is split. It is averaged and cut in one reduce-scatter, which also carries the
    inner product that the norm's backward needs. What is split hands back its own part of the gradient times the number
    of processes (``SplitReader``), so that the average is the sum of the parts; what is not split counts once.

    Communication: forward one all-gather of ``(N + 1) d`` values, backward one reduce-scatter of
    ``N (D + tp · statistic columns)``.
    Saved for backward: ``x``, the result, ``ρ``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, eps: float, group: str, chunk: str) -> Tensor:
        """Return the normalised hidden state ``[N, D]``."""
        y, rho = _norm_gather(x, gamma, eps, group, chunk)
        ctx.save_for_backward(x, gamma, y, rho)
        ctx.label = group, chunk
        result: Tensor = y
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``x`` and ``gamma``."""
        grad_x, grad_gamma = _norm_gather_backward(grad_y, *ctx.saved_tensors, *ctx.label)
        return grad_x, grad_gamma, None, None, None


class GatheredNorm(nn.Module):
    """In the final norm's place: normalise the sharded hidden state and give it whole to the head.

    Args:
        norm: The norm that is replaced.
        eps: Its eps.
        group: Name of the tensor axis's group.
    """

    def __init__(self, norm: nn.Module, eps: float, group: str) -> None:
        super().__init__()
        self.weight = norm.get_parameter("weight")
        self.eps = eps
        self.group = group

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map ``[…, D/tp]`` to ``[…, D]``."""
        y: Tensor = NormGather.apply(x.flatten(0, -2), local(self.weight), self.eps, self.group, "head")
        return y.view(*x.shape[:-1], y.shape[-1])
