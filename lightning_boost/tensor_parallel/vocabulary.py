"""Head and loss on the tensor axis, with the vocabulary split.

Letters: ``N`` rows, ``D`` hidden, ``d = D/tp``, ``V`` vocabulary, ``v`` this process's share of it (uneven shares
are allowed, empty ones too).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding, linear, pad
from typing_extensions import override

from lightning_boost.collectives import Label, all_gather, group_index, group_size
from lightning_boost.config import IGNORED_LABEL
from lightning_boost.kernels import operators
from lightning_boost.kernels.dispatch import why_not
from lightning_boost.mesh import shard_bounds
from lightning_boost.model.loss import NextTokenLoss, count_valid, next_tokens
from lightning_boost.tensor_parallel.dense import ScatterFeatures, SplitReader, SumOverGroup
from lightning_boost.tensor_parallel.library import gemm_dtype, gemm_flops, operator, wide_dtype
from lightning_boost.tensor_parallel.local_parameter import local

CHUNK_TOKENS = 1024
"""Rows whose logits exist at a time in the loss."""


@operator(
    "gather_logits(Tensor logits, int vocab_size, str group) -> Tensor",
    fake=lambda logits, vocab_size, _: logits.new_empty(*logits.shape[:-1], vocab_size),
)
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


def _vocabulary_loss_fake(hidden: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    is_hidden_needed, is_weight_needed = others[4]
    return (
        hidden.new_empty((), dtype=wide_dtype(hidden.dtype)),
        torch.empty_like(hidden if is_hidden_needed else hidden[:0]),
        torch.empty_like(weight if is_weight_needed else weight[:0]),
    )


def _vocabulary_loss_flops(hidden: Sequence[int], weight: Sequence[int], *others: Any) -> int:
    needed: Sequence[bool] = others[4]
    return (1 + sum(needed)) * gemm_flops(hidden[0], weight)


@operator(
    "vocabulary_loss(Tensor hidden, Tensor weight, Tensor targets, Tensor divisor, int vocab_size,"
    " float label_smoothing, bool[] needed, str group) -> (Tensor, Tensor, Tensor)",
    fake=_vocabulary_loss_fake,
    flops=_vocabulary_loss_flops,
)
def _vocabulary_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    divisor: Tensor,
    vocab_size: int,
    label_smoothing: float,
    needed: Sequence[bool],
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    is_hidden_needed, is_weight_needed = needed
    wide = wide_dtype(hidden.dtype)
    first, _ = shard_bounds(vocab_size, group_size(group), group_index(group))
    smoothing = label_smoothing, label_smoothing / vocab_size
    total = hidden.new_zeros((), dtype=wide)
    grad_hidden = torch.empty_like(hidden if is_hidden_needed else hidden[:0])
    grad_weight = torch.zeros_like(weight if is_weight_needed else weight[:0], dtype=wide)
    for start in range(0, hidden.shape[0], CHUNK_TOKENS):
        rows = slice(start, start + CHUNK_TOKENS)
        chunk, target = hidden[rows], targets[rows]
        valid = target != IGNORED_LABEL
        scale = valid.to(wide) / divisor if any(needed) else None
        losses, grad = _chunk_loss(linear(chunk, weight), target - first, scale, smoothing, group)
        total += losses.masked_fill(~valid, 0.0).sum()
        if any(needed):
            grad = grad.to(hidden.dtype)
        if is_hidden_needed:
            torch.mm(grad, weight, out=grad_hidden[rows])
        if is_weight_needed:
            grad_weight += torch.mm(grad.t(), chunk)
    return total / divisor, grad_hidden, grad_weight.to(weight.dtype)


def _chunk_loss(
    logits: Tensor, own_targets: Tensor, scale: Tensor | None, smoothing: tuple[float, float], group: str
) -> tuple[Tensor, Tensor]:
    """Return each row's loss ``[N]`` and, if there is a ``scale``, that times the gradient of the logits ``[N, v]``.

    With smoothing ``ε`` the loss is ``log Σ exp(x) - (1 - ε) x_target - ε/V Σ x``. Each process contributes its
    maximum, its sum of exponentials below that maximum, and its part of what is subtracted; three numbers a row are all
    that is gathered. The logits are used up.
    """
    if why_not("cross_entropy", logits):  # plain torch computes in the dtype of its tensors
        logits = logits.to(wide_dtype(logits.dtype))
    parts = operators.cross_entropy_parts(logits, own_targets, *smoothing)
    maxima, sums, subtracted = all_gather(parts, group, Label("loss", "forward")).unbind(1)
    whole_maximum = maxima.amax(0)
    whole_sum = (sums * (maxima - whole_maximum).exp()).sum(0)
    losses = whole_maximum + whole_sum.log() - subtracted.sum(0)
    if scale is not None:
        operators.cross_entropy_gradient(logits, own_targets, parts, whole_maximum, whole_sum, scale, *smoothing)
    return losses, logits


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
    ``hidden`` is this process's part of it.
    Saved for backward: the gradients of ``hidden`` and ``weight``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        divisor: Tensor,
        vocab_size: int,
        label_smoothing: float,
        group: str,
    ) -> Tensor:
        """Return the loss."""
        ctx.needed = ctx.needs_input_grad[:2]
        loss, *gradients = _vocabulary_loss(
            hidden, weight, targets, divisor, vocab_size, label_smoothing, ctx.needed, group
        )
        ctx.save_for_backward(*gradients)
        result: Tensor = loss
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``hidden``, partial, and of ``weight``."""
        scale = grad_loss.to(ctx.saved_tensors[0].dtype)
        scaled = [grad * scale if needed else None for grad, needed in zip(ctx.saved_tensors, ctx.needed, strict=True)]
        return *scaled, None, None, None, None, None


