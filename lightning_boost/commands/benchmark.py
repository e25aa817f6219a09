"""``benchmark``: measure on this machine; times as ratios of interleaved runs."""

import contextlib
import json as json_format
import sys
from typing import Literal

from rich.console import Console
from rich.table import Table

from lightning_boost.benchmark.block import BlockResult, BlockSizes, measure_block
from lightning_boost.benchmark.numerics import ONE_PROCESS, PAPER, PAPER_PROCESSES, PAPER_TOKENS, measure_numerics
from lightning_boost.benchmark.strategy import NUM_LAYERS, measure_strategy
from lightning_boost.benchmark.timing import Quartiles, ratios
from lightning_boost.commands.display import console_for_results


def benchmark(
    what: Literal["block", "strategy", "numerics"],
    *,
    sizes: BlockSizes | None = None,
    tokens: int = PAPER_TOKENS,
    processes: int | None = None,
    repetitions: int = 15,
    json: bool = False,
) -> int:
    """Measure a decoder block, scheme beside scheme, the Trainer beside a bare loop, or how exact online RMSNorm is.

    ``block``: forward and backward of one block. ``strategy``: a training step of a model of four, by the Trainer and
    by a loop around the same parallel model. ``numerics``: online RMSNorm and a linear of 1024 features beside one
    process in the same dtype and beside float64, as in the BOOST paper.

    Where time is measured, processes are pinned to a core each and what is compared takes turns, so ratios hold where
    times do not. Close other programs first; if wall and CPU ratios disagree, the machine was busy.

    Args:
        what: What to measure.
        sizes: Of a block; none: hidden size 1024, MLP 2752, bottleneck 256, 2,048 tokens, bf16. Not for numerics.
        tokens: Of numerics.
        processes: Tensor size; none: 2, and for numerics the paper's 4.
        repetitions: Of everything, at least 15 for figures to be reported; of numerics: draws of input and weight.
        json: Whether the last line of standard output is one JSON object.
    """
    if what == "numerics":
        if sizes is not None:
            raise ValueError("sizes are those of a block; numerics has 1024 features, and takes tokens.")
        return _numerics(tokens, PAPER_PROCESSES if processes is None else processes, repetitions, json)
    given, processes = sizes or BlockSizes(), processes or 2
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


def _numerics(tokens: int, processes: int, repetitions: int, json: bool) -> int:
    found = measure_numerics(num_tokens=tokens, num_processes=processes, num_draws=repetitions)
    if json:
        in_json = {
            dtype: {
                **{
                    form: {name: pair._asdict() for name, pair in each._asdict().items()}
                    for form, each in forms.items()
                },
                "paper": {"from_one_process": PAPER[dtype]._asdict()},
            }
            for dtype, forms in found.items()
        }
        print(json_format.dumps({**in_json, "sizes": {"tokens": tokens, "processes": processes, "draws": repetitions}}))
        return 0
    title = f"RMSNorm and a linear, {tokens:,} tokens, {processes} processes; absolute, median of {repetitions} draws"
    table = Table(title=title, title_justify="left")
    for heading in ("", "from one process: max", "mean", "from float64: max", "mean"):
        table.add_column(heading, justify="right" if heading else "left")
    for dtype, forms in found.items():
        for form, exactness in forms.items():
            of_one_process = exactness.from_one_process if form != ONE_PROCESS else ()
            row = [*(f"{value:.1e}" for value in of_one_process), "", ""][:2]
            table.add_row(f"{dtype}, {form}", *row, *(f"{value:.1e}" for value in exactness.from_float64))
        name = f"{dtype}, paper ({PAPER_TOKENS} tokens, {PAPER_PROCESSES} GPUs)"
        table.add_row(name, *(f"{value:.1e}" for value in PAPER[dtype]), end_section=True)
    console_for_results().print(table)
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
