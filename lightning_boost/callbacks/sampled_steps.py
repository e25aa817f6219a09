"""Steps whose collectives are recorded on all axes, with their times."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from lightning_boost.communication_trace import CommunicationTrace, Event


@dataclass
class Sample:
    """An optimizer step whose collectives were recorded, on one process."""

    step: int
    is_of_gpu: bool = False
    """Whether times are those of a GPU's stream, and not of the clock that the processes of a host share."""

    began: list[float] = field(default_factory=list)
    """When each batch of the step began, in seconds on the clock of the events."""

    lasted: list[float] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of the step's batches, from the start of each to its end."""
        return sum(self.lasted)

    def blocked_shares(self) -> dict[str, float | None]:
        """Return which share of the step this process was blocked by each axis; ``None`` where that is not known."""
        blocked: dict[str, float | None] = {}
        for event in self.events:
            so_far = blocked.get(event.axis, 0.0)
            blocked[event.axis] = None if so_far is None or event.blocked is None else so_far + event.blocked
        return {axis: None if seconds is None else seconds / self.seconds for axis, seconds in blocked.items()}


class StepSampler:
    """Records every n-th optimizer step, all batches that are accumulated in it; others take no time stamp.

    Args:
        every_n_steps: From one sample to the next.
        first_step: The first that is recorded.
        axes: The short name of the axis of each process group, by the group's name.
        is_cuda: Whether a GPU's time is to be taken, which is waited for at both ends of a batch.
    """

    def __init__(self, every_n_steps: int, first_step: int, axes: Mapping[str, str], *, is_cuda: bool) -> None:
        self._every_n_steps = every_n_steps
        self._due = first_step
        self._axes = axes
        self._is_cuda = is_cuda
        self._step_before: int | None = None
        self._sample: Sample | None = None
        self._began = 0.0
        self.trace: CommunicationTrace | None = None
        """Of the batch that is run; ``None`` if its step is not sampled."""

    def begin_batch(self, step: int, watch: ExitStack) -> None:
        """Record the batch until ``watch`` closes, if its step is due."""
        if step != self._step_before:
            self._sample = Sample(step, is_of_gpu=self._is_cuda) if step >= self._due else None
        self._step_before = step
        self.trace = None
        if self._sample is not None:
            self.trace = watch.enter_context(CommunicationTrace(self._axes, is_cuda=self._is_cuda).open())
            self._began = self._now()

    def end_batch(self, *, is_last_of_step: bool) -> Sample | None:
        """Add the batch to its sample, and return that if it is whole."""
        sample, trace = self._sample, self.trace
        if sample is None or trace is None:
            return None
        sample.began.append(self._began)
        sample.lasted.append(self._now() - self._began)
        sample.events += trace.events()
        if not is_last_of_step:
            return None
        self._sample = None
        self._due = sample.step + self._every_n_steps
        return sample

    def _now(self) -> float:
        if self._is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def waiting_times(samples: Sequence[Sample], hosts: Sequence[str]) -> list[list[float | None]]:
    """Return of each process's collectives how long it waited in them until the last process had come, in seconds.

    The processes of a group issue its collectives in one order. What was begun by whom is told by the clock that they
    share on a host; where a group spans several, or a time is not known, it is ``None``. So it is for ``send`` and
    ``recv``, in which processes do not wait for one another as a group, and on GPUs: one's time is put on the host's
    clock with an error that may be as long as a transfer.
    """
    orders: dict[str, dict[int, list[int]]] = defaultdict(dict)
    for process, sample in enumerate(samples):
        for place, event in enumerate(sample.events):
            orders[event.group].setdefault(process, []).append(place)
    found: list[list[float | None]] = [[None] * len(sample.events) for sample in samples]
    for members in orders.values():
        if len({hosts[process] for process in members}) > 1 or any(samples[process].is_of_gpu for process in members):
            continue
        if len(set(map(len, members.values()))) > 1:
            continue
        for places in zip(*members.values(), strict=True):
            events = [samples[process].events[place] for process, place in zip(members, places, strict=True)]
            for process, place, event in zip(members, places, events, strict=True):
                found[process][place] = _waiting(event, events)
    return found


def _waiting(event: Event, everyones: Sequence[Event]) -> float | None:
    starts = [other.started for other in everyones if other.started is not None]
    is_known = len(starts) == len(everyones) and event.wait_began is not None and event.ended is not None
    if not is_known or event.operation in ("send", "recv") or len({other.operation for other in everyones}) > 1:
        return None
    assert event.wait_began is not None
    assert event.ended is not None
    return max(0.0, min(max(starts), event.ended) - event.wait_began)
