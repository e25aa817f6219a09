"""The one door to the tensor axis: every collective along it is issued, labelled and counted here.

Groups are handed in by name, because the schema of a ``torch.library`` operator carries strings but no process groups.
Tensors must be contiguous: gloo reduces the wrong memory of a sliced view without a word.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

Pass = Literal["forward", "backward", "step"]

# torch 2.13 renamed both and warns on the old names, which older versions have only
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_groups: dict[str, ProcessGroup] = {}
_places: dict[str, tuple[int, int]] = {}
"""Of each group this process's position and the number of processes, as numbers that a compiler takes as they are."""


class Label(NamedTuple):
    """What a collective is for: the chunk of the model it closes, and the pass it runs in."""

    chunk: str
    """``qkv``, ``o``, ``gate_up``, ``down``, ``head``, ``loss``, …"""

    pass_: Pass


class CollectiveKey(NamedTuple):
    """What counts are kept apart for."""

    operation: str
    chunk: str
    pass_: str


@dataclass
class Traffic:
    """What one process handed to collectives."""

    launches: int = 0
    values: int = 0
    """Elements of the tensors handed in by this process."""

    bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.launches + other.launches, self.values + other.values, self.bytes + other.bytes)


@dataclass
class CollectiveLog:
    """Counts of the tensor-axis collectives that ran while the log was open."""

    traffic: dict[CollectiveKey, Traffic] = field(default_factory=dict)
    groups: dict[CollectiveKey, str] = field(default_factory=dict)
    """Names of the groups: not all that is issued here stays on the tensor axis."""

    def add(self, operation: str, label: Label, tensor: Tensor, group: str) -> None:
        """Count one collective that ``tensor`` was handed to."""
        key = CollectiveKey(operation, *label)
        traffic = self.traffic.get(key)
        if traffic is None:
            traffic = self.traffic[key] = Traffic()
            self.groups[key] = group
        # in place, since this runs in every step
        values = tensor.numel()
        traffic.launches += 1
        traffic.values += values
        traffic.bytes += values * tensor.element_size()

    def total(self, *, operation: str | None = None, chunk: str | None = None, pass_: str | None = None) -> Traffic:
        """Sum the counts of all keys that match the given parts."""
        wanted = (operation, chunk, pass_)
        matching = (
            traffic
            for key, traffic in self.traffic.items()
            if all(want in (None, part) for want, part in zip(wanted, key, strict=True))
        )
        return sum(matching, Traffic())


class Recorded(Protocol):
    """A collective that is under way, for whoever takes its time."""

    def waited_for(self) -> None:
        """Note that this process waits from now on."""

    def ended(self) -> None:
        """Note that its result may be used from now on."""


class Recorder(Protocol):
    """Is told of each collective as it is issued."""

    def issue(
        self, operation: str, label: Label, tensor: Tensor, group: ProcessGroup
    ) -> AbstractContextManager[Recorded]:
        """Return a context to issue it in."""


class InFlight(Protocol):
    """A collective that was started."""

    def wait(self) -> object:
        """Wait until its result may be used."""


@dataclass
class _RecordedWork:
    """A collective that was started while a recorder was there."""

    work: InFlight
    record: Recorded

    def wait(self) -> None:
        self.record.waited_for()
        self.work.wait()
        self.record.ended()


_recorder: Recorder | None = None


@contextmanager
def record_collectives(recorder: Recorder) -> Iterator[None]:
    """Tell a recorder of this process's collectives until the context ends; the innermost hears them.

    Collectives that run while there is none take no time stamps.
    """
    global _recorder
    before, _recorder = _recorder, recorder
    try:
        yield
    finally:
        _recorder = before


_open_logs: list[CollectiveLog] = []


@contextmanager
def count_collectives(log: CollectiveLog | None = None) -> Iterator[CollectiveLog]:
    """Open a log, a new one if none is given, that counts this process's tensor-axis collectives in the context."""
    log = CollectiveLog() if log is None else log
    _open_logs.append(log)
    try:
        yield log
    finally:
        _open_logs.remove(log)


def register_group(group: ProcessGroup) -> str:
    """Make a process group known here and return the name that the operators take."""
    _groups[group.group_name] = group
    _places[group.group_name] = dist.get_rank(group), dist.get_world_size(group)
    return group.group_name


