"""A model in files of one format, written in another."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_boost.checkpoint_tools.logit_probe import Probe, Values, WholeValue, probe
from lightning_boost.checkpoint_tools.output import COMPANIONS, check_out, new_directory, write_json, write_weights
from lightning_boost.checkpoint_tools.run_model import describe_run
from lightning_boost.checkpoint_tools.safetensors_format import Entry
from lightning_boost.checkpoint_tools.stored import StoredCheckpoint
from lightning_boost.config import LlamaConfig, LowRankConfig
from lightning_boost.interchange.detect import format_called
from lightning_boost.interchange.files import CONFIG_FILE, OnPickle, find_weights
from lightning_boost.interchange.hugging_face import HF_DENSE, options_left_out
from lightning_boost.interchange.keys import Format
from lightning_boost.interchange.own import BOOST
from lightning_boost.interchange.source import SourceModel, carried_options, open_model, parameters_of

_ROUNDING_STEPS = 1000
"""Of the stored dtype, by which logits may differ, relative to the largest, where factors were multiplied."""


class Conversion(NamedTuple):
    """What was written, and what the model computed before and after."""

    source_format: str
    format: str
    num_parameters: int
    before: Probe
    after: Probe
    max_logit_difference: float
    files: list[str]
    left_out: list[str]
    """Options for which the format has no place."""


@dataclass(frozen=True)
class _Product:
    """The one matrix that a pair of factors is."""

    factor_a: WholeValue
    factor_b: WholeValue

    @property
    def shape(self) -> tuple[int, ...]:
        return self.factor_b.shape[0], self.factor_a.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.factor_a.dtype, self.factor_b.dtype)

    def whole(self) -> Tensor:
        # rounded once
        return (self.factor_b.whole().double() @ self.factor_a.whole().double()).to(self.dtype)


def convert_model(
    source: SourceModel,
    out: Path,
    *,
    to: str,
    max_shard_bytes: int,
    overwrite: bool = False,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> Conversion:
    """Write a model's files in another format, and try both on the same tokens before the new ones get their name.

    Args:
        source: The model.
        out: The directory to make.
        to: Name of its format.
        max_shard_bytes: Above which there are several files of weights, and an index of them.
        overwrite: Whether to replace an earlier result at ``out``.
        on_bytes: Told how many bytes were written, of how many.

    Raises:
        ValueError: If the model cannot be read, ``out`` may not be replaced, or the format cannot hold the model.
    """
    target = format_called(to)
    check_out(out, source.path, overwrite=overwrite)
    stated = target.write_config(source.config)
    config = _multiplied(source.config) if target is HF_DENSE else source.config
    values = {name: _value(name, source.values) for name, _ in parameters_of(config)}
    before = probe(source.config, source.values)
    with new_directory(out, sum(_num_bytes(value) for value in values.values())) as folder:
        files = _write(folder, target, config, values, max_shard_bytes, on_bytes)
        write_json(folder / CONFIG_FILE, {**stated, **_for_others(source, target)})
        files += [CONFIG_FILE, *_copy_companions(source.path, folder)]
        written = open_model(folder, format_name=target.name)
        after = probe(written.config, written.values)
        difference = _checked_difference(before, after, source)
    num_parameters = sum(parameter.numel() for _, parameter in parameters_of(config))
    left_out = [] if target is BOOST else options_left_out(source.config)
    return Conversion(source.format.name, to, num_parameters, before, after, difference, files, left_out)


def open_any(path: Path, *, format_name: str | None = None, on_pickle: OnPickle | None = None) -> SourceModel:
    """Look at a model in files, or at the one in a run's checkpoint; arguments and errors as ``open_model``."""
    if not (path / ".metadata").is_file():
        return open_model(path, format_name=format_name, on_pickle=on_pickle)
    stored = StoredCheckpoint(path, check_sums=True)
    stored.check_files()
    return describe_run(stored, format_name)


def _multiplied(config: LlamaConfig) -> LlamaConfig:
    return replace(config, low_rank=LowRankConfig(kind="full_rank"))


def _value(name: str, values: Values) -> WholeValue:
    """Return the value of a parameter; of a matrix that is two factors, their product."""
    place, _, leaf = name.rpartition(".")
    if name in values:
        return values[name]
    if leaf == "bias":
        return values[f"{place}.factor_b.bias"]
    return _Product(values[f"{place}.factor_a.weight"], values[f"{place}.factor_b.weight"])


def _num_bytes(value: WholeValue) -> int:
    return torch.Size(value.shape).numel() * value.dtype.itemsize


def _write(
    folder: Path,
    target: Format,
    config: LlamaConfig,
    values: Values,
    max_shard_bytes: int,
    on_bytes: Callable[[int, int], None],
) -> list[str]:
    keys = {name: target.key_of(name, config.num_hidden_layers) for name in values}
    places = {key.name: (values[name], key.is_transposed) for name, key in keys.items()}
    done, total = 0, sum(_num_bytes(value) for value in values.values())

    def read(key: str) -> Tensor:
        nonlocal done
        value, is_transposed = places[key]
        done += _num_bytes(value)
        on_bytes(done, total)
        return value.whole().t() if is_transposed else value.whole()

    entries = [
        Entry(key, value.shape[::-1] if is_transposed else value.shape, value.dtype, _num_bytes(value))
        for key, (value, is_transposed) in places.items()
    ]
    return write_weights(folder, entries, max_shard_bytes, read)


def _for_others(source: SourceModel, target: Format) -> dict[str, Any]:
    """Return what other programs want to know of the model."""
    dtypes = {str(value.dtype).removeprefix("torch.") for value in source.values.values()}
    named = {"torch_dtype": dtypes.pop()} if len(dtypes) == 1 and target is not BOOST else {}
    return {**named, **carried_options(source.stated)}


def _copy_companions(path: Path, folder: Path) -> list[str]:
    """Copy tokenizers and the like; a run's checkpoint has none."""
    if (path / ".metadata").is_file():
        return []
    beside = find_weights(path).parent
    found = [name for name in COMPANIONS if name != CONFIG_FILE and (beside / name).is_file()]
    for name in found:
        shutil.copyfile(beside / name, folder / name)
    return found


def _checked_difference(before: Probe, after: Probe, source: SourceModel) -> float:
    difference = (before.logits - after.logits).abs().max().item()
    step = max(torch.finfo(value.dtype).eps for value in source.values.values())
    largest = max(1.0, before.logits.abs().max().item())
    # not above a tenth, however coarse the dtype
    if not difference <= largest * min(0.1, _ROUNDING_STEPS * step):
        raise ValueError(
            f"what was written computes something else than checkpoint {source.path}: logits differ by"
            f" {difference:.3g} of {largest:.3g}. Nothing was kept; please report this."
        )
    return difference
