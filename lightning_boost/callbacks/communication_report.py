"""What ``CommunicationProfiler`` found, as rows, a table, JSON and a trace."""

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from lightning_boost.communication_trace import Event
from lightning_boost.cost import Volume

AXES = ("tensor", "pipeline", "data", "all")
"""In the order in which they are shown; ``all`` are collectives of all processes, or of a group of no axis."""

_WIDTH = 132
"""Of the table where the output is no terminal."""

_CHUNK_ORDER = ("embedding", "qkv", "o", "gate_up", "down", "head", "loss", "logits")
_PASS_ORDER = ("forward", "backward", "step")


class Key(NamedTuple):
    """What figures are kept apart for."""

    axis: str
    chunk: str
    pass_: str
    operation: str


@dataclass
class Sample:
    """A step whose collectives were recorded, on one process."""

    step: int
    seconds: float = 0.0
    """Of the step's batches, from the start of each to its end."""

    began: list[float] = field(default_factory=list)
    """When each batch began, on the clock of the events."""

    lasted: list[float] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


@dataclass
class ProcessReport:
    """What one process has counted, to be gathered."""

    position: dict[str, int]
    """On each axis."""

    host: str
    num_steps: int
    counted: dict[Key, Volume]
    """Of the tensor axis's door, over all steps."""

    expected: dict[Key, Volume]
    """By formula, over the same steps."""

    missing_because: str | None
    """Why there is no formula."""

    sample: Sample | None
    """The latest, until it has been taken over."""


@dataclass
class Times:
    """Seconds over all samples; ``None`` as soon as one is not known."""

    blocked: float | None = 0.0
    in_flight: float | None = 0.0
    waiting: float | None = 0.0

    def add(self, blocked: float | None, in_flight: float | None, waiting: float | None) -> None:
        """Add one collective's."""
        self.blocked = _plus(self.blocked, blocked)
        self.in_flight = _plus(self.in_flight, in_flight)
        self.waiting = _plus(self.waiting, waiting)


@dataclass
class Sampled:
    """The sums over the samples of one process."""

    steps: list[int] = field(default_factory=list)
    seconds: float = 0.0
    volumes: dict[Key, Volume] = field(default_factory=dict)
    times: dict[Key, Times] = field(default_factory=dict)

    def add(self, sample: Sample, waiting: Sequence[float | None]) -> None:
        """Add a sample and how long each of its collectives waited for other processes."""
        self.steps.append(sample.step)
        self.seconds += sample.seconds
        for event, waited in zip(sample.events, waiting, strict=True):
            key = Key(event.axis, event.chunk, event.pass_, event.operation)
            self.volumes[key] = plus(self.volumes.get(key), Volume(1, 0, event.bytes))
            self.times.setdefault(key, Times()).add(event.blocked, event.in_flight, waited)


def plus(one: Volume | None, other: Volume) -> Volume:
    """Add two volumes, of which one may not be there yet."""
    return other if one is None else Volume(*(mine + yours for mine, yours in zip(one, other, strict=True)))


def _plus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def waiting_times(samples: Sequence[Sample], hosts: Sequence[str]) -> list[list[float | None]]:
    """Return of each process's collectives how long it waited in them until the last process had come.

    The processes of a group issue its collectives in one order. What was begun by whom is told by the clock that they
    share on a host; where a group spans several, or a time is not known, it is ``None``. So it is for ``send`` and
    ``recv``, in which processes do not wait for one another as a group.
    """
    orders: dict[str, dict[int, list[int]]] = defaultdict(dict)
    for process, sample in enumerate(samples):
        for place, event in enumerate(sample.events):
            orders[event.group].setdefault(process, []).append(place)
    found: list[list[float | None]] = [[None] * len(sample.events) for sample in samples]
    for members in orders.values():
        if len({hosts[process] for process in members}) > 1 or len(set(map(len, members.values()))) > 1:
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


def rows_of(report: ProcessReport, sampled: Sampled) -> list[dict[str, Any]]:
    """Return one row for each kind of collective of a process, per step; what is not known is ``None``."""
    keys = {*report.counted, *report.expected, *sampled.volumes}
    return [_row(key, report, sampled) for key in sorted(keys, key=_order)]