def check_token_ids(token_ids: Tensor, vocab_size: int) -> None:
    """Check that every id names a token: a share of the vocabulary cannot tell a foreign id from a wrong one.

    Raises:
        IndexError: If one does not (on a GPU, whose values are not waited for, an assertion there).
    """
    in_range = ((token_ids >= 0) & (token_ids < vocab_size)).all()
    if token_ids.device.type != "cpu":
        torch._assert_async(in_range)
    elif not in_range:
        wrong = token_ids[(token_ids < 0) | (token_ids >= vocab_size)][0].item()
        raise IndexError(f"token id {wrong} must be from 0 to {vocab_size - 1}, below vocab_size ({vocab_size}).")


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
        hidden = SplitReader.apply(hidden.to(dtype), self.group)
        logits: Tensor = GatherLogits.apply(linear(hidden, weight.to(dtype)), self.vocab_size, self.group)
        return logits


class VocabularyParallelLoss(nn.Module):
    """In the place of ``NextTokenLoss``: the same number from the hidden state, without whole logits.

    Args:
        loss: The loss that is replaced.
        group: Name of the tensor axis's group.
    """

    def __init__(self, loss: NextTokenLoss, group: str) -> None:
        super().__init__()
        self.label_smoothing = loss.label_smoothing
        self.group = group

    @override
    def forward(self, hidden: Tensor, head_weight: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss; shapes as ``NextTokenLoss``, the weight being a DTensor ``[V, D]``."""
        targets = next_tokens(labels)
        check_token_ids(targets.masked_fill(targets == IGNORED_LABEL, 0), head_weight.shape[0])
        weight = local(head_weight)
        dtype = gemm_dtype(weight)
        loss: Tensor = VocabularyLoss.apply(
            SplitReader.apply(hidden.flatten(0, -2).to(dtype), self.group),
            weight.to(dtype),
            targets.flatten(),
            count_valid(targets).clamp(min=1),
            head_weight.shape[0],
            self.label_smoothing,
            self.group,
        )
        return loss


class VocabularyParallelEmbedding(nn.Module):
    """An embedding that shares its weight with the head, and so is split over the vocabulary.

    Each process looks up the tokens that are its own; the sum over processes is every token's row.
    Communication: where features stay sharded, forward one reduce-scatter of ``N D`` values and backward one all-gather
    of ``N D/tp``; where not, forward one all-reduce of ``N D`` values and backward none.

    Args:
        table: The embedding that is replaced; this process's share is ``[V/tp, D]``.
        group: Name of the tensor axis's group.
        shard_features: Whether the hidden stream is split over features.
    """

    def __init__(self, table: nn.Embedding, group: str, *, shard_features: bool) -> None:
        super().__init__()
        self.weight = table.weight
        self.padding_idx = table.padding_idx
        self.group = group
        self.shard_features = shard_features

    @override
    def forward(self, input_ids: Tensor) -> Tensor:
        """Map ``[B, T]`` to ``[B, T, D/tp]``, or ``[B, T, D]``."""
        weight = local(self.weight)
        first, _ = shard_bounds(self.weight.shape[0], group_size(self.group), group_index(self.group))
        check_token_ids(input_ids, self.weight.shape[0])
        own_ids = input_ids - first
        is_mine = (own_ids >= 0) & (own_ids < weight.shape[0])
        if weight.shape[0]:
            padding = None if self.padding_idx is None else self.padding_idx - first
            padding = padding if padding is not None and 0 <= padding < weight.shape[0] else None
            partial = embedding(own_ids.clamp(0, weight.shape[0] - 1), weight, padding) * is_mine[..., None]
        else:
            partial = weight.sum() + weight.new_zeros(*input_ids.shape, weight.shape[1])
        return _close(partial, self.group, "embedding", self.shard_features)


def _close(partial: Tensor, group: str, chunk: str, shard_features: bool) -> Tensor:
    """Sum a partial hidden state over processes: ``[…, D]`` to this process's ``[…, D/tp]``, or to the whole."""
    closed: Tensor
    if shard_features:
        closed = ScatterFeatures.apply(partial, group, chunk)
    else:
        closed = SumOverGroup.apply(partial, group, chunk)
    return closed
