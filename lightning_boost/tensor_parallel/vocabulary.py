"""The end of the model on the tensor axis: final norm, head and loss, with the vocabulary split.

Letters: ``N`` rows, ``D`` hidden, ``d = D/tp``, ``V`` vocabulary, ``v`` this process's share of it (uneven shares
are allowed, empty ones too).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad
from typing_extensions import override

from lightning_boost.collectives import Label, all_gather, group_index, group_size, reduce_scatter
from lightning_boost.config import IGNORED_LABEL
from lightning_boost.mesh import shard_bounds
from lightning_boost.model.loss import count_valid, next_tokens
from lightning_boost.model.norm import normalize
from lightning_boost.tensor_parallel.bottleneck import gemm_dtype
from lightning_boost.tensor_parallel.library import operator, wide_dtype
from lightning_boost.tensor_parallel.local_parameter import local
from lightning_boost.tensor_parallel.statistic import read_statistic, statistic_columns, write_statistic

CHUNK_TOKENS = 1024
"""Rows whose logits exist at a time in the loss."""


@operator("norm_gather(Tensor x, Tensor gamma, float eps, str group) -> (Tensor, Tensor)")
def _norm_gather(x: Tensor, gamma: Tensor, eps: float, group: str) -> tuple[Tensor, Tensor]:
    # γ rides along as one more row, so that every process can normalise the whole hidden as one process would
    gathered = all_gather(torch.cat([x, gamma.to(x.dtype)[None]]), group, Label("head", "forward"))
    whole = gathered.transpose(0, 1).flatten(1)
    hidden, whole_gamma = whole[:-1], whole[-1]
    wide = hidden.to(wide_dtype(x.dtype))
    rho = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return whole_gamma * normalize(hidden, eps), rho


@operator(
    "norm_gather_backward(Tensor grad_y, Tensor x, Tensor gamma, Tensor y, Tensor rho, str group) -> (Tensor, Tensor)"
)
def _norm_gather_backward(
    grad_y: Tensor, x: Tensor, gamma: Tensor, y: Tensor, rho: Tensor, group: str
) -> tuple[Tensor, Tensor]:
    num_processes, (rows, width) = group_size(group), x.shape
    inner = (grad_y.to(rho.dtype) * y).sum(-1)
    columns = statistic_columns(grad_y.dtype, num_processes)
    buffer = grad_y.new_empty(num_processes, rows, width + columns)
    buffer[..., :width] = grad_y.unflatten(-1, (num_processes, width)).transpose(0, 1)
    write_statistic(buffer[..., width:], inner.expand(num_processes, -1), group_index(group))
    mine = reduce_scatter(buffer, group, Label("head", "backward"))
    grad = mine[:, :width].to(rho.dtype)
    c = read_statistic(mine[:, width:], num_processes) * rho.square() / (num_processes * width)
    wide = x.to(rho.dtype)
    grad_x = rho * gamma * grad - c * wide
    grad_gamma = (grad * wide * rho).sum(0)
    return grad_x.to(x.dtype), grad_gamma.to(gamma.dtype)


class NormGather(torch.autograd.Function):
    """Compute the final RMSNorm of a hidden state that is sharded over features, and give it whole.

    ``x`` is ``[N, d]``, ``gamma`` ``[d]``, the result ``[N, D]``. The gradient that comes back is partial: each
    process knows its share of the vocabulary only. It is summed and cut in one reduce-scatter, which also carries the
    inner product that the norm's backward needs.

    Communication: forward one all-gather of ``(N + 1) d`` values, backward one reduce-scatter of
    ``N (D + tp · statistic columns)``.
    Saved for backward: ``x``, the result, ``ρ``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, eps: float, group: str) -> Tensor:
        """Return the normalised hidden state ``[N, D]``."""
        y, rho = _norm_gather(x, gamma, eps, group)
        ctx.save_for_backward(x, gamma, y, rho)
        ctx.group = group
        result: Tensor = y
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``x`` and ``gamma``."""
        grad_x, grad_gamma = _norm_gather_backward(grad_y, *ctx.saved_tensors, ctx.group)
        return grad_x, grad_gamma, None, None


@operator("gather_logits(Tensor logits, int vocab_size, str group) -> Tensor")
def _gather_logits(logits: Tensor, vocab_size: int, group: str) -> Tensor:
    widest = -(-vocab_size // group_size(group))
    padded = pad(logits, (0, widest - logits.shape[-1])).contiguous()
    gathered = all_gather(padded, group, Label("logits", "forward"))
    return gathered.movedim(0, -2).flatten(-2)[..., :vocab_size].contiguous()


class GatherLogits(torch.autograd.Function):
    """Give whole logits ``[…, V]`` from this process's ``[…, v]``.

    Every process goes on with the same whole logits, so each one's share of their gradient is already whole.

    Communication: forward one all-gather of ``N ceil(V/tp)`` values, backward none.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, vocab_size: int, group: str) -> Tensor:
        """Return whole logits."""
        ctx.bounds = shard_bounds(vocab_size, group_size(group), group_index(group))
        whole: Tensor = _gather_logits(logits, vocab_size, group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of this process's logits."""
        start, stop = ctx.bounds
        return grad_logits[..., start:stop], None, None


@operator(
    "vocabulary_loss(Tensor hidden, Tensor weight, Tensor targets, Tensor divisor, int first, bool with_gradient,"
    " str group) -> (Tensor, Tensor, Tensor)"
)
def _vocabulary_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, divisor: Tensor, first: int, with_gradient: bool, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    wide = wide_dtype(hidden.dtype)
    total = hidden.new_zeros((), dtype=wide)
    grad_hidden = torch.empty_like(hidden if with_gradient else hidden[:0])
    grad_weight = torch.zeros_like(weight if with_gradient else weight[:0], dtype=wide)
    for start in range(0, hidden.shape[0], CHUNK_TOKENS):
        rows = slice(start, start + CHUNK_TOKENS)
        chunk, target = hidden[rows], targets[rows]
        losses, grad_logits = _chunk_loss(linear(chunk, weight).to(wide), target, first, group)
        valid = target != IGNORED_LABEL
        total += losses.masked_fill(~valid, 0.0).sum()
        if with_gradient:
            grad = (grad_logits * (valid / divisor)[:, None]).to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[rows])
            grad_weight += torch.mm(grad.t(), chunk)
    return total / divisor, grad_hidden, grad_weight.to(weight.dtype)