def _row(key: Key, report: ProcessReport, sampled: Sampled) -> dict[str, Any]:
    is_counted_always = key in report.counted or key in report.expected
    volumes, num_steps = (
        (report.counted, report.num_steps) if is_counted_always else (sampled.volumes, len(sampled.steps))
    )
    volume, formula = volumes.get(key, Volume(0, 0, 0)), report.expected.get(key)
    times, num_samples = sampled.times.get(key), len(sampled.steps)
    per_step = None if times is None else [_in_ms(value, num_samples) for value in asdict(times).values()]
    blocked, in_flight, waiting = per_step or (None, None, None)
    return {
        "axis": key.axis,
        "chunk": key.chunk,
        "pass": key.pass_,
        "operation": key.operation,
        "launches": _tidy(volume.launches / num_steps),
        "bytes": _tidy(volume.bytes / num_steps),
        "formula_launches": None if formula is None else _tidy(formula.launches / num_steps),
        "formula_bytes": None if formula is None else _tidy(formula.bytes / num_steps),
        "is_as_formula": is_as_formula(key, report),
        "blocked_ms": blocked,
        "in_flight_ms": in_flight,
        "waiting_ms": waiting,
        "transfer_ms": None if blocked is None or waiting is None else blocked - waiting,
        "share_of_step": None if times is None or times.blocked is None else times.blocked / sampled.seconds,
    }


def is_as_formula(key: Key, report: ProcessReport) -> bool | None:
    """Tell whether what was counted is what the formula says; ``None`` where it says nothing."""
    if key.axis != "tensor" or report.missing_because is not None or key.chunk in BESIDE_THE_MODEL:
        return None
    if key not in report.counted and key not in report.expected:
        return None  # a vote, seen in samples only
    return report.counted.get(key) == report.expected.get(key)


BESIDE_THE_MODEL = ("gradient_norm", "verification")
"""Chunks of what other callbacks and clipping ask for: no formula tells how often."""


def _in_ms(seconds: float | None, num_samples: int) -> float | None:
    return None if seconds is None else 1e3 * seconds / num_samples


def _tidy(number: float) -> float | int:
    return int(number) if number.is_integer() else number


def _order(key: Key) -> tuple[Any, ...]:
    chunks = _CHUNK_ORDER.index(key.chunk) if key.chunk in _CHUNK_ORDER else len(_CHUNK_ORDER)
    return AXES.index(key.axis), _PASS_ORDER.index(key.pass_), chunks, key.chunk, key.operation


def as_most(processes: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return each kind of collective as the process has it that moves, or else waits, most."""
    most: dict[Key, dict[str, Any]] = {}
    for row in (row for rows in processes for row in rows):
        key = Key(row["axis"], row["chunk"], row["pass"], row["operation"])
        if key not in most or _weight(row) > _weight(most[key]):
            most[key] = row
    return [most[key] for key in sorted(most, key=_order)]


def _weight(row: dict[str, Any]) -> tuple[bool, float, float]:
    return row["is_as_formula"] is False, row["bytes"], row["blocked_ms"] or 0.0


def show(rows: Sequence[dict[str, Any]], lines: Iterable[str]) -> None:
    """Print the table, or that there is nothing in it, and lines below it."""
    table = Table(title="communication of a step, of the process with the most", title_justify="left")
    for name in ("axis", "pass", "chunk", "operation"):
        table.add_column(name, no_wrap=True)
    for name in ("launches", "MiB", "formula", "blocked\nms", "waiting\nms", "transfer\nms", "share of\nstep"):
        table.add_column(name, justify="right", no_wrap=True)
    for row, following in zip_longest(rows, rows[1:]):
        style = "bold red" if row["is_as_formula"] is False else None
        is_last = following is None or following["axis"] != row["axis"]
        table.add_row(*_cells(row), style=style, end_section=is_last)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(table if rows else "No process sent another one anything.")
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def _cells(row: dict[str, Any]) -> list[str]:
    times = [_number(row[name], "{:.3f}") for name in ("blocked_ms", "waiting_ms", "transfer_ms")]
    return [
        *(row[name] for name in ("axis", "pass", "chunk", "operation")),
        f"{row['launches']:g}",
        _mebibytes(row["bytes"]),
        _formula(row),
        *times,
        _number(row["share_of_step"], "{:.1%}"),
    ]


def _formula(row: dict[str, Any]) -> str:
    if row["is_as_formula"] is None:
        return "no formula" if row["axis"] == "tensor" else ""
    if row["is_as_formula"]:
        return "the same"
    return f"{row['formula_launches'] or 0:g}, {_mebibytes(row['formula_bytes'] or 0)} MiB"


def _mebibytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.4f}"


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else form.format(value)


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
