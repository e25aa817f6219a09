"""What the tensor axis moves in a fit, counted in every batch and kept beside the formula."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning.pytorch import LightningModule, Trainer

from lightning_boost.callbacks.traffic_formula import ModelCall, TrafficFormula
from lightning_boost.collectives import CollectiveLog, count_collectives
from lightning_boost.communication_trace import WHOLE_WORLD
from lightning_boost.cost import Volume

BESIDE_THE_MODEL = ("gradient_norm", "verification")
"""Chunks of what other callbacks and clipping ask for: no formula tells how often."""


class Key(NamedTuple):
    """What figures are kept apart for."""

    axis: str
    chunk: str
    pass_: str
    operation: str


@dataclass
class Counts:
    """What one process has counted since the fit began, and what the formula says of the same steps."""

    num_steps: int = 0
    num_batches: int = 0
    counted: dict[Key, Volume] = field(default_factory=dict)
    """Of the tensor axis's door."""

    expected: dict[Key, Volume] = field(default_factory=dict)
    missing_because: str | None = None
    """Why there is no formula."""

    @property
    def keys(self) -> set[Key]:
        """What was counted, or should have been."""
        return {*self.counted, *self.expected}

    def is_as_formula(self, key: Key) -> bool | None:
        """Tell whether what was counted is what the formula says; ``None`` where it says nothing."""
        if key.axis != "tensor" or self.missing_because is not None or key.chunk in BESIDE_THE_MODEL:
            return None
        if key not in self.keys:
            return None  # a vote, seen in samples only
        return self.counted.get(key) == self.expected.get(key)


class CountedTraffic:
    """Counts the collectives of this process's batches, and compares them with the formula.

    Args:
        trainer: Its strategy and precision are in the formula.
        pl_module: The module, its model on the mesh.
        axes: The short name of the axis of each process group, by the group's name.
        warns: Whether this process says so where the two differ, once; one of each stage is enough.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule, axes: Mapping[str, str], *, warns: bool) -> None:
        self._formula = TrafficFormula(trainer, pl_module)
        self._axes = axes
        self._warns = warns
        self._differs = False
        self._calls: list[ModelCall] = []
        self._log = CollectiveLog()
        self.counts = Counts(missing_because=self._formula.missing_because)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Count one batch until the context ends."""
        with self._formula.calls_noted() as self._calls, count_collectives() as self._log:
            yield

    def add_batch(self, step: int, *, has_stepped: bool) -> None:
        """Add what was counted since the context was last entered, and compare.

        Args:
            step: The optimizer step that the batch belongs to.
            has_stepped: Whether it was the step's last batch.
        """
        self.counts.num_batches += 1
        self.counts.num_steps += has_stepped
        for key, traffic in self._log.traffic.items():
            axis = self._axes.get(self._log.groups[key], WHOLE_WORLD)
            moved = Volume(traffic.launches, traffic.values, traffic.bytes)
            _add(self.counts.counted, Key(axis, key.chunk, key.pass_, key.operation), moved)
        if self.counts.missing_because is not None or self._formula.size == 1:
            return
        if not self._calls:
            self.counts.missing_because = "a training step did not call the model as a whole"
            return
        for (operation, chunk, pass_), volume in self._formula.expected(self._calls).items():
            _add(self.counts.expected, Key("tensor", chunk, pass_, operation), volume)
        if not self._differs:
            self._compare(step)

    def _compare(self, step: int) -> None:
        different = [key for key in self.counts.keys if self.counts.is_as_formula(key) is False]
        self._differs = bool(different)
        if different and self._warns:
            warnings.warn(_describe(different, self.counts, step), RuntimeWarning, stacklevel=2)


def plus(one: Volume | None, other: Volume) -> Volume:
    """Add two volumes, of which one may not be there yet."""
    return other if one is None else Volume(*(mine + yours for mine, yours in zip(one, other, strict=True)))


def _add(volumes: dict[Key, Volume], key: Key, volume: Volume) -> None:
    volumes[key] = plus(volumes.get(key), volume)


def _describe(keys: list[Key], counts: Counts, step: int) -> str:
    key = min(keys)
    counted, expected = (volumes.get(key, Volume(0, 0, 0)) for volumes in (counts.counted, counts.expected))
    return (
        f"the tensor axis moves something else than the formula says, up to step {step}: {key.operation} of"
        f" {key.chunk}, {key.pass_}, was counted {counted.launches} times with {counted.bytes} bytes, and the formula"
        f" says {expected.launches} times with {expected.bytes}; so it is for {len(keys)} kinds of collectives. If the"
        " training_step does more with the model than one forward and backward, that is it; if not, report it."
    )
