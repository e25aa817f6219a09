"""A report as files: its table, its figures, and bars like the paper's."""

import importlib.util
import json
import re
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_boost.benchmark.report import Bars, Report

_WIDTH = 120


def check_output(directory: str | None) -> None:
    """Check, before anything is measured, that charts can be written.

    Raises:
        ValueError: If the extra for them is not installed, or the directory cannot be made.
    """
    if directory is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "output needs matplotlib for its charts, which the extra 'charts' brings: pip install -e '.[charts]'. Leave"
            " output out for the table alone."
        )
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"output ({directory}) must be a directory, and cannot be made one: {error.strerror}."
        ) from None


def table_of(report: Report) -> Table:
    """Return a report's table."""
    table = Table(title=report.title, title_justify="left")
    for index, heading in enumerate(report.headings):
        table.add_column(heading, justify="right" if index else "left")
    for row in report.rows:
        table.add_row(*row)
    return table


def write_report(report: Report, name: str, directory: str) -> None:
    """Write ``NAME.txt``, ``NAME.json`` and, for each chart, ``NAME.png`` or ``NAME_1.png``, … into a directory."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.txt").open("w", encoding="utf-8") as file:
        console = Console(file=file, width=_WIDTH)
        console.print(table_of(report))
        for note in report.notes:
            console.print(note, soft_wrap=True)
    (folder / f"{name}.json").write_text(json.dumps(report.figures, indent=2) + "\n", encoding="utf-8")
    for index, bars in enumerate(report.bars):
        suffix = f"_{index + 1}" if len(report.bars) > 1 else ""
        draw_bars(bars, folder / f"{name}{suffix}.png")


def draw_bars(bars: Bars, path: Path) -> None:
    """Draw groups of bars, one colour for each candidate, each bar with its value above it."""
    # not at the top: an extra, which only this needs
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for group in bars.groups.values() for name in group))
    figure = Figure(figsize=(max(5.0, 1.2 + 0.7 * len(names) * len(bars.groups)), 4.0), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        places = [place + (index - (len(names) - 1) / 2) * width for place in range(len(bars.groups))]
        values = [group.get(name, 0.0) for group in bars.groups.values()]
        drawn = axes.bar(places, values, width * 0.92, label=name)
        axes.bar_label(drawn, [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values], fontsize=8)
    axes.set_xticks(range(len(bars.groups)), list(bars.groups))
    axes.set_ylabel(bars.unit)
    axes.set_title(re.sub(r": ", ":\n", bars.title, count=1), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.15)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
