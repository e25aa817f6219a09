"""Whether a checkpoint is whole: every file, every tensor, every value, one tensor in memory at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_boost.checkpoint import TRAINER_STATE_FILE
from lightning_boost.checkpoint_tools.stored import StoredCheckpoint, StoredTensor


class Fault(NamedTuple):
    """One thing that is wrong."""

    where: str
    """A file or a tensor."""

    what: str


class Verification(NamedTuple):
    """What was looked at, and what is wrong with it."""

    num_files: int
    num_tensors: int
    num_bytes: int
    faults: list[Fault]


def verify_checkpoint(path: Path, on_bytes: Callable[[int, int], None] = lambda done, total: None) -> Verification:
    """Read all of a checkpoint and look for faults.

    Args:
        path: Its directory.
        on_bytes: Told how many bytes were read, of how many.

    Raises:
        FileNotFoundError: If nothing at ``path`` looks like a checkpoint.
        PermissionError: If a file may not be read, which says nothing of what it holds.
    """
    try:
        stored = StoredCheckpoint(path, check_sums=True)
    except FileNotFoundError:
        if not (path / ".metadata").is_file():
            raise
        return Verification(0, 0, 0, [Fault(TRAINER_STATE_FILE, "is missing")])
    except ValueError as error:
        return Verification(0, 0, 0, [Fault(".metadata", str(error))])
    faults = [Fault(name, fault) for name, fault in stored.damaged_files().items()]
    damaged = {fault.where for fault in faults}
    try:
        _ = stored.trainer_state
    except ValueError as error:
        faults.append(Fault(TRAINER_STATE_FILE, str(error)))
    faults += _faults_of_values(stored, damaged)
    total, done = sum(tensor.num_bytes for tensor in stored.tensors.values()), 0
    for tensor in stored.tensors.values():
        fault = _fault_of(stored, tensor, damaged)
        if fault is not None:
            faults.append(Fault(tensor.name, fault))
        done += tensor.num_bytes
        on_bytes(done, total)
    return Verification(len(stored.files), len(stored.tensors), total, faults)


def _faults_of_values(stored: StoredCheckpoint, damaged: set[str]) -> list[Fault]:
    """Look at what is saved beside the tensors."""
    faults = []
    for key in stored.other_values:
        try:
            if not stored.files_of(key) & damaged:
                stored.read_other(key)
        except PermissionError:
            raise
        except (ValueError, OSError) as error:
            faults.append(Fault(key, str(error)))
    return faults


def _fault_of(stored: StoredCheckpoint, tensor: StoredTensor, damaged: set[str]) -> str | None:
    try:
        # a damaged file is named already
        if stored.files_of(tensor.key) & damaged:
            return None
        return _not_finite(stored.read_tensor(tensor))
    except PermissionError:
        raise
    except (ValueError, OSError) as error:
        return str(error)


def _not_finite(values: Tensor) -> str | None:
    if not values.is_floating_point() or bool(torch.isfinite(values).all()):
        return None
    return f"{int(values.isnan().sum()):,} NaN and {int(values.isinf().sum()):,} infinite of {values.numel():,} values"
