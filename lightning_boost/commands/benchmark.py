"""``benchmark``: measure on this machine, as ratios of interleaved runs."""

import contextlib
import json as json_format
import sys
from typing import Literal

from rich.console import Console
from rich.table import Table

from lightning_boost.benchmark.block import BlockResult, BlockSizes, measure_block
from lightning_boost.benchmark.strategy import NUM_LAYERS, measure_strategy
from lightning_boost.benchmark.timing import Quartiles, ratios


def benchmark(
    what: Literal["block", "strategy"],
    *,
    sizes: BlockSizes | None = None,
    processes: int = 2,
    repetitions: int = 15,
    json: bool = False,
) -> int:
    """Measure a decoder block, scheme beside scheme, or the Trainer beside a bare loop.

    ``block``: forward and backward of one block. ``strategy``: a training step of a model of four, by the Trainer and
    by a loop around the same parallel model.

    Processes are pinned to a core each and what is compared takes turns, so ratios hold where times do not. Close other
    programs first; if wall and CPU ratios disagree, the machine was busy.

    Args:
        what: What to measure.
        sizes: Of a block; none: hidden size 1024, MLP 2752, bottleneck 256, 2,048 tokens, bf16.
        processes: Tensor size.
        repetitions: Of everything, at least 15 for figures to be reported.
        json: Whether the last line of standard output is one JSON object.
    """
    given = sizes or BlockSizes()
    if what == "strategy":
        return _strategy(given, processes, repetitions, json)
    result = measure_block(given, num_processes=processes, repetitions=repetitions)
    wall, cpu = result.full_rank_over_bottleneck(), result.full_rank_over_bottleneck_cpu()
    if json:
        print(json_format.dumps(_as_json(given, processes, result, wall, cpu)))
    else:
        _show(given, processes, result, wall, cpu)
    return 0


def _strategy(sizes: BlockSizes, processes: int, repetitions: int, json: bool) -> int:
    with contextlib.redirect_stdout(sys.stderr):
        result = measure_strategy(sizes, num_processes=processes, repetitions=repetitions)
    wall, cpu = result.trainer_over_loop(), ratios(result.trainer.cpu, result.loop.cpu)
    if json:
        found = {
            "trainer_over_loop": wall._asdict(),
            "trainer_over_loop_cpu_time": cpu._asdict(),
            "milliseconds": {"trainer": _in_ms(result.trainer.wall), "loop": _in_ms(result.loop.wall)},
            "sizes": {**vars(sizes), "processes": processes},
        }
        print(json_format.dumps(found))
        return 0
    table = Table(title=f"a training step of {NUM_LAYERS} layers, {_described(sizes, processes)}", title_justify="left")
    for heading in ("", "lower quartile", "median", "upper quartile"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, timing in (("Trainer, ms", result.trainer), ("loop, ms", result.loop)):
        table.add_row(name, *(f"{1e3 * value:.1f}" for value in Quartiles.of(timing.wall)))
    table.add_row("Trainer / loop", *(f"{value:.3f}" for value in wall))
    table.add_row("the same in CPU time", *(f"{value:.3f}" for value in cpu))
    Console().print(table)
    return 0


def _described(sizes: BlockSizes, processes: int) -> str:
    return (
        f"hidden {sizes.hidden_size}, MLP {sizes.intermediate_size}, bottleneck {sizes.bottleneck_size},"
        f" {sizes.num_tokens:,} tokens, {sizes.dtype}, {processes} processes"
    )


def _as_json(
    sizes: BlockSizes, processes: int, result: BlockResult, wall: Quartiles, cpu: Quartiles
) -> dict[str, object]:
    return {
        "full_rank_over_bottleneck": wall._asdict(),
        "full_rank_over_bottleneck_cpu_time": cpu._asdict(),
        "milliseconds": {
            name: {"wall": _in_ms(timing.wall), "cpu": _in_ms(timing.cpu)} for name, timing in result.times.items()
        },
        "machine": {
            "gemm_gflops_per_second": result.gemm_gflops_per_second,
            "all_reduce_gb_per_second": result.all_reduce_gb_per_second,
        },
        "sizes": {**vars(sizes), "processes": processes},
    }


def _in_ms(seconds: list[float]) -> dict[str, float]:
    return {name: 1e3 * value for name, value in Quartiles.of(seconds)._asdict().items()}


def _show(sizes: BlockSizes, processes: int, result: BlockResult, wall: Quartiles, cpu: Quartiles) -> None:
    title = f"one block, forward and backward: {_described(sizes, processes)}"
    table = Table(title=title, title_justify="left")
    for heading in ("", "lower quartile", "median", "upper quartile"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, timing in result.times.items():
        table.add_row(f"{name}, ms", *(f"{1e3 * value:.1f}" for value in Quartiles.of(timing.wall)))
    table.add_row("full_rank / bottleneck", *(f"{value:.2f}" for value in wall))
    table.add_row("the same in CPU time", *(f"{value:.2f}" for value in cpu))
    console = Console()
    console.print(table)
    flops_per_byte = result.gemm_gflops_per_second / result.all_reduce_gb_per_second
    console.print(
        f"Machine: {result.gemm_gflops_per_second:.0f} GFLOP/s a process, all-reduce"
        f" {result.all_reduce_gb_per_second:.2f} GB/s, {flops_per_byte:.0f} FLOP a byte.",
        soft_wrap=True,
    )
