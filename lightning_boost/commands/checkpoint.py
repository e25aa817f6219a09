"""``checkpoint``: look at a saved state, prove it whole, hand it on; in one process and without its model."""

import json as json_format
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from lightning_boost.checkpoint_tools.export import export_checkpoint
from lightning_boost.checkpoint_tools.stored import StoredCheckpoint
from lightning_boost.checkpoint_tools.summary import CheckpointSummary, TensorKind, each_by_itself, summarize
from lightning_boost.checkpoint_tools.verification import verify_checkpoint
from lightning_boost.commands.display import console_for_results, progress_bar, size_in_words


def inspect_checkpoint(directory: str, *, all: bool = False, json: bool = False) -> int:
    """Show what a checkpoint holds, whatever layout saved it, from its description alone.

    Args:
        directory: The checkpoint.
        all: Whether to give each tensor a row; else those that differ in their layer's number share one.
        json: Whether the last line of standard output is one JSON object, and all else goes to standard error.
    """
    stored = StoredCheckpoint(directory)
    summary = summarize(stored)
    if all:
        summary = summary._replace(kinds=each_by_itself(stored.model_tensors.values()))
    if json:
        print(json_format.dumps(_as_json(stored.path, summary)))
    else:
        _show(stored.path, summary)
    return 0


def _as_json(path: Path, summary: CheckpointSummary) -> dict[str, Any]:
    return {
        "checkpoint": str(path),
        **summary._asdict(),
        "kinds": [vars(kind) for kind in summary.kinds],
        "optimizers": [optimizer._asdict() for optimizer in summary.optimizers],
    }


def _show(path: Path, summary: CheckpointSummary) -> None:
    table = Table(title=str(path), title_justify="left")
    table.add_column("tensor", overflow="fold")
    for heading in ("layers", "shape", "dtype", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    for kind in summary.kinds:
        shape = " × ".join(map(str, kind.shape)) or "scalar"
        table.add_row(kind.name, _layers(kind), shape, kind.dtype, size_in_words(kind.num_bytes))
    console = console_for_results()
    console.print(table)
    for what, value in _facts(summary):
        console.print(f"{what + ':':<13}{value}", soft_wrap=True, highlight=False)


def _facts(summary: CheckpointSummary) -> Iterator[tuple[str, str]]:
    tensors = f"{summary.num_tensors:,} tensors, {summary.num_values:,} values, {size_in_words(summary.num_bytes)}"
    yield "model", tensors
    for name, num_tensors, num_bytes, states in summary.optimizers:
        of_each = f" ({', '.join(f'{count:,} {kind}' for kind, count in states.items())})" if states else ""
        yield name.replace("_", " "), f"{_count(num_tensors, 'tensor')}{of_each}, {size_in_words(num_bytes)}"
    yield "progress", f"{_count(summary.global_step, 'optimizer step')}, epoch {_known(summary.epoch)}"
    yield "saved by", f"{_count(summary.num_replicas, 'replica')}, in {_count(summary.num_files, 'file')}"
    if not summary.positions:
        yield "data", "no position was noted"
    for position in summary.positions:
        yield "data", _position(position)


def _position(position: dict[str, Any]) -> str:
    if not position:
        return "a position of the loader's own kind"
    size = f"of {position['batch_size']} " if position["batch_size"] else ""
    return f"epoch {position['epoch']}, behind {position['num_batches']:,} batches {size}on each replica"


def _count(number: int | None, of: str) -> str:
    return f"{_known(number)} {of}{'' if number == 1 else 's'}"


def _known(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _layers(kind: TensorKind) -> str:
    """Return how many layers a kind is in, and which, as ranges."""
    if not kind.layers:
        return ""
    ranges: list[list[int]] = []
    for layer in kind.layers:
        if ranges and layer == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], layer]
        else:
            ranges.append([layer])
    return f"{len(kind.layers)} ({', '.join('–'.join(map(str, each)) for each in ranges)})"


def verify(directory: str, *, json: bool = False) -> int:
    """Read every file, tensor and value of a checkpoint, and name what is missing, damaged or not finite.

    One tensor is in memory at a time. The exit code is 0 when nothing is wrong, else 1.

    Args:
        directory: The checkpoint.
        json: Whether the last line of standard output is one JSON object, and all else goes to standard error.
    """
    with progress_bar("reading") as on_bytes:
        found = verify_checkpoint(Path(directory), on_bytes)
    if json:
        faults = [fault._asdict() for fault in found.faults]
        print(json_format.dumps({**found._asdict(), "checkpoint": directory, "passed": not faults, "faults": faults}))
    else:
        console = console_for_results()
        for where, what in found.faults:
            console.print(f"{where}: {what}", soft_wrap=True, highlight=False, markup=False)
        what = f"{found.num_tensors:,} tensors, {size_in_words(found.num_bytes)} in {_count(found.num_files, 'file')}"
        verdict = "CHECKPOINT IS DAMAGED" if found.faults else f"CHECKPOINT IS WHOLE: {what}, all values finite"
        console.print(verdict, soft_wrap=True, highlight=False)
    return 1 if found.faults else 0


def export(directory: str, out: str, *, max_shard_gib: float = 5.0, overwrite: bool = False, json: bool = False) -> int:
    """Write a checkpoint's weights, whole, as safetensors files into a new directory.

    Names are those of the state_dict, without the LightningModule's attribute in front (model.) where what is left are
    Hugging Face's names. Tied weights are written once. One tensor is in memory at a time.

    Args:
        directory: The checkpoint.
        out: Directory to make; it gets its name when it is complete.
        max_shard_gib: Size above which there are several files, and an index of them.
        overwrite: Whether to replace an earlier export of that name.
        json: Whether the last line of standard output is one JSON object, and all else goes to standard error.
    """
    if max_shard_gib <= 0:
        raise ValueError(f"max_shard_gib ({max_shard_gib}) must be above 0.")
    size = int(max_shard_gib * 2**30)
    with progress_bar("writing") as on_bytes:
        written = export_checkpoint(
            Path(directory), Path(out), max_shard_bytes=size, overwrite=overwrite, on_bytes=on_bytes
        )
    if json:
        print(json_format.dumps({"checkpoint": directory, "out": out, **written._asdict()}))
        return 0
    console = console_for_results()
    for name in written.left_out:
        console.print(f"left out: {name}", soft_wrap=True, highlight=False, markup=False)
    what = f"{written.num_tensors:,} tensors, {size_in_words(written.num_bytes)} in {', '.join(written.files)}"
    console.print(f"{out}: {what}", soft_wrap=True, highlight=False, markup=False)
    return 0
