"""Every collective of a step on every axis, with its times.

Those of the tensor axis are told by their door. Those of torch's own machinery (``fully_shard``, the pipeline's
schedules, DTensor) are seen where they are dispatched, and belong to the axis that their process group is of. Stages
send and receive hidden states forward and their gradients backward.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_boost.collectives import Label, record_collectives
from lightning_boost.mesh import DATA_AXIS, PIPELINE_AXIS, REPLICATE_AXIS, SHARD_AXIS, TENSOR_AXIS
from lightning_boost.pipeline_parallel.borders import is_border_gradient
from lightning_boost.torch_internals import OpOverload, TorchDispatchMode, private

_current_graph_task_id = private("torch._C", "_current_graph_task_id")
_group_in = private("torch.distributed", "ProcessGroup.unbox")
_work_in = private("torch.distributed", "Work.unbox")

WHOLE_WORLD = "all"
"""In the place of an axis: all processes, or a group that is of no axis."""

_SHORT = {
    TENSOR_AXIS: "tensor",
    PIPELINE_AXIS: "pipeline",
    DATA_AXIS: "data",
    REPLICATE_AXIS: "data",
    SHARD_AXIS: "data",
}

_FEW_VALUES = 2
"""Of losses, token counts and votes."""

_OPERATIONS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "broadcast_": "broadcast",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
"""One name for each operation, whichever of torch's forms it was dispatched as."""

_SECOND_IS_INPUT = ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")
"""Operations whose first tensors are what comes out, in the namespace that works in place."""


@dataclass
class Event:
    """One collective. Times are in seconds, on a clock that the processes of one host share; ``None``: not known."""

    axis: str
    operation: str
    chunk: str
    pass_: str
    bytes: int
    """Handed in by this process; of ``recv`` what it receives."""

    group: str
    """Name of the process group."""

    started: float | None = None
    wait_began: float | None = None
    ended: float | None = None

    @property
    def blocked(self) -> float | None:
        """How long this process waited for it and did nothing else."""
        return None if self.wait_began is None or self.ended is None else self.ended - self.wait_began

    @property
    def in_flight(self) -> float | None:
        """From its start until its result was there to be used."""
        return None if self.started is None or self.ended is None else self.ended - self.started


class Clock(Protocol):
    """Takes time stamps, and tells afterwards what they were."""

    def stamp(self) -> Any:
        """Take one."""

    def seconds(self, stamp: Any) -> float:
        """Return its time."""


class HostClock:
    """The host's monotonic clock."""

    def stamp(self) -> float:
        """Return the time."""
        return time.perf_counter()

    def seconds(self, stamp: float) -> float:
        """Return the stamp."""
        return stamp


class CudaClock:
    """Events on the GPU's streams: a collective takes the stream's time, not the host's.

    A stamp goes into the stream that is current where a collective is issued or waited for. That is the one which the
    collective's result is made available to, whichever stream NCCL uses; stamps are put on the host's clock by one
    event while the GPU does nothing. The host waits for the GPU here and in ``seconds``, and never for a stamp.
    """

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._started, self._origin = time.perf_counter(), self.stamp()
        # a stamp may go into another stream, whose end says nothing of this one's
        self._origin.synchronize()

    def stamp(self) -> torch.cuda.Event:
        """Put an event into the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, stamp: torch.cuda.Event) -> float:
        """Return when the stream came to it, on the host's clock."""
        stamp.synchronize()
        # in milliseconds
        return self._started + float(self._origin.elapsed_time(stamp)) / 1e3


def axes_of_groups(mesh: DeviceMesh | None) -> dict[str, str]:
    """Return the short name of the axis that each process group of the mesh is of, by the group's name."""
    if mesh is None:
        return {}
    names = {name for name in mesh.mesh_dim_names or () if name in _SHORT}
    if REPLICATE_AXIS in names:
        names.add(DATA_AXIS)
    return {mesh[name].get_group().group_name: _SHORT[name] for name in sorted(names)}


