"""Checkpoints that do not know the layout: torch's distributed format under the names and shapes of one process.

A checkpoint is a directory. It is written under another name and renamed when complete, so a directory that has the
right name is whole.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

TRAINER_STATE_FILE = "meta.pt"
"""Everything that is not a tensor of the model or of an optimizer; Lightning's name for it."""

# without flattening, the parameter groups of one process would overwrite those of the others
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the model's state under its one-process names, tensors as this process's shares."""
    return get_model_state_dict(model)


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state, flat, under the names of the parameters."""
    return get_optimizer_state_dict(model, optimizer, options=_OPTIONS)


def save_checkpoint(path: Path, tensors: dict[str, Any], trainer_state: dict[str, Any]) -> None:
    """Write a checkpoint; every process calls this with the same path.

    Args:
        path: Directory to make. If it exists, it is replaced once the new one is complete.
        tensors: State of the model and of optimizers; each process hands in its shares.
        trainer_state: The rest; process 0's is written.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    is_first = dist.get_rank() == 0
    if is_first:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    dcp.save(tensors, checkpoint_id=unfinished)
    if is_first:
        torch.save(trainer_state, unfinished / TRAINER_STATE_FILE)
        _publish(unfinished, path)
    dist.barrier()


def load_checkpoint(path: Path, model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    """Load the states of a model and its optimizers, in place, whatever layout saved them; return the rest.

    Args:
        path: A directory that ``save_checkpoint`` wrote.
        model: Spread over the present layout.
        optimizers: Those of the present run; none where only weights are wanted.

    Raises:
        FileNotFoundError: If there is no checkpoint at ``path``.
    """
    if not (path / TRAINER_STATE_FILE).is_file():
        kind = "is a single file" if path.is_file() else "has no meta.pt" if path.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"checkpoint {path} {kind}; strategy 'boost' loads the directories that it saves"
            " (Trainer.save_checkpoint, ModelCheckpoint)."
        )
    state = {"state_dict": model_state(model)}
    state |= {f"optimizer_{index}": optimizer_state(model, optimizer) for index, optimizer in enumerate(optimizers)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["state_dict"])
    for index, optimizer in enumerate(optimizers):
        set_optimizer_state_dict(model, optimizer, state[f"optimizer_{index}"], options=_OPTIONS)
    trainer_state: dict[str, Any] = torch.load(path / TRAINER_STATE_FILE, weights_only=True)
    return trainer_state


def _publish(unfinished: Path, path: Path) -> None:
    """Give a complete checkpoint its name, and only then remove the one that had it."""
    replaced = path.with_name(f".{path.name}.replaced")
    if path.exists():
        path.rename(replaced)
    unfinished.rename(path)
    if replaced.is_dir():
        shutil.rmtree(replaced)
    else:
        replaced.unlink(missing_ok=True)