def _chunk_loss(logits: Tensor, targets: Tensor, first: int, group: str) -> tuple[Tensor, Tensor]:
    """Return each row's loss ``[N]`` and the gradient of this process's logits ``[N, v]``, which are overwritten.

    Each process contributes its maximum, its sum of exponentials below that maximum and its target logit; three
    numbers a row are all that is gathered.
    """
    num_rows, width = logits.shape
    local_target = targets - first
    is_mine = (local_target >= 0) & (local_target < width)
    index = local_target.clamp(0, max(width - 1, 0))[:, None]
    if width:
        maximum = logits.amax(-1)
        target_logit = logits.gather(-1, index)[:, 0].masked_fill(~is_mine, 0.0)
    else:
        maximum, target_logit = logits.new_full((num_rows,), -torch.inf), logits.new_zeros(num_rows)
    exponentials = logits.sub_(maximum[:, None]).exp_()
    parts = torch.stack([maximum, exponentials.sum(-1), target_logit])
    maxima, sums, target_logits = all_gather(parts, group, Label("loss", "forward")).unbind(1)
    whole_maximum = maxima.amax(0)
    whole_sum = (sums * (maxima - whole_maximum).exp()).sum(0)
    losses = whole_maximum + whole_sum.log() - target_logits.sum(0)
    probabilities = exponentials.mul_(((maximum - whole_maximum).exp() / whole_sum)[:, None])
    if width:
        probabilities.scatter_add_(-1, index, -is_mine.to(logits.dtype)[:, None])
    return losses, probabilities


class VocabularyLoss(torch.autograd.Function):
    """Compute the mean cross-entropy of the next token with the vocabulary split over processes.

    The rows are gone through in chunks, and the gradient is made in forward while a chunk's logits exist: no logits of
    the whole batch are ever held.

    ================  ===============  ==========================================
    tensor            this process     note
    ================  ===============  ==========================================
    ``hidden``        ``[N, D]``       whole
    ``weight``        ``[v, D]``       column-parallel
    ``targets``       ``[N]``          whole
    loss              scalar           whole, fp32 at least
    ================  ===============  ==========================================

    Communication: forward one all-gather of three values a row for each chunk, backward none. The gradient of
    ``hidden`` is partial; ``NormGather`` sums it.
    Saved for backward: the gradients of ``hidden`` and ``weight``.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, divisor: Tensor, first: int, group: str
    ) -> Tensor:
        """Return the loss."""
        with_gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        loss, *gradients = _vocabulary_loss(hidden, weight, targets, divisor, first, with_gradient, group)
        ctx.save_for_backward(*gradients)
        result: Tensor = loss
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``hidden``, partial, and of ``weight``."""
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_loss.to(grad_hidden.dtype)
        return grad_hidden * scale, grad_weight * scale, None, None, None, None


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
        y: Tensor = NormGather.apply(x.flatten(0, -2), local(self.weight), self.eps, self.group)
        return y.view(*x.shape[:-1], -1)


class VocabularyParallelHead(nn.Module):
    """In the head's place: logits of this process's share of the vocabulary, gathered whole.

    Whole logits let a module compute any loss of its own, exactly. The model's own loss does without them.

    Args:
        head: The head that is replaced, ``[V, D]``; this process's share is ``[V/tp, D]``.
        group: Name of the tensor axis's group.
    """

    def __init__(self, head: nn.Linear, group: str) -> None:
        super().__init__()
        self.weight = head.weight
        self.vocab_size = head.out_features
        self.group = group

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[…, D]`` to ``[…, V]``."""
        weight = local(self.weight)
        dtype = gemm_dtype(weight)
        logits: Tensor = GatherLogits.apply(linear(hidden.to(dtype), weight.to(dtype)), self.vocab_size, self.group)
        return logits


class VocabularyParallelLoss(nn.Module):
    """In the place of ``NextTokenLoss``: the same number from the hidden state, without whole logits.

    Args:
        group: Name of the tensor axis's group.
    """

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group

    @override
    def forward(self, hidden: Tensor, head_weight: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss; shapes as ``NextTokenLoss``, the weight being a DTensor ``[V, D]``."""
        targets = next_tokens(labels)
        first, _ = shard_bounds(head_weight.shape[0], group_size(self.group), group_index(self.group))
        weight = local(head_weight)
        dtype = gemm_dtype(weight)
        loss: Tensor = VocabularyLoss.apply(
            hidden.flatten(0, -2).to(dtype),
            weight.to(dtype),
            targets.flatten(),
            count_valid(targets),
            first,
            self.group,
        )
        return loss
