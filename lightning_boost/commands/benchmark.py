"""``benchmark …``: measure on this machine; times as ratios of interleaved runs.

Where time is measured, processes are pinned to a core each and what is compared takes turns, so ratios hold where times
do not. Close other programs first; where wall and CPU ratios disagree, the machine was busy.
"""

import json as json_format
from collections.abc import Callable

from lightning_boost.benchmark.block import measure_block, measure_compile, measure_grouping, measure_peers
from lightning_boost.benchmark.blocks import BlockSizes
from lightning_boost.benchmark.charts import check_output, table_of, write_report
from lightning_boost.benchmark.communication import measure_communication
from lightning_boost.benchmark.counts import measure_counts
from lightning_boost.benchmark.iteration import measure_iteration, measure_kinds
from lightning_boost.benchmark.kernels import measure_kernels
from lightning_boost.benchmark.memory import PAPER_TENSOR_SIZE, measure_memory
from lightning_boost.benchmark.memory import PAPER_TOKENS as PAPER_TOKENS_OF_MEMORY
from lightning_boost.benchmark.numerics import PAPER_PROCESSES, PAPER_TOKENS, measure_numerics
from lightning_boost.benchmark.paper import BOOST_7B
from lightning_boost.benchmark.processes import Device, check_alone, leave
from lightning_boost.benchmark.recompute import measure_recompute
from lightning_boost.benchmark.report import Report
from lightning_boost.benchmark.setup import Setup
from lightning_boost.benchmark.statistic import measure_statistic
from lightning_boost.benchmark.strategy import measure_strategy
from lightning_boost.commands.display import console_for_results
from lightning_boost.config import LlamaConfig

SIZES = BlockSizes()

Command = Callable[..., int]


def _timed(name: str, measure: Callable[[Setup], Report | None], summary: str, *, repetitions: int = 15) -> Command:
    """Return the command that times something with a model's sizes."""
    default = repetitions

    def command(
        *,
        sizes: BlockSizes = SIZES,
        processes: int = 2,
        repetitions: int = default,
        device: Device = "cpu",
        json: bool = False,
        output: str | None = None,
    ) -> int:
        check_output(output)
        setup = Setup(sizes=sizes, num_processes=processes, repetitions=repetitions, device=device)
        return _show(name, measure(setup), json, output)

    command.__doc__ = f"""{summary}

    Args:
        sizes: Of a block and its input.
        processes: Tensor size.
        repetitions: Of everything; the more, the steadier the quartiles.
        device: Where it computes; on several GPUs also under torchrun.
        json: Whether the last line of standard output is one JSON object.
        output: Directory for the table, its figures and charts.
    """
    return command


def _counted(name: str, measure: Callable[..., Report], summary: str, *, tokens: int) -> Command:
    """Return the command that counts something of a model on one process of several."""
    default = tokens

    def command(
        *,
        config: LlamaConfig = BOOST_7B,
        tensor_parallel_size: int = PAPER_TENSOR_SIZE,
        tokens: int = default,
        json: bool = False,
        output: str | None = None,
    ) -> int:
        check_alone(name)
        check_output(output)
        report = measure(config, tensor_parallel_size=tensor_parallel_size, num_tokens=tokens)
        return _show(name, report, json, output)

    command.__doc__ = f"""{summary}

    Args:
        config: Of the model, by default the paper's 7B.
        tensor_parallel_size: Processes, which need not exist.
        tokens: Of a micro-batch.
        json: Whether the last line of standard output is one JSON object.
        output: Directory for the table, its figures and charts.
    """
    return command


def numerics(
    *,
    tokens: int = PAPER_TOKENS,
    processes: int = PAPER_PROCESSES,
    repetitions: int = 15,
    device: Device = "cpu",
    json: bool = False,
    output: str | None = None,
) -> int:
    """Compare online RMSNorm and a linear of 1024 features with one process and with float64, as in the BOOST paper.

    Args:
        tokens: Rows of the hidden state.
        processes: Tensor size; they may share cores, but not GPUs.
        repetitions: Draws of input and weight.
        device: Where it computes; on several GPUs also under torchrun.
        json: Whether the last line of standard output is one JSON object.
        output: Directory for the table, its figures and charts.
    """
    check_output(output)
    report = measure_numerics(num_tokens=tokens, num_processes=processes, num_draws=repetitions, device=device)
    return _show("numerics", report, json, output)


