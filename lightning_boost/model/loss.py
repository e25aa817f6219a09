"""Cross-entropy of the next token."""

from collections.abc import Mapping, MutableMapping
from dataclasses import FrozenInstanceError, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, pad
from typing_extensions import override

from lightning_boost.config import IGNORED_LABEL


class NextTokenLoss(nn.Module):
    """Mean cross-entropy over the valid tokens, from the last hidden state and the head's weight.

    It takes the hidden state instead of logits, so that a parallel form may go through the vocabulary in pieces. With
    no valid token at all the loss is zero, and so is its gradient.

    Args:
        label_smoothing: Share of each target's probability that is spread evenly over the whole vocabulary.
    """

    def __init__(self, *, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing

    @override
    def forward(self, hidden: Tensor, head_weight: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss in fp32 at least.

        Args:
            hidden: Last hidden state, ``[B, T, D]``.
            head_weight: ``[V, D]``.
            labels: ``[B, T]``, aligned with the input: position ``t`` predicts ``labels[t + 1]``. ``-100`` is ignored.
        """
        targets = next_tokens(labels)
        logits = linear(hidden, head_weight)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = cross_entropy(
            wide.flatten(0, -2),
            targets.flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        return total / count_valid(targets).clamp(min=1)


def next_tokens(labels: Tensor) -> Tensor:
    """Shift labels ``[B, T]`` so that each position holds the token it predicts, the last one nothing.

    Raises:
        ValueError: If there is not one label for each token.
    """
    if labels.dim() != 2:
        raise ValueError(
            f"labels ({list(labels.shape)}) must be [B, T], one for each token: a loss is weighed by their number. Give"
            " labels of another kind another name, or take the loss from logits."
        )
    return pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


def count_valid(targets: Tensor) -> Tensor:
    """Count targets that are not ignored."""
    return (targets != IGNORED_LABEL).sum()


def with_some_valid(labels: Tensor) -> Tensor:
    """Return labels ``[B, T]``, or token 0 everywhere if none is valid.

    Their mean loss is to weigh nothing then, and must be a number for that.
    """
    return torch.where(count_valid(next_tokens(labels)) > 0, labels, 0)


def loss_of(output: Any) -> Tensor | None:
    """Return the loss of what a model returned when called with labels; ``None`` if there is none.

    Args:
        output: The loss; or an object or mapping that has it as ``loss``; or a tuple or list that begins with it.
    """
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, tuple | list) and not hasattr(output, "loss"):
        loss = output[0] if output else None
    else:
        loss = getattr(output, "loss", output)
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 else None


def mean_loss_of(output: Any) -> Tensor:
    """Return the loss of what a model returned when called with labels, which must be there.

    Raises:
        TypeError: If ``loss_of`` finds none.
    """
    loss = loss_of(output)
    if loss is None:
        raise TypeError(
            f"with labels a model on several replicas or on a pipeline must return its mean loss as one number, alone,"
            f" as loss or first of a tuple, and returned {type(output).__name__}."
        )
    return loss


def check_loss_arguments(arguments: Mapping[str, Any]) -> None:
    """Check that a model called with labels is not told to take another loss than the mean over valid next tokens.

    Raises:
        ValueError: If one of Hugging Face's arguments for that is given.
    """
    for name in ("num_items_in_batch", "shift_labels"):
        if arguments.get(name) is not None:
            raise ValueError(
                f"{name} must be left out where a model runs on several replicas or on a pipeline: its loss is weighed"
                " by valid tokens, and must be the mean over those of labels[:, 1:] that it is called with."
            )


def with_loss(output: Any, loss: Tensor) -> Any:
    """Return a model's output, in which ``loss_of`` found a loss, with another one in its place."""
    if isinstance(output, Tensor):
        return loss
    if isinstance(output, tuple | list):
        names = getattr(output, "_fields", ())
        if "loss" in names:
            return output._replace(loss=loss)  # type: ignore[union-attr]
        make = getattr(type(output), "_make", type(output))  # of a named tuple
        return make([loss, *output[1:]])
    if isinstance(output, MutableMapping) and not hasattr(output, "loss"):
        output["loss"] = loss
        return output
    try:
        output.loss = loss
    except FrozenInstanceError:
        return replace(output, loss=loss)
    return output
