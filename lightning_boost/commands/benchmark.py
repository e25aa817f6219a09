"""``benchmark``: measure on this machine, as ratios of interleaved runs."""

import json as json_format
from typing import Literal

from rich.console import Console
from rich.table import Table

from lightning_boost.benchmark.block import BlockResult, BlockSizes, measure_block
from lightning_boost.benchmark.timing import Quartiles


def benchmark(
    what: Literal["block"],
    *,
    sizes: BlockSizes | None = None,
    processes: int = 2,
    repetitions: int = 15,
    json: bool = False,
) -> int:
    """Measure one decoder block, forward and backward, scheme beside scheme.

    Processes are pinned to a core each and the schemes take turns, so ratios hold where times do not. Close other
    programs first; if wall and CPU ratios disagree, the machine was busy.

    Args:
        what: What to measure.
        sizes: Of the block; none: hidden size 1024, MLP 2752, bottleneck 256, 2,048 tokens, bf16.
        processes: Tensor size.
        repetitions: Of every scheme, at least 15 for figures to be reported.
        json: Whether the last line of standard output is one JSON object.
    """
    given = sizes or BlockSizes()
    result = measure_block(given, num_processes=processes, repetitions=repetitions)
    wall, cpu = result.full_rank_over_bottleneck(), result.full_rank_over_bottleneck_cpu()
    if json:
        print(json_format.dumps(_as_json(given, processes, result, wall, cpu)))
    else:
        _show(given, processes, result, wall, cpu)
    return 0


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
    title = (
        f"one block, forward and backward: hidden {sizes.hidden_size}, MLP {sizes.intermediate_size}, bottleneck"
        f" {sizes.bottleneck_size}, {sizes.num_tokens:,} tokens, {sizes.dtype}, {processes} processes"
    )
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
