"""Where in its data a run stands, so that one that goes on sees what it would have seen.

Lightning begins an epoch's data anew when a run goes on in the middle of it, unless the loader keeps a state. Here a
plain ``DataLoader`` is given one: how much of which epoch was trained on. Going on, that is read and left out.
"""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_boost.strategy.random_numbers import (
    RandomStates,
    TrainingRandomNumbers,
    random_states,
    set_random_states,
)


def keep_position(loader: object, trainer: Trainer, numbers: TrainingRandomNumbers) -> object:
    """Give a training loader a position, in place; anything but a plain ``DataLoader`` stays as it is."""
    if isinstance(loader, DataLoader) and not hasattr(loader, "state_dict"):
        loader.__class__ = type(type(loader).__name__, (_WithPosition, type(loader)), {})
    if isinstance(loader, _WithPosition):
        loader.__dict__.update(trainer=trainer, numbers=numbers, resume=None)
    return loader


def keep_aside(loader: object, numbers: TrainingRandomNumbers) -> object:
    """Let iterations of an evaluation's loader begin without drawing from the random numbers of training, in place."""
    if isinstance(loader, DataLoader) and not isinstance(loader, _Aside):
        loader.__class__ = type(type(loader).__name__, (_Aside, type(loader)), {})
        loader.__dict__["numbers"] = numbers
    return loader


class _Aside(DataLoader[Any]):
    """Draws its workers' seed aside."""

    numbers: TrainingRandomNumbers

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        present = random_states(self.numbers.device)
        batches = iter(super().__iter__())
        set_random_states(present, self.numbers.device)
        return batches


class _WithPosition(DataLoader[Any]):
    """Makes a ``DataLoader`` one that Lightning saves the state of."""

    trainer: Trainer
    numbers: TrainingRandomNumbers
    resume: dict[str, Any] | None
    """Where the next iteration begins, if a run goes on."""

    states_at_start: RandomStates
    """Random numbers as they were before the present iteration."""

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        resume, device = self.resume, self.numbers.device
        present = random_states(device)
        self.__dict__.update(resume=None, states_at_start=present)
        if resume is None:
            return iter(super().__iter__())
        # an iteration draws its workers' seed, and a sampler may draw its order, when it begins
        is_new_epoch = resume["num_batches"] == 0 and self.numbers.next is not None
        self.__dict__["states_at_start"] = self.numbers.next if is_new_epoch else resume["states_at_start"]
        set_random_states(self.states_at_start, device)
        for sampler in (self.sampler, self.batch_sampler):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(resume["epoch"])
        batches = iter(super().__iter__())
        if is_new_epoch:
            self.numbers.next = random_states(device)
        for _ in range(resume["num_batches"]):
            next(batches, None)
        set_random_states(present, device)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch that was trained on; that of the next epoch behind the last one."""
        loop = self.trainer.fit_loop
        progress = loop.epoch_loop.batch_progress
        is_finished = progress.is_last_batch or progress.current.ready >= self.trainer.num_training_batches
        return {
            "epoch": loop.epoch_progress.current.ready - (0 if is_finished else 1),
            "num_batches": 0 if is_finished else progress.current.ready,
            "batch_size": self.batch_size,
            "num_replicas": self._num_replicas,
            "states_at_start": self.states_at_start,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration at a position; count its batches as this loader makes them.

        Raises:
            ValueError: If the position lies inside one of its batches.
        """
        before, now = state["num_replicas"], self._num_replicas
        if before != now and isinstance(self.dataset, IterableDataset):
            rank_zero_warn(
                f"The checkpoint was saved with {before} replicas, and there are {now}: a stream is dealt out to them"
                " otherwise, so some samples come twice and some not at all."
            )
        num_batches = state["num_batches"]
        if self.batch_size and state["batch_size"]:
            num_samples = num_batches * state["batch_size"] * before
            num_batches, inside = divmod(num_samples, self.batch_size * now)
            if inside:
                raise ValueError(
                    f"batch_size ({self.batch_size}) × replicas ({now}) must divide the {num_samples} samples of the"
                    " epoch that the checkpoint's run has seen. Choose another batch_size, or go on from a checkpoint"
                    " of an epoch's end."
                )
        _recount(self.trainer, num_batches - state["num_batches"])
        self.__dict__["resume"] = {**state, "num_batches": num_batches}

    @property
    def _num_replicas(self) -> int:
        return int((self.trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))


def _recount(trainer: Trainer, added: int) -> None:
    """Correct the count of an epoch's batches, since batches hold more or fewer samples than they did."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    if added:
        for name in ("ready", "started", "processed", "completed"):
            setattr(progress, name, getattr(progress, name) + added)