def group_size(group: str) -> int:
    """Return the number of processes of a registered group."""
    return _places[group][1]


def group_index(group: str) -> int:
    """Return this process's position in a registered group."""
    return _places[group][0]


def all_reduce(tensor: Tensor, group: str, label: Label) -> None:
    """Sum ``tensor`` over the group, in place."""
    with _issuing("all_reduce", tensor, group, label):
        dist.all_reduce(tensor, group=_groups[group])


def start_all_reduce(tensor: Tensor, group: str, label: Label) -> InFlight:
    """Start summing ``tensor`` over the group, in place; the caller waits before it reads the tensor."""
    return _start("all_reduce", tensor, group, label, partial(dist.all_reduce, tensor))


def start_reduce_scatter(tensor: Tensor, group: str, label: Label) -> tuple[Tensor, InFlight]:
    """Start what ``reduce_scatter`` does; the caller keeps ``tensor``, and waits before it reads its part."""
    part = torch.empty_like(tensor[0])
    launch: Callable[..., InFlight]
    if _is_gloo(group):
        launch = partial(_SentParts, part, tensor)
    else:
        launch = partial(_reduce_scatter, part.view(-1), tensor.view(-1))
    return part, _start("reduce_scatter", tensor, group, label, launch)


def _start(operation: str, tensor: Tensor, group: str, label: Label, launch: Callable[..., InFlight]) -> InFlight:
    _check_and_count(operation, tensor, group, label)
    if _recorder is None:
        return launch(group=_groups[group], async_op=True)
    with _recorder.issue(operation, label, tensor, _groups[group]) as record:
        work = launch(group=_groups[group], async_op=True)
    return _RecordedWork(work, record)


def all_gather(tensor: Tensor, group: str, label: Label) -> Tensor:
    """Return every process's ``tensor``, stacked: ``[S, …]`` for a group of ``S`` processes."""
    gathered = tensor.new_empty(group_size(group) * tensor.numel())
    with _issuing("all_gather", tensor, group, label):
        _all_gather(gathered, tensor.view(-1), group=_groups[group])
    return gathered.view(group_size(group), *tensor.shape)


def reduce_scatter(tensor: Tensor, group: str, label: Label) -> Tensor:
    """Sum ``tensor`` of shape ``[S, …]`` over the group's ``S`` processes and return this process's part ``[…]``."""
    part, in_flight = start_reduce_scatter(tensor, group, label)
    in_flight.wait()
    return part


class _SentParts:
    """A reduce-scatter over gloo: each process is sent its parts, and sums them.

    Gloo's own sums everything on every process: it sends as much as an all-reduce, twice what this does. Parts are
    added in the order of the processes, each sum rounded to the tensor's dtype, as gloo rounds its own.
    """

    def __init__(self, part: Tensor, tensor: Tensor, *, group: ProcessGroup, async_op: bool) -> None:
        self._part, self._received = part, torch.empty_like(tensor)
        self._work: Work = dist.all_to_all_single(
            self._received.view(-1), tensor.view(-1), group=group, async_op=async_op
        )

    def wait(self) -> None:
        """Wait for the parts and sum them."""
        self._work.wait()
        # one after another: several times as fast as torch.sum over the first dim
        first, *others = self._received
        self._part.copy_(first)
        for each in others:
            self._part.add_(each)


def _is_gloo(group: str) -> bool:
    return str(dist.get_backend(_groups[group])) == "gloo"


def _issuing(operation: str, tensor: Tensor, group: str, label: Label) -> AbstractContextManager[None]:
    _check_and_count(operation, tensor, group, label)
    return nullcontext() if _recorder is None else _recording(_recorder, operation, tensor, group, label)


@contextmanager
def _recording(recorder: Recorder, operation: str, tensor: Tensor, group: str, label: Label) -> Iterator[None]:
    """Have one collective recorded that is waited for at once."""
    with recorder.issue(operation, label, tensor, _groups[group]) as record:
        record.waited_for()
        yield
        record.ended()


def _check_and_count(operation: str, tensor: Tensor, group: str, label: Label) -> None:
    if not tensor.is_contiguous():
        raise RuntimeError(
            f"{operation} for {label} must get a contiguous tensor, not one of strides {tensor.stride()}."
        )
    for log in _open_logs:
        log.add(operation, label, tensor, group)
