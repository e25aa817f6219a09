"""A checkpoint's weights as safetensors files, for whoever does not know this package."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from lightning_boost.checkpoint_tools.safetensors_format import DTYPES, Entry, write_safetensors
from lightning_boost.checkpoint_tools.stored import MODEL_PREFIX, StoredCheckpoint, StoredTensor
from lightning_boost.checkpoint_tools.summary import natural_order
from lightning_boost.new_directory import NewDirectory, unfinished
from lightning_boost.strategy.run_state import saved_ties

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Export(NamedTuple):
    """What was written."""

    files: list[str]
    num_tensors: int
    num_bytes: int
    left_out: list[str]
    """Names of what the files have no place for, and of weights that are another one's."""


def export_checkpoint(
    path: Path,
    out: Path,
    *,
    max_shard_bytes: int,
    overwrite: bool = False,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> Export:
    """Write the model's tensors, whole and under the names of one process, into a new directory.

    One tensor is in memory at a time. The directory gets its name when it is complete.

    Args:
        path: The checkpoint.
        out: The directory to make.
        max_shard_bytes: Above which there are several files, and an index of them; a larger tensor has one of its own.
        overwrite: Whether to replace an earlier export at ``out``.
        on_bytes: Told how many bytes were written, of how many.

    Raises:
        FileNotFoundError: If there is no checkpoint at ``path``.
        ValueError: If it is damaged, ``out`` may not be replaced, or there is no room for it.
    """
    stored = StoredCheckpoint(path, check_sums=True)
    stored.check_files()
    if stored.path.resolve() in out.resolve().parents:
        raise ValueError(f"{out} lies inside the checkpoint, and would be removed with it. Choose another place.")
    _check_out(out, overwrite=overwrite)
    tensors, left_out = _tensors_to_export(stored)
    total = sum(tensor.num_bytes for tensor in tensors.values())
    new = NewDirectory(out)
    try:
        _check_room(out.parent, total)
        done = 0

        def read(name: str) -> Tensor:
            nonlocal done
            try:
                whole = stored.read_tensor(tensors[name])
            except ValueError as error:
                raise ValueError(f"checkpoint {stored.path}: {tensors[name].name}: {error}.") from None
            done += tensors[name].num_bytes
            on_bytes(done, total)
            return whole

        files = _write(unfinished(out), tensors, max_shard_bytes, read)
        new.publish()
    finally:
        # what has its name by now stays
        new.discard()
    return Export(files, len(tensors), total, left_out)


def exported_names(names: list[str]) -> dict[str, str]:
    """Return the name of each tensor of a ``state_dict`` in an export.

    A LightningModule's attribute in front (``model.``) is left out where the names are then Hugging Face's, which have
    ``lm_head.weight`` and ``model.embed_tokens.weight``. Other names stay as they are.
    """
    for name in names:
        prefix = name.removesuffix(_HEAD)
        is_hugging_face = prefix != name and f"{prefix}{_EMBEDDING}" in names
        if is_hugging_face and all(other.startswith(prefix) for other in names):
            return {other: other.removeprefix(prefix) for other in names}
    return {name: name for name in names}


def _check_out(out: Path, *, overwrite: bool) -> None:
    if not out.exists():
        return
    if not overwrite:
        raise ValueError(f"{out} exists already. Choose another name, or set overwrite to replace it.")
    foreign = [file.name for file in out.iterdir() if not _is_ours(file.name)] if out.is_dir() else [out.name]
    if foreign:
        raise ValueError(f"{out} is not replaced: it is no earlier export alone ({', '.join(sorted(foreign)[:3])}).")


def _is_ours(name: str) -> bool:
    return name == _INDEX or (name.startswith("model") and name.endswith(".safetensors"))


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(f"the export takes {needed:,} bytes, and {free:,} are free at {folder}.")


def _tensors_to_export(stored: StoredCheckpoint) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the tensors under their exported names, in order, and what is left out."""
    names = sorted(stored.model_tensors, key=natural_order)
    new_names, ties = exported_names(names), saved_ties(stored.trainer_state)
    left_out = [f"{name} (is {ties[name]})" for name in names if name in ties]
    left_out += [key.removeprefix(MODEL_PREFIX) for key in stored.other_values if key.startswith(MODEL_PREFIX)]
    tensors = {new_names[name]: stored.model_tensors[name] for name in names if name not in ties}
    for tensor in tensors.values():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{tensor.name} is {tensor.dtype}, for which safetensors has no name.")
    return tensors, left_out


def _write(
    folder: Path, tensors: dict[str, StoredTensor], max_shard_bytes: int, read: Callable[[str], Tensor]
) -> list[str]:
    """Write one file, or several and their index; return their names."""
    entries = [Entry(name, tensor.shape, tensor.dtype, tensor.num_bytes) for name, tensor in tensors.items()]
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
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [*sorted(set(place_of.values())), _INDEX]


def _shards(entries: list[Entry], max_shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        size = sum(other.num_bytes for other in shards[-1])
        if shards[-1] and size + entry.num_bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    return shards