def kernels(
    *,
    config: LlamaConfig = BOOST_7B,
    tensor_parallel_size: int = 4,
    tokens: int = 16384,
    sequence_length: int = 4096,
    device: Device = "cpu",
    repetitions: int = 20,
    json: bool = False,
    output: str | None = None,
) -> int:
    """Count the bytes that fused kernels save, and what they take of GPUs that need not be there; on a GPU, time them.

    Args:
        config: Of the model; none: the paper's 7B.
        tensor_parallel_size: Processes, all but one of which need not exist.
        tokens: Of a micro-batch.
        sequence_length: Of its sequences.
        device: ``cuda``: kernels and a block's share are timed, too, on one GPU.
        repetitions: Of every time.
        json: Whether the last line of standard output is one JSON object.
        output: Directory for the table, its figures and charts.
    """
    check_alone("kernels")
    check_output(output)
    report = measure_kernels(
        config,
        tensor_parallel_size=tensor_parallel_size,
        num_tokens=tokens,
        sequence_length=sequence_length,
        device=device,
        repetitions=repetitions,
    )
    return _show("kernels", report, json, output)


def statistic(
    *,
    tokens: int = 256,
    processes: int = 4,
    device: Device = "cpu",
    json: bool = False,
    output: str | None = None,
) -> int:
    """Compare the ways in which online RMSNorm's statistic can travel: launches, bytes, and exactness beside float64.

    Args:
        tokens: Rows of the hidden state.
        processes: Tensor size; they may share cores, but not GPUs.
        device: Where it computes; on several GPUs also under torchrun.
        json: Whether the last line of standard output is one JSON object.
        output: Directory for the table, its figures and charts.
    """
    check_output(output)
    report = measure_statistic(num_tokens=tokens, num_processes=processes, device=device)
    return _show("statistic", report, json, output)


def _show(name: str, report: Report | None, json: bool, output: str | None) -> int:
    """Print a report, and write it where that is asked for; nothing on processes that have none."""
    if report is not None and output is not None:
        write_report(report, name, output)
    if report is not None:
        _print(report, json)
    return leave(0)


def _print(report: Report, json: bool) -> None:
    if json:
        print(json_format.dumps(report.figures))
        return
    console = console_for_results()
    console.print(table_of(report))
    for note in report.notes:
        console.print(note, soft_wrap=True, highlight=False)


BENCHMARKS: dict[str, Command] = {
    "counts": _counted(
        "counts",
        measure_counts,
        "Count what a decoder block moves, multiplies and keeps under every scheme, on one process.",
        tokens=4096,
    ),
    "block": _timed("block", measure_block, "Time a decoder block, forward and backward, under every scheme."),
    "grouping": _timed("grouping", measure_grouping, "Time a decoder block with and without grouped projections."),
    "compile": _timed("compile", measure_compile, "Time a decoder block as it is, and compiled."),
    "peers": _timed(
        "peers", measure_peers, "Time a decoder block beside the same one under torch's own tensor parallelism."
    ),
    "recompute": _timed(
        "recompute", measure_recompute, "Count what a decoder block keeps and time it, under each form of recompute."
    ),
    "iteration": _timed(
        "iteration",
        measure_iteration,
        "Time a training step of a whole small model under every scheme, at micro-batches of 1, 2, 4 and 8.",
        repetitions=8,
    ),
    "kinds": _timed(
        "kinds",
        measure_kinds,
        "Time a training step of a whole small model for each kind of low-rank linear, vanilla and bottleneck.",
        repetitions=8,
    ),
    "strategy": _timed(
        "strategy",
        measure_strategy,
        "Time a training step by the Trainer, and by a loop around the same parallel model.",
    ),
    "numerics": numerics,
    "statistic": statistic,
    "kernels": kernels,
    "comm": _timed(
        "comm", measure_communication, "Time all-reduces of several sizes, and a block's collectives alone."
    ),
    "memory": _counted(
        "memory",
        measure_memory,
        "Count what a process holds of a model that is trained, under every scheme and with recompute, on one process.",
        tokens=PAPER_TOKENS_OF_MEMORY,
    ),
}
"""The commands, by the word behind ``benchmark``."""