class CommunicationTrace(TorchDispatchMode):
    """Records every collective while it is open, on the tensor axis and on all others.

    Args:
        axes: From ``axes_of_groups``.
        is_cuda: Whether times are those of the GPU's stream. Those of torch's own collectives are not known then.
    """

    def __init__(self, axes: Mapping[str, str], *, is_cuda: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axes = axes
        self._clock: Clock = CudaClock() if is_cuda else HostClock()
        self._knows_works = not is_cuda
        self._events: list[Event] = []
        self._stamps: list[dict[str, Any]] = []
        self._works: dict[int, tuple[Work, _Stamped]] = {}
        self._is_in_door = False
        self.is_in_step = False
        """Whether backward is over and the optimizer's part of the step has begun."""

    @contextmanager
    def open(self) -> Iterator["CommunicationTrace"]:
        """Record until the context ends."""
        with ExitStack() as stack:
            stack.enter_context(record_collectives(self))
            if self._knows_works:
                stack.enter_context(self._waits_noted())
            stack.enter_context(self)
            yield self

    def end_step(self) -> None:
        """Note that the optimizer is done, and another forward may follow."""
        self.is_in_step = False

    def events(self) -> list[Event]:
        """Return what was recorded, in the order in which it was issued."""
        for event, stamps in zip(self._events, self._stamps, strict=True):
            for name, stamp in stamps.items():
                setattr(event, name, self._clock.seconds(stamp))
            stamps.clear()
        self._works.clear()
        return self._events

    @contextmanager
    def issue(self, operation: str, label: Label, tensor: Tensor, group: ProcessGroup) -> Iterator["_Stamped"]:
        """Record one collective of the tensor axis's door."""
        record = self._add(operation, label.chunk, label.pass_, _num_bytes([tensor]), group.group_name)
        record.stamp("started")
        self._is_in_door = True
        try:
            yield record
        finally:
            self._is_in_door = False

    @override
    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # what it is made of comes by next
            return NotImplemented
        if self._is_in_door or func.namespace not in ("c10d", "_c10d_functional"):
            return func(*args, **(kwargs or {}))
        record = self._record_dispatched(func, args)
        output = func(*args, **(kwargs or {}))
        if record is not None and self._knows_works:
            self._keep_work(output, record)
        return output

    def _record_dispatched(self, func: OpOverload, args: tuple[Any, ...]) -> "_Stamped | None":
        name = func.name().split("::")[1].split(".")[0]
        operation, in_place = _OPERATIONS.get(name, name), func.namespace == "c10d"
        group = _group_of(args, in_place=in_place)
        if group is None:
            # waiting for a tensor, in the functional form
            return None
        tensors = _tensors_in(args[1 if in_place and operation in _SECOND_IS_INPUT else 0])
        axis = self._axes.get(group, WHOLE_WORLD)
        chunk, pass_ = self._label(axis, operation, tensors)
        record = self._add(operation, chunk, pass_, _num_bytes(tensors), group)
        if self._knows_works and in_place:
            record.stamp("started")
        return record

    def _label(self, axis: str, operation: str, tensors: list[Tensor]) -> tuple[str, str]:
        """Return what a collective of torch's own is for, and the pass it belongs to."""
        is_backward = _current_graph_task_id() != -1
        pass_ = "step" if self.is_in_step else "backward" if is_backward else "forward"
        if operation in ("send", "recv") and axis == "pipeline":
            return ("gradients", "backward") if any(map(is_border_gradient, tensors)) else ("activations", "forward")
        if sum(tensor.numel() for tensor in tensors) <= _FEW_VALUES and not is_backward:
            return "scalars", pass_
        if axis == "data" and operation == "all_gather":
            return "parameters", pass_
        if axis == "data" and operation in ("reduce_scatter", "all_reduce"):
            # a pipeline's are issued behind its last backward
            return "gradients", "backward"
        return "other", pass_

    def _add(self, operation: str, chunk: str, pass_: str, num_bytes: int, group: str) -> "_Stamped":
        self._events.append(Event(self._axes.get(group, WHOLE_WORLD), operation, chunk, pass_, num_bytes, group))
        self._stamps.append({})
        return _Stamped(self._clock, self._stamps[-1])

    def _keep_work(self, output: Any, record: "_Stamped") -> None:
        last = output[-1] if isinstance(output, tuple | list) and output else output
        if isinstance(last, torch.ScriptObject):
            work: Work = _work_in(last)
            # held, so that whoever waits gets this very object
            self._works[id(work)] = work, record

    @contextmanager
    def _waits_noted(self) -> Iterator[None]:
        """Note when a work is waited for: torch dispatches the start of a collective, and not its end."""
        plain = Work.wait

        def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
            _, record = self._works.pop(id(work), (None, None))
            if record is None:
                return plain(work, *args, **kwargs)
            record.waited_for()
            result = plain(work, *args, **kwargs)
            record.ended()
            return result

        setattr(Work, plain.__name__, wait)
        try:
            yield
        finally:
            setattr(Work, plain.__name__, plain)


@dataclass
class _Stamped:
    """Where the time stamps of one collective go."""

    clock: Clock
    stamps: dict[str, Any]

    def stamp(self, name: str) -> None:
        """Take one of the event's times."""
        self.stamps[name] = self.clock.stamp()

    def waited_for(self) -> None:
        """Note that this process waits from now on."""
        self.stamp("wait_began")

    def ended(self) -> None:
        """Note that the result may be used from now on."""
        self.stamp("ended")


def _group_of(args: tuple[Any, ...], *, in_place: bool) -> str | None:
    """Return the name of the group among an operator's arguments."""
    if not in_place:
        names = [argument for argument in args if isinstance(argument, str)]
        return names[-1] if names else None
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            name: str = _group_in(argument).group_name
            return name
    return None


def _tensors_in(argument: Any) -> list[Tensor]:
    if isinstance(argument, Tensor):
        return [argument]
    parts = argument if isinstance(argument, tuple | list) else ()
    return [tensor for part in parts for tensor in _tensors_in(part)]


def _num_bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
