"""Sampled steps in the trace-event format of Chrome, which Perfetto reads too."""

from collections.abc import Sequence
from typing import Any

from lightning_boost.callbacks.communication_report import AXES
from lightning_boost.callbacks.sampled_steps import Sample
from lightning_boost.communication_trace import Event


def trace_events(
    samples: Sequence[Sequence[Sample]], positions: Sequence[dict[str, int]], clock_offsets: Sequence[float]
) -> list[dict[str, Any]]:
    """Return the samples in Chrome's trace-event format, one track for each process and axis.

    Args:
        samples: The samples of each process.
        positions: Of each process on the axes.
        clock_offsets: What makes times of one clock of the events of each process.
    """
    begins = [
        sample.began[0] + offset
        for mine, offset in zip(samples, clock_offsets, strict=True)
        for sample in mine
        if sample.began
    ]
    origin = min(begins, default=0.0)
    events: list[dict[str, Any]] = []
    for process, (mine, position) in enumerate(zip(samples, positions, strict=True)):
        place = ", ".join(f"{axis} {index}" for axis, index in position.items())
        events.append(_metadata("process_name", process, 0, f"process {process} ({place})"))
        events += [_metadata("thread_name", process, track, name) for track, name in enumerate(("step", *AXES))]
        shift = clock_offsets[process] - origin
        for sample in mine:
            for began, lasted in zip(sample.began, sample.lasted, strict=True):
                events.append(_span(f"step {sample.step}", "step", process, 0, began + shift, lasted))
            for number, event in enumerate(sample.events):
                events += _of_event(event, process, shift, f"{sample.step}.{number}")
    return events


def _of_event(event: Event, process: int, shift: float, identity: str) -> list[dict[str, Any]]:
    """Return a span while the process is blocked, and one in flight around it where it was not all the time."""
    if event.started is None or event.wait_began is None or event.ended is None:
        return []
    name, track = f"{event.chunk} {event.operation}", 1 + AXES.index(event.axis)
    blocked = _span(name, event.axis, process, track, event.wait_began + shift, event.ended - event.wait_began)
    blocked["args"] = {"pass": event.pass_, "bytes": event.bytes}
    if event.wait_began - event.started < 1e-6:
        return [blocked]
    common = {"name": f"{name} in flight", "cat": event.axis, "pid": process, "tid": track, "id": identity}
    ends = (("b", event.started), ("e", event.ended))
    return [blocked, *({**common, "ph": kind, "ts": 1e6 * (at + shift)} for kind, at in ends)]


def _span(name: str, category: str, process: int, track: int, began: float, seconds: float) -> dict[str, Any]:
    times = {"ts": 1e6 * began, "dur": 1e6 * seconds}
    return {"name": name, "cat": category, "ph": "X", "pid": process, "tid": track, **times}


def _metadata(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}
