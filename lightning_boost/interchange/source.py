"""A model in files, of any format, under the names of this package's own: looked at whole, read in slices."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_boost.config import LlamaConfig
from lightning_boost.interchange.detect import detect, format_called
from lightning_boost.interchange.files import CONFIG_FILE, OnPickle, find_weights, read_json, read_tensors
from lightning_boost.interchange.keys import HEAD, Format, RawTensor, Stated, Tensors, own_keys
from lightning_boost.model.llama import LlamaForCausalLM

_MOST_SHOWN = 5


@dataclass(frozen=True)
class SourceValue:
    """The value of one of the model's parameters."""

    path: Path
    key: str
    """Where it is from, to be named."""

    tensor: RawTensor
    is_transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """As the model has it."""
        return self.tensor.shape[::-1] if self.is_transposed else self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """As it is kept."""
        return self.tensor.dtype

    def whole(self) -> Tensor:
        """Read it."""
        return self.share(0, 0, self.shape[0])

    def share(self, dim: int, start: int, stop: int, scratch: Tensor | None = None) -> Tensor:
        """Read ``whole().narrow(dim, start, stop - start)`` and nothing else.

        Raises:
            ValueError: If a value of it is not finite.
        """
        read = self.tensor.read(1 - dim if self.is_transposed else dim, start, stop)
        # a copy: what was read may be the file itself, mapped into memory
        values = (read.t() if self.is_transposed else read).clone(memory_format=torch.contiguous_format)
        # a sum needs no memory, and is finite if all values are
        if not values.sum(dtype=torch.float64).isfinite():
            num_bad = values.numel() - int(values.isfinite().sum())
            raise ValueError(
                f"checkpoint {self.path}: tensor {self.key} is NaN or infinite in {num_bad:,} of {values.numel():,}"
                " values. Take another checkpoint."
            )
        return values


@dataclass(frozen=True)
class SourceModel:
    """A model in files."""

    path: Path
    format: Format
    config: LlamaConfig
    values: Mapping[str, SourceValue]
    """Of the model's parameters, by their names; of weights in two places the first."""

    stated: Stated
    """The files' own ``config.json``."""


def open_model(path: Path, *, format_name: str | None = None, on_pickle: OnPickle | None = None) -> SourceModel:
    """Look at a model in files: read its configuration, and check the names and shapes of its tensors.

    Args:
        path: A directory, or a single file with a ``config.json`` beside it.
        format_name: Its format; ``None``: told by its keys.
        on_pickle: That pickles may run code, and told of each; ``None`` refuses those that would.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged, of no format that is read, or what our model cannot express.
    """
    if (path / ".metadata").is_file():
        raise ValueError(
            f"checkpoint {path} is one that a run has saved. Write its weights as a model first:"
            f" python -m lightning_boost convert {path} OUT --to boost"
        )
    weights = find_weights(path)
    tensors, stated = read_tensors(weights, on_pickle)
    config_file = weights.with_name(CONFIG_FILE)
    if config_file.is_file():
        stated = read_json(config_file)
    if not stated:
        raise ValueError(f"checkpoint {path} has no {CONFIG_FILE} beside {weights.name}, to state the model's sizes.")
    return describe(path, tensors, stated, format_name)


def describe(path: Path, tensors: Tensors, stated: Stated, format_name: str | None = None) -> SourceModel:
    """Make a model of tensors under the keys of a format.

    Raises:
        ValueError: If tensors are missing, unexpected or of another shape, or the configuration cannot be expressed.
    """
    mine = {name: tensors[key] for key, name in own_keys(tensors).items()}
    try:
        format = format_called(format_name) if format_name else detect(mine, stated)
        config = format.read_config(stated, mine)
        keys = {name: format.key_of(name, config.num_hidden_layers) for name, _ in parameters_of(config)}
        _check_names(format, {key.name for key in keys.values()}, mine, config)
        values = {name: SourceValue(path, key.name, mine[key.name], key.is_transposed) for name, key in keys.items()}
        for name, parameter in parameters_of(config):
            _check_shape(values[name], tuple(parameter.shape))
    except ValueError as error:
        raise ValueError(f"checkpoint {path}: {error}") from None
    return SourceModel(path, format, config, values, stated)


def parameters_of(config: LlamaConfig) -> Iterable[tuple[str, Tensor]]:
    """Return the names of a model's parameters, and their shapes on the meta device; tied ones once."""
    with torch.device("meta"):
        return list(LlamaForCausalLM(config).named_parameters())


def _check_names(format: Format, expected: set[str], found: Tensors, config: LlamaConfig) -> None:
    missing = sorted(expected - found.keys())
    # some write a tied head as well
    unexpected = sorted(found.keys() - expected - ({HEAD} if config.tie_word_embeddings else set()))
    if missing or unexpected:
        _refuse_names(format, missing, unexpected)


def _refuse_names(format: Format, missing: list[str], unexpected: list[str]) -> NoReturn:
    sentences = []
    if missing:
        near = {key: get_close_matches(key, unexpected, n=1, cutoff=0.8) for key in missing[:_MOST_SHOWN]}
        described = [f"{key} (there is {found[0]})" if found else key for key, found in near.items()]
        sentences.append(f"{len(missing)} missing: {_shown(described, len(missing))}")
    if unexpected:
        sentences.append(f"{len(unexpected)} without a place in the model: {_shown(unexpected, len(unexpected))}")
    raise ValueError(f"its tensors are not those of {format.name}; {'; '.join(sentences)}.")


def _shown(names: list[str], number: int) -> str:
    return ", ".join(names[:_MOST_SHOWN]) + (", …" if number > _MOST_SHOWN else "")


def _check_shape(value: SourceValue, expected: tuple[int, ...]) -> None:
    if value.shape == expected:
        return
    as_kept = expected[::-1] if value.is_transposed else expected
    is_transposed = value.shape == expected[::-1]
    raise ValueError(
        f"tensor {value.key} is {list(value.tensor.shape)} and must be {list(as_kept)}"
        f"{': it is transposed' if is_transposed else ''}."
    )


def carried_options(stated: Stated) -> dict[str, Any]:
    """Return what a ``config.json`` states for other programs, to be handed on."""
    names = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    return {name: stated[name] for name in names if stated.get(name) is not None}
