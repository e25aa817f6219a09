"""What runs in each step of a fit: operators of torch, and collectives of the tensor axis."""

import contextlib
from typing import NamedTuple

import lightning.pytorch as pl
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_boost.collectives import count_collectives


class Step(NamedTuple):
    operations: int
    launches: int
    values: int


class _Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.num_seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_seen += 1
        return func(*args, **(kwargs or {}))


class StepWatch(pl.Callback):
    """Counts from one start of a batch to the next; as a Trainer's first callback what the others run too."""

    def __init__(self):
        self.steps, self._watch = [], contextlib.ExitStack()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._watch.close()
        operations = self._watch.enter_context(_Operations())
        log = self._watch.enter_context(count_collectives())
        self._watch.callback(self._note, pl_module, operations, log)

    def on_train_end(self, trainer, pl_module):
        self._watch.close()

    def _note(self, pl_module, operations, log):
        traffic = log.total()
        self.steps.append(Step(operations.num_seen, traffic.launches, traffic.values))
