"""What a benchmark found: a table to read, figures for programs, bars to draw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_boost.benchmark.timing import Quartiles, Timings, ratios


@dataclass(frozen=True)
class Bars:
    """Bars of a chart: a group of them for each setting, one in it for each candidate."""

    title: str
    unit: str
    groups: Mapping[str, Mapping[str, float]]
    """Values by candidate, by setting."""

    is_stacked: bool = False
    """Whether a group's values are parts of a whole, and stand on one another."""


@dataclass(frozen=True)
class Report:
    """What a benchmark found."""

    title: str
    headings: Sequence[str]
    """Of the columns; the first holds names."""

    rows: Sequence[Sequence[str]]
    figures: Mapping[str, Any]
    """The same in numbers, for JSON."""

    notes: Sequence[str] = ()
    bars: Sequence[Bars] = field(default_factory=tuple)


def as_milliseconds(timing: Timings) -> dict[str, dict[str, float]]:
    """Return the quartiles of a candidate's times in milliseconds."""
    return {
        name: {which: 1e3 * value for which, value in Quartiles.of(seconds)._asdict().items()}
        for name, seconds in timing._asdict().items()
    }


def compare(
    title: str,
    times: Mapping[str, Timings],
    pairs: Sequence[tuple[str, str]],
    *,
    paper: Mapping[tuple[str, str], float] | None = None,
    notes: Sequence[str] = (),
    figures: Mapping[str, Any] | None = None,
) -> Report:
    """Return a report of candidates' times and of their ratios, taken repetition by repetition.

    Args:
        title: Of the table.
        times: Of each candidate.
        pairs: Whose time is set over whose.
        paper: The paper's ratio of a pair.
        notes: Lines below the table.
        figures: Further ones for JSON.
    """
    given, found = paper or {}, {}
    rows = [
        [
            f"{name}, ms",
            *(f"{1e3 * value:.1f}" for value in Quartiles.of(timing.wall)),
            f"{1e3 * Quartiles.of(timing.cpu).median:.1f}",
            "",
        ]
        for name, timing in times.items()
    ]
    for above, below in pairs:
        wall, cpu = (ratios(getattr(times[above], which), getattr(times[below], which)) for which in Timings._fields)
        of_paper = given.get((above, below))
        name = f"{above} / {below}"
        found[name] = {"wall": wall._asdict(), "cpu": cpu._asdict(), "paper": of_paper}
        cells = [f"{value:.2f}" for value in (*wall, cpu.median)]
        rows.append([name, *cells, "" if of_paper is None else f"{of_paper:.2f}"])
    headings = ["", "lower quartile", "median", "upper quartile", "CPU time", "paper"]
    return Report(
        title=title,
        headings=headings if given else headings[:-1],
        rows=rows if given else [row[:-1] for row in rows],
        figures={
            "milliseconds": {name: as_milliseconds(timing) for name, timing in times.items()},
            "ratios": found,
            **(figures or {}),
        },
        notes=notes,
        bars=(Bars(title, "ms", {"": {name: 1e3 * Quartiles.of(each.wall).median for name, each in times.items()}}),),
    )


def join(title: str, what: str, reports: Mapping[Any, Report]) -> Report:
    """Return one report of several settings' reports, which have the same columns.

    Args:
        title: Of the table.
        what: Differs between them, as a word.
        reports: By the setting.
    """
    given = list(reports.values())
    bars = {f"{what} {setting}": group for setting, each in reports.items() for group in each.bars[0].groups.values()}
    return Report(
        title=title,
        headings=given[0].headings,
        rows=[[f"{what} {setting}: {row[0]}", *row[1:]] for setting, each in reports.items() for row in each.rows],
        figures={what: {str(setting): each.figures for setting, each in reports.items()}},
        notes=list(dict.fromkeys(note for each in given for note in each.notes)),
        bars=(Bars(title, given[0].bars[0].unit, bars),),
    )
