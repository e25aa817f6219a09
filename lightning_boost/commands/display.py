"""What commands show: tables and lines on standard output, progress on standard error."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_WIDTH = 120
"""Of tables where the output is no terminal."""


def console_for_results(*, is_aside: bool = False) -> Console:
    """Return where results are shown: standard output, or aside of it where that is to hold JSON alone."""
    stream = sys.stderr if is_aside else sys.stdout
    return Console(stderr=is_aside, width=None if stream.isatty() else _WIDTH)


def size_in_words(num_bytes: int) -> str:
    """Return a size in the unit that suits it."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


@contextmanager
def progress_bar(what: str, *, in_bytes: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error, where that is a terminal; give the function that moves it."""
    console = Console(stderr=True)
    amount = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
