"""A batch cut into micro-batches of one shape, every sample of which counts once."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_boost.config import IGNORED_LABEL
from lightning_boost.model.loss import count_valid, next_tokens, with_some_valid


@dataclass(frozen=True)
class Microbatches:
    """The arguments of a model's forward, once for each micro-batch."""

    arguments: list[dict[str, Any]]
    num_samples: int
    """Rows of the batch; what the last micro-batches have beyond them was filled up."""

    num_tokens: int
    """``T``."""

    rows: int
    """``b``, of each micro-batch."""

    num_valid: list[Tensor]
    """Valid next tokens of each micro-batch; empty without labels."""

    def __len__(self) -> int:
        return len(self.arguments)


def bind(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a model's forward by name.

    Raises:
        ValueError: If the first is no tensor of token ids.
    """
    signature = inspect.signature(forward)
    given = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    input_ids = next(iter(given.values()))
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
        raise ValueError("the first argument of a model on a pipeline must be token ids [B, T].")
    return given


def cut_batch(arguments: Mapping[str, Any], count: int) -> Microbatches:
    """Cut what a model is called with.

    Tensors with as many rows as the first argument are cut, everything else goes to every micro-batch. Rows that fill
    up the last micro-batches repeat the last sample without its labels.

    Args:
        arguments: By name, the first token ids ``[B, T]``.
        count: Micro-batches.

    Raises:
        ValueError: If a tensor has one dim, which may be that of the samples or of the tokens.
    """
    num_samples, num_tokens = next(iter(arguments.values())).shape
    for name, value in arguments.items():
        if num_samples == num_tokens and isinstance(value, Tensor) and value.shape == (num_samples,):
            raise ValueError(
                f"{name} ([{num_samples}]) may be one value for each of the {num_samples} samples or of the"
                f" {num_tokens} tokens: a pipeline cuts the first and not the second. Pass it as [B, T] or [1, T]."
            )
    rows = -(-num_samples // count)
    missing = rows * count - num_samples
    cut: dict[str, Sequence[Any]] = {
        name: _filled(value, missing, name).split(rows) if has_rows(value, num_samples) else (value,) * count
        for name, value in arguments.items()
    }
    parts = [{name: values[number] for name, values in cut.items()} for number in range(count)]
    num_valid = []
    for part in parts:
        if isinstance(part.get("labels"), Tensor):
            num_valid.append(count_valid(next_tokens(part["labels"])))
            part["labels"] = with_some_valid(part["labels"])
    return Microbatches(parts, num_samples, num_tokens, rows, num_valid)


def has_rows(value: Any, rows: int) -> bool:
    """Return whether a value is a tensor with one row for each of ``rows`` samples."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows


def _filled(value: Tensor, missing: int, name: str) -> Tensor:
    if missing == 0:
        return value
    rows = value[-1:].expand(missing, *value.shape[1:])
    return torch.cat([value, torch.full_like(rows, IGNORED_LABEL) if name == "labels" else rows])
