"""A report as files: its table, its figures, and bars like the paper's."""

import importlib.util
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from lightning_boost.benchmark.report import Bars, Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 120

_FONT_SIZE = 8
_LETTERS_AN_INCH = 14
_NAME_INCHES = 1.2
"""Of a name below a bar or a group of bars, whose lines break there."""

_BAR_INCHES = 0.55
_LEAST_INCHES = 5.0


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
        draw_bars(bars).savefig(folder / f"{name}{suffix}.png", dpi=150)


def draw_bars(bars: Bars) -> "Figure":
    """Draw bars with their values above them, of stacked ones the sum: a colour for each candidate, told in a legend.

    Where there is one group, each candidate has its name below instead.
    """
    # not at the top: an extra, which only this needs
    from matplotlib.figure import Figure

    groups = bars.groups
    if len(groups) == 1:
        groups = {name: {"": value} for group in groups.values() for name, value in group.items()}
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    beside = 1 if bars.is_stacked else len(names)
    inches = max(_LEAST_INCHES, 1 + len(groups) * max(_NAME_INCHES, _BAR_INCHES * beside))
    legend_inches = 0.6 + max(map(len, names)) / _LETTERS_AN_INCH if len(names) > 1 else 0.0
    figure = Figure(figsize=(inches + legend_inches, 4.0), layout="constrained")
    axes = figure.subplots()
    width, bottoms = 0.8 / beside, [0.0] * len(groups)
    for index, name in enumerate(names):
        values = [group.get(name, 0.0) for group in groups.values()]
        first = 0.0 if bars.is_stacked else (index - (len(names) - 1) / 2) * width
        places = [first + place for place in range(len(groups))]
        drawn = axes.bar(places, values, width * 0.92, bottom=bottoms, label=name)
        tops = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
        bottoms = tops if bars.is_stacked else bottoms
        if name == names[-1] or not bars.is_stacked:
            axes.bar_label(drawn, [_in_digits(top) for top in tops], fontsize=_FONT_SIZE)
    axes.set_xticks(range(len(groups)), [_wrapped(name, _NAME_INCHES) for name in groups], fontsize=_FONT_SIZE)
    axes.set_ylabel(bars.unit)
    axes.set_title(_wrapped(bars.title, inches - 1), fontsize=_FONT_SIZE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.15)
    if legend_inches:
        figure.legend(loc="outside right upper", fontsize=_FONT_SIZE, frameon=False)
    return figure


def _in_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _wrapped(text: str, inches: float) -> str:
    return textwrap.fill(text, round(_LETTERS_AN_INCH * inches), break_long_words=False)
