"""Where in its data a run stands, so that one that goes on sees what it would have seen.

Lightning begins an epoch's data anew when a run goes on in the middle of it, unless the loader keeps a state. Here a
plain ``DataLoader`` is given one: how much of which epoch was trained on. Going on, that is read and left out.
"""

from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.data import sized_len
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
    """Give a loader a position in training, in place; anything but a plain ``DataLoader`` stays as it is."""
    if isinstance(loader, DataLoader) and not hasattr(loader, "state_dict"):
        loader.__class__ = type(type(loader).__name__, (_WithPosition, type(loader)), {"trains": False})
    if isinstance(loader, _WithPosition):
        loader.__dict__.update(trainer=trainer, numbers=numbers, resume=None)
        loader.__dict__["trains"] = loader.trains or trainer.training
    return loader


class _WithPosition(DataLoader[Any]):
    """Makes a ``DataLoader`` one that Lightning saves the state of.

    The same one may be used to train and to evaluate: only what is done in training counts, and only that draws from
    training's random numbers.
    """

    trains: bool
    """Whether it is a training loader; Lightning begins iterations of others in the midst of training too."""

    trainer: Trainer
    numbers: TrainingRandomNumbers
    resume: dict[str, Any] | None
    """Where the next iteration begins, if a run goes on."""

    epoch: int
    """Of the present iteration, as Lightning counts them for samplers."""

    states_at_start: RandomStates
    """Random numbers as they were before the present iteration."""

    had_workers: bool
    """Whether persistent workers were there before the present iteration, and drew no seed for it."""

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        device = self.numbers.device
        present = random_states(device)
        is_training = self.trains and self.trainer.training
        if is_training and self.resume is None:
            epoch: int = self.trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
            self.__dict__.update(epoch=epoch, states_at_start=present, had_workers=self._iterator is not None)
            return iter(super().__iter__())
        batches = self._rest_of_epoch(self.resume) if is_training and self.resume else super().__iter__()
        set_random_states(present, device)
        return iter(batches)

    def _rest_of_epoch(self, position: dict[str, Any]) -> Iterator[Any]:
        """Begin an iteration as it was begun, and leave out what was trained on; draws random numbers."""
        # an iteration draws its workers' seed, and a sampler may draw its order, when it begins
        is_new_epoch = position["num_batches"] == 0 and self.numbers.next is not None
        states = self.numbers.next if is_new_epoch else position["states_at_start"]
        self.__dict__.update(
            resume=None, epoch=position["epoch"], states_at_start=states, had_workers=position["had_workers"]
        )
        if self.had_workers and self._iterator is None:
            # starts them, which draws their seed; the iteration is begun anew below
            super().__iter__()
        set_random_states(self.states_at_start, self.numbers.device)
        for sampler in (self.sampler, self.batch_sampler):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(self.epoch)
        batches = iter(super().__iter__())
        if is_new_epoch:
            self.numbers.next = random_states(self.numbers.device)
        for _ in range(self._within_loader(position["num_batches"])):
            next(batches, None)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch that was trained on; that of the next epoch behind the last one."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        is_finished = progress.is_last_batch or progress.current.ready >= self.trainer.num_training_batches
        return {
            "epoch": self.epoch + is_finished,
            "num_batches": 0 if is_finished else progress.current.ready,
            "batch_size": self.batch_size,
            "num_replicas": self._num_replicas,
            "states_at_start": self.states_at_start,
            "had_workers": self.had_workers or (is_finished and self._iterator is not None),
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
        if state["had_workers"]:
            rank_zero_warn(
                "A run goes on that had persistent_workers: samples come in the uninterrupted run's order, but random"
                " numbers that are drawn in workers, as for augmentation, are others. persistent_workers=False draws"
                " the same."
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
        if num_batches != state["num_batches"]:
            _recount(self.trainer, num_batches)
        had_workers = state["had_workers"] and self.persistent_workers
        self.__dict__["resume"] = {**state, "num_batches": num_batches, "had_workers": had_workers}

    @property
    def _num_replicas(self) -> int:
        return int((self.trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))

    def _within_loader(self, num_batches: int) -> int:
        """Return how far it is into this loader, which may be a shorter one that begins anew beside a longer one."""
        length = sized_len(self)
        return num_batches % length if length else num_batches


def _recount(trainer: Trainer, num_batches: int) -> None:
    """Correct the count of an epoch's batches, since batches hold more or fewer samples than they did."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    added = num_batches - progress.ready
    for name in ("ready", "started", "processed", "completed"):
        setattr(progress, name, getattr(progress, name) + added)


def correct_epochs(checkpoint: dict[str, Any]) -> None:
    """Let Lightning's count of epochs in a checkpoint say where its data stands.

    It does not in a run that went on from an epoch's end, nor where ``max_steps`` has ended a run in the midst of an
    epoch: Lightning would then take the epoch for a finished one.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    positions = [state for state in loop.get("state_dict", {}).get("combined_loader", []) if "states_at_start" in state]
    if not positions or positions[0]["num_batches"] == 0:
        return
    epoch, progress = positions[0]["epoch"], loop["epoch_progress"]
    for name, count in (("ready", epoch + 1), ("started", epoch + 1), ("processed", epoch), ("completed", epoch)):
        added = count - progress["current"][name]
        for counts in (progress["current"], progress["total"]):
            counts[name] += added
