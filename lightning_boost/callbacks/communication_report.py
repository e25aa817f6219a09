"""What ``CommunicationProfiler`` found, as rows of figures and as a table of them."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_boost.callbacks.counted_traffic import Counts, Key, plus
from lightning_boost.callbacks.sampled_steps import Sample
from lightning_boost.cost import Volume

AXES = ("tensor", "pipeline", "data", "all")
"""In the order in which they are shown; ``all`` are collectives of all processes, or of a group of no axis."""

_WIDTH = 132
"""Of the table where the output is no terminal."""

_CHUNK_ORDER = ("embedding", "qkv", "o", "gate_up", "down", "head", "loss", "logits")
_PASS_ORDER = ("forward", "backward", "step")


@dataclass
class ProcessReport:
    """What one process has counted, to be gathered."""

    position: dict[str, int]
    """On each axis."""

    host: str
    counts: Counts
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


def _plus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def rows_of(report: ProcessReport, sampled: Sampled) -> list[dict[str, Any]]:
    """Return one row for each kind of collective of a process, per step; what is not known is ``None``."""
    keys = report.counts.keys | sampled.volumes.keys()
    return [_row(key, report.counts, sampled) for key in sorted(keys, key=_order)]


def _row(key: Key, counts: Counts, sampled: Sampled) -> dict[str, Any]:
    is_counted_always = key in counts.keys
    volumes, num_steps = (
        (counts.counted, counts.num_steps) if is_counted_always else (sampled.volumes, len(sampled.steps))
    )
    volume, formula = volumes.get(key, Volume(0, 0, 0)), counts.expected.get(key)
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
        "is_as_formula": counts.is_as_formula(key),
        "blocked_ms": blocked,
        "in_flight_ms": in_flight,
        "waiting_ms": waiting,
        "transfer_ms": None if blocked is None or waiting is None else blocked - waiting,
        "share_of_step": None if times is None or times.blocked is None else times.blocked / sampled.seconds,
    }


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
        f"{round(row['launches'], 3):g}",
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
    return f"{round(row['formula_launches'] or 0, 3):g}, {_mebibytes(row['formula_bytes'] or 0)} MiB"


def _mebibytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.4f}"


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else form.format(value)
