"""A directory of weights that gets its name when it is complete: safetensors files, and what goes with them."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from lightning_boost.checkpoint_tools.safetensors_format import Entry, write_safetensors
from lightning_boost.new_directory import NewDirectory, unfinished

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
"""What else a directory of weights may hold."""


def check_out(out: Path, source: Path, *, overwrite: bool) -> None:
    """Check that a directory may be made of what is read at ``source``, or replaced by it.

    Raises:
        ValueError: If it exists and is not to be replaced, holds what this package does not write, is where the source
            is, or lies inside it.
    """
    folder = (source.parent if source.is_file() else source).resolve()
    if out.resolve() == folder:
        raise ValueError(f"{out} holds the model that is read, and is not replaced. Choose another directory.")
    if source.is_dir() and folder in out.resolve().parents:
        raise ValueError(f"{out} lies inside {source}, and would be removed with it. Choose another directory.")
    if not out.exists():
        return
    if not overwrite:
        raise ValueError(f"{out} exists already. Choose another name, or set overwrite to replace it.")
    foreign = [file.name for file in out.iterdir() if not _is_ours(file.name)] if out.is_dir() else [out.name]
    if foreign:
        raise ValueError(f"{out} is not replaced: it is no earlier export alone ({', '.join(sorted(foreign)[:3])}).")


def _is_ours(name: str) -> bool:
    return name in (_INDEX, *COMPANIONS) or (name.startswith("model") and name.endswith(".safetensors"))


@contextmanager
def new_directory(out: Path, num_bytes: int) -> Iterator[Path]:
    """Give a directory to write to; it becomes ``out`` if all goes well, and is removed if not.

    Raises:
        ValueError: If there is no room for so many bytes.
    """
    new = NewDirectory(out)
    try:
        free = shutil.disk_usage(out.parent).free
        if free < num_bytes:
            raise ValueError(f"the weights take {num_bytes:,} bytes, and {free:,} are free at {out.parent}.")
        yield unfinished(out)
        new.publish()
    finally:
        # what has its name by now stays
        new.discard()


def write_json(file: Path, content: object) -> None:
    """Write a JSON file for people too."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_weights(folder: Path, entries: list[Entry], max_shard_bytes: int, read: Callable[[str], Tensor]) -> list[str]:
    """Write one file, or several and their index; return their names.

    Args:
        folder: Where to.
        entries: All tensors.
        max_shard_bytes: Above which there are several files; a larger tensor has one of its own.
        read: Gives a tensor by its name; called once for each.
    """
    shards = _shards(entries, max_shard_bytes)
    if len(shards) == 1:
        write_safetensors(folder / _SINGLE, shards[0], read)
        return [_SINGLE]
    place_of: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(folder / file, shard, read)
        place_of |= {entry.name: file for entry in shard}
    index = {"metadata": {"total_size": sum(entry.num_bytes for entry in entries)}, "weight_map": place_of}
    write_json(folder / _INDEX, index)
    return [*sorted(set(place_of.values())), _INDEX]


def _shards(entries: list[Entry], max_shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        size = sum(other.num_bytes for other in shards[-1])
        if shards[-1] and size + entry.num_bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    return shards
