"""SIGTERM and SIGUSR1: training stops at the border of a step, together, with a checkpoint of it."""

import logging
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import ReduceOp

from lightning_boost.strategy.lightning_internals import SignalFlags, at_step_borders
from lightning_boost.strategy.resumable import ResumableStrategy

_log = logging.getLogger(__name__)

SAVED_AND_STOPPED = 75
"""Exit code of a run that a signal stopped and that can go on from its checkpoint: ``EX_TEMPFAIL`` of sysexits.h."""


def stop_at_step_borders(trainer: Trainer, device: torch.device) -> None:
    """From now on, look at each border between two optimizer steps whether a process was sent a signal."""
    flags = SignalFlags.of(trainer)
    at_step_borders(trainer, lambda: _heed(trainer, flags, device))


def _heed(trainer: Trainer, flags: SignalFlags, device: torch.device) -> None:
    """Do what the signals ask for that any process has got.

    Raises:
        SIGTERMException: Once the checkpoint is saved, if one of them asks to stop.
    """
    stop, requeue = _agree(flags.to_stop(), flags.to_requeue(), device)
    if requeue and not flags.is_requeued:
        flags.requeue()
    if not stop:
        return
    name = signal.Signals(stop).name
    if flags.is_requeued:
        _stop(trainer, flags, f"{name}: stopping. The requeued job goes on from its own checkpoint.")
    path = interrupted_path(trainer)
    trainer.save_checkpoint(path)
    assert isinstance(trainer.strategy, ResumableStrategy)
    trainer.strategy.finish_saving()
    _stop(trainer, flags, f"{name}: saved {path} and stopping with exit code {SAVED_AND_STOPPED}.")


def _stop(trainer: Trainer, flags: SignalFlags, message: str) -> None:
    flags.received_sigterm = True
    if trainer.is_global_zero:
        _log.warning(message)
    raise SIGTERMException(SAVED_AND_STOPPED)


def _agree(stop: int, requeue: int, device: torch.device) -> tuple[int, int]:
    """Return the largest signal number of each kind over all processes, or 0."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return stop, requeue
    votes = torch.tensor([stop, requeue], device=device)
    dist.all_reduce(votes, op=ReduceOp.MAX)
    stop, requeue = votes.tolist()
    return stop, requeue


def interrupted_path(trainer: Trainer) -> Path:
    """Return where to save: beside the first ModelCheckpoint's, or in ``default_root_dir``."""
    callback = trainer.checkpoint_callback
    folder = callback.dirpath if isinstance(callback, ModelCheckpoint) and callback.dirpath else None
    return Path(folder or trainer.default_root_dir) / f"interrupted_step_{trainer.global_step}.ckpt"
