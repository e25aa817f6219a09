"""``benchmark …``: measure on this machine; times as ratios of interleaved runs.

Where time is measured, processes are pinned to a core each and what is compared takes turns, so ratios hold where times
do not. Close other programs first; where wall and CPU ratios disagree, the machine was busy.
"""

import json as json_format
from collections.abc import Callable

from lightning_boost.benchmark.block import measure_block, measure_grouping, measure_peers
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
from lightning_boost.benchmark.processes import Device, check_alone
from lightning_boost.benchmark.recompute import measure_recompute
from lightning_boost.benchmark.report import Report
from lightning_boost.benchmark.statistic import measure_statistic
from lightning_boost.benchmark.strategy import measure_strategy
from lightning_boost.commands.display import console_for_results
from lightning_boost.config import LlamaConfig

Measure = Callable[..., Report | None]


def _timed(name: str, measure: Measure, summary: str, *, repetitions: int = 15) -> Callable[..., int]:
    """Return the command that times something with a model's sizes."""
    default = repetitions

    def command(
        *,
        sizes: BlockSizes | None = None,
        processes: int = 2,
        repetitions: int = default,
        device: Device = "cpu",
        json: bool = False,
        output: str | None = None,
    ) -> int:
        check_output(output)
        given = sizes or BlockSizes()
        report = measure(given, num_processes=processes, repetitions=repetitions, device=device)
        return _show(name, report, json, output)

    command.__doc__ = f"""{summary}

    Args:
        sizes: Of a block; none: hidden size 1024, MLP 2752, bottleneck 256, 2,048 tokens, bf16.
        processes: Tensor size.
        repetitions: Of everything; the more, the steadier the quartiles.
        device: Where it computes; on several GPUs also under torchrun.
        json: Whether the last line of standard output is one JSON object.
        output: Directory for the table, its figures and charts.
    """
    return command


block = _timed("block", measure_block, "Time a decoder block, forward and backward, under every scheme.")
grouping = _timed("grouping", measure_grouping, "Time a decoder block with and without grouped projections.")
comm = _timed("comm", measure_communication, "Time all-reduces of several sizes, and a block's collectives alone.")
peers = _timed("peers", measure_peers, "Time a decoder block beside the same one under torch's own tensor parallelism.")


recompute = _timed(
    "recompute", measure_recompute, "Count what a decoder block keeps and time it, under each form of recompute."
)
iteration = _timed(
    "iteration",
    measure_iteration,
    "Time a training step of a whole small model under every scheme, at micro-batches of 1, 2, 4 and 8.",
    repetitions=8,
)
kinds = _timed(
    "kinds",
    measure_kinds,
    "Time a training step of a whole small model for each kind of low-rank linear, vanilla and bottleneck.",
    repetitions=8,
)


def strategy(
    *,
    sizes: BlockSizes | None = None,
    processes: int = 2,
    repetitions: int = 15,
    json: bool = False,
    output: str | None = None,
) -> int:
    """Time a training step by the Trainer, and by a loop around the same parallel model.

    Args:
        sizes: Of a layer; none: hidden size 1024, MLP 2752, bottleneck 256, 2,048 tokens, bf16.
        processes: Tensor size.
        repetitions: Steps of each, at least 15 for figures to be reported.
        json: Whether the last line of standard output is one JSON object.
        output: Directory for the table, its figures and charts.
    """
    check_output(output)
    report = measure_strategy(sizes or BlockSizes(), num_processes=processes, repetitions=repetitions)
    return _show("strategy", report, json, output)


def counts(
    *,
    config: LlamaConfig = BOOST_7B,
    tensor_parallel_size: int = 4,
    tokens: int = 4096,
    json: bool = False,
    output: str | None = None,
) -> int:
    """Count what a decoder block moves, multiplies and keeps under every scheme, on one process.

    Args:
        config: Of the model; none: the paper's 7B.
        tensor_parallel_size: Processes, which need not exist.
        tokens: For which bytes and FLOPs are given.
        json: Whether the last line of standard output is one JSON object.
        output: Directory for the table, its figures and charts.
    """
    check_alone("counts")
    check_output(output)
    report = measure_counts(config, tensor_parallel_size=tensor_parallel_size, num_tokens=tokens)
    return _show("counts", report, json, output)


def numerics(
    *,
    tokens: int = PAPER_TOKENS,
    processes: int = PAPER_PROCESSES,
    repetitions: int = 15,
    json: bool = False,
    output: str | None = None,
) -> int:
    """Compare online RMSNorm and a linear of 1024 features with one process and with float64, as in the BOOST paper.

    Args:
        tokens: Rows of the hidden state.
        processes: Tensor size; they may share cores.
        repetitions: Draws of input and weight.
        json: Whether the last line of standard output is one JSON object.
        output: Directory for the table, its figures and charts.
    """
    check_alone("numerics")
    check_output(output)
    report = measure_numerics(num_tokens=tokens, num_processes=processes, num_draws=repetitions)
    return _show("numerics", report, json, output)


def memory(
    *,
    config: LlamaConfig = BOOST_7B,
    tensor_parallel_size: int = PAPER_TENSOR_SIZE,
    tokens: int = PAPER_TOKENS_OF_MEMORY,
    json: bool = False,
    output: str | None = None,
) -> int:
    """Count what a process holds of a model that is trained, under every scheme and with recompute, on one process.

    Args:
        config: Of the model; none: the paper's 7B.
        tensor_parallel_size: Processes, which need not exist.
        tokens: Of a micro-batch.
        json: Whether the last line of standard output is one JSON object.
        output: Directory for the table, its figures and charts.
    """
    check_alone("memory")
    check_output(output)
    report = measure_memory(config, tensor_parallel_size=tensor_parallel_size, num_tokens=tokens)
    return _show("memory", report, json, output)


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
    json: bool = False,
    output: str | None = None,
) -> int:
    """Compare the ways in which online RMSNorm's statistic can travel: launches, bytes, and exactness beside float64.

    Args:
        tokens: Rows of the hidden state.
        processes: Tensor size; they may share cores.
        json: Whether the last line of standard output is one JSON object.
        output: Directory for the table, its figures and charts.
    """
    check_alone("statistic")
    check_output(output)
    report = measure_statistic(num_tokens=tokens, num_processes=processes)
    return _show("statistic", report, json, output)


def _show(name: str, report: Report | None, json: bool, output: str | None) -> int:
    """Print a report, and write it where that is asked for; nothing on processes that have none."""
    if report is None:
        return 0
    if output is not None:
        write_report(report, name, output)
    if json:
        print(json_format.dumps(report.figures))
        return 0
    console = console_for_results()
    console.print(table_of(report))
    for note in report.notes:
        console.print(note, soft_wrap=True, highlight=False)
    return 0


BENCHMARKS: dict[str, Callable[..., int]] = {
    "counts": counts,
    "block": block,
    "grouping": grouping,
    "peers": peers,
    "recompute": recompute,
    "iteration": iteration,
    "kinds": kinds,
    "strategy": strategy,
    "numerics": numerics,
    "statistic": statistic,
    "comm": comm,
    "memory": memory,
    "kernels": kernels,
}
"""The commands, by the word behind ``benchmark``."""
