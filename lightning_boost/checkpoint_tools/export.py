"""A checkpoint's weights as safetensors files, for whoever does not know this package."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lightning_boost.checkpoint_tools.output import check_out, new_directory, write_json, write_weights
from lightning_boost.checkpoint_tools.run_model import describe_run, exported_names
from lightning_boost.checkpoint_tools.safetensors_format import DTYPES, Entry
from lightning_boost.checkpoint_tools.stored import MODEL_PREFIX, StoredCheckpoint, StoredTensor
from lightning_boost.checkpoint_tools.summary import natural_order
from lightning_boost.interchange.files import CONFIG_FILE
from lightning_boost.interchange.own import BOOST
from lightning_boost.strategy.run_state import saved_ties


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

    Where the run has noted its model's configuration, it is written beside them: this package's own format. One tensor
    is in memory at a time. The directory gets its name when it is complete.

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
    check_out(out, stored.path, overwrite=overwrite)
    tensors, left_out = _tensors_to_export(stored)
    total = sum(tensor.num_bytes for tensor in tensors.values())
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

    entries = [Entry(name, tensor.shape, tensor.dtype, tensor.num_bytes) for name, tensor in tensors.items()]
    with new_directory(out, total) as folder:
        files = write_weights(folder, entries, max_shard_bytes, read)
        if config := _config_of(stored):
            write_json(folder / CONFIG_FILE, config)
            files.append(CONFIG_FILE)
    return Export(files, len(tensors), total, left_out)


def _config_of(stored: StoredCheckpoint) -> dict[str, Any]:
    """Return the ``config.json`` of a run's model, or nothing if it is none of this package's."""
    try:
        return BOOST.write_config(describe_run(stored, BOOST.name).config)
    except ValueError:
        return {}


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
