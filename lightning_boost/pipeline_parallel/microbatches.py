"""A batch cut into micro-batches of one shape, every sample of which counts once."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from lightning_boost.config import IGNORED_LABEL
from lightning_boost.model.loss import count_valid, next_tokens, with_some_valid
from lightning_boost.pipeline_parallel.trees import map_tensors

_PLAIN = (Tensor, Number, str, Enum, torch.dtype, torch.device, type(None))


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

    Tensors with as many rows as the first argument are cut, those in tuples, lists and dicts too; everything else goes
    to every micro-batch. Rows that fill up the last micro-batches repeat the last sample without its labels.

    Args:
        arguments: By name, the first token ids ``[B, T]``.
        count: Micro-batches.

    Raises:
        TypeError: If an argument is an object of another kind, of which nobody knows how to cut it.
        ValueError: If a tensor has one dim, which may be that of the samples or of the tokens.
    """
    num_samples, num_tokens = next(iter(arguments.values())).shape
    for name, value in arguments.items():
        _check_kind(value, name)
        if num_samples == num_tokens and isinstance(value, Tensor) and value.shape == (num_samples,):
            raise ValueError(
                f"{name} ([{num_samples}]) may be one value for each of the {num_samples} samples or of the"
                f" {num_tokens} tokens: a pipeline cuts the first and not the second. Pass it as [B, T] or [1, T]."
            )
    rows = -(-num_samples // count)
    missing = rows * count - num_samples

    def part_of(tensor: Tensor, name: str, number: int) -> Tensor:
        return _filled(tensor, missing, name).split(rows)[number] if has_rows(tensor, num_samples) else tensor

    parts = [
        {name: map_tensors(partial(part_of, name=name, number=number), value) for name, value in arguments.items()}
        for number in range(count)
    ]
    num_valid = []
    for part in parts:
        if isinstance(part.get("labels"), Tensor):
            num_valid.append(count_valid(next_tokens(part["labels"])))
            part["labels"] = with_some_valid(part["labels"])
    return Microbatches(parts, num_samples, num_tokens, rows, num_valid)


def has_rows(value: Any, rows: int) -> bool:
    """Return whether a value is a tensor with one row for each of ``rows`` samples."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows


def _check_kind(value: Any, name: str) -> None:
    """Check that a value is cut, or may go to every micro-batch as it is."""
    if isinstance(value, dict | tuple | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_kind(inner, name)
    elif not isinstance(value, _PLAIN) and not callable(value):
        raise TypeError(
            f"{name} ({type(value).__name__}) must be a tensor or a plain value, or hold such in a tuple, list or dict:"
            " a pipeline cuts the batch, does not know how to cut this, and all micro-batches would share it. A cache"
            " of keys and values must be left out: pass use_cache=False to generate."
        )


def _filled(value: Tensor, missing: int, name: str) -> Tensor:
    if missing == 0:
        return value
    rows = value[-1:].expand(missing, *value.shape[1:])
    return torch.cat([value, torch.full_like(rows, IGNORED_LABEL) if name == "labels" else rows])
