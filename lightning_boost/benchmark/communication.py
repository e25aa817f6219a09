"""``benchmark comm``: how fast this backend sums, and what a block's collectives take without the block."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_boost.benchmark.blocks import DTYPES, SCHEMES, BlockSizes, block_config, make_block
from lightning_boost.benchmark.paper import ALL_REDUCE_MILLISECONDS, over_bottleneck
from lightning_boost.benchmark.report import Bars, Report, as_milliseconds, compare
from lightning_boost.benchmark.setup import Setup
from lightning_boost.benchmark.timing import Quartiles, Timings, time_interleaved
from lightning_boost.collectives import (
    CollectiveLog,
    Label,
    all_gather,
    all_reduce,
    count_collectives,
    reduce_scatter,
    register_group,
)

PAYLOAD_BYTES = tuple(2**exponent for exponent in range(13, 26, 2))
"""8 KiB to 32 MiB."""

PASSES = ("forward", "backward")
_WARMUP = 2
_OPERATIONS = {"all_reduce": all_reduce, "all_gather": all_gather, "reduce_scatter": reduce_scatter}


class Line(NamedTuple):
    """The time of an all-reduce by its bytes, as a line: ``latency + volume / bandwidth``."""

    latency_milliseconds: float
    bandwidth_gb_per_second: float
    """Of what each process sends: ``2(n - 1)/n`` times the payload, as in a ring of ``n`` processes."""


def fit_line(seconds: Mapping[int, float], num_processes: int) -> Line:
    """Fit a line to times by payload bytes, so that the sum of squared relative errors is least."""
    volumes = [2 * (num_processes - 1) / num_processes * payload for payload in seconds]
    # each row is divided by the time that it should give
    rows = [[1 / time, volume / time] for volume, time in zip(volumes, seconds.values(), strict=True)]
    matrix = torch.tensor(rows, dtype=torch.float64)
    # columns of equal size: bytes and seconds are ten orders of magnitude apart
    scale = matrix.norm(dim=0)
    solution = torch.linalg.lstsq(matrix / scale, torch.ones(len(rows), 1, dtype=torch.float64)).solution[:, 0]
    latency, per_byte = (solution / scale).tolist()
    return Line(1e3 * latency, 1e-9 / per_byte)


@dataclass
class CollectiveSequence(CollectiveLog):
    """A log that keeps every collective too, in order."""

    calls: list[tuple[str, Tensor]] = field(default_factory=list)
    """Operation, and a tensor like the one that was handed to it."""

    @override
    def add(self, operation: str, label: Label, tensor: Tensor, group: str) -> None:
        super().add(operation, label, tensor, group)
        self.calls.append((operation, torch.zeros_like(tensor)))

    def replay(self) -> None:
        """Issue them again, each waited for before the next."""
        assert dist.group.WORLD is not None
        group = register_group(dist.group.WORLD)
        for operation, tensor in self.calls:
            _OPERATIONS[operation](tensor, group, Label("replay", "forward"))


def measure_communication(setup: Setup) -> Report | None:
    """Time all-reduces of several sizes, and each scheme's collectives of one block and pass, alone and in order.

    Raises:
        ValueError: If there are fewer than two processes.
    """
    if setup.num_processes < 2:
        raise ValueError(f"processes ({setup.num_processes}) must be at least 2: one has nothing to communicate.")
    found = setup.run(_measure)
    return None if found is None else _report(found, setup)


def _measure(device: torch.device, setup: Setup) -> dict[str, Any]:
    sequences = _record(setup.sizes, device)
    replays = {name: sequence.replay for name, sequence in sequences.items()}
    single = time_interleaved(_all_reduces(device), repetitions=setup.repetitions, warmup=_WARMUP, device=device)
    alone = time_interleaved(replays, repetitions=setup.repetitions, warmup=_WARMUP, device=device)
    return {
        "all_reduce": {payload: tuple(single[str(payload)]) for payload in PAYLOAD_BYTES},
        "replayed": {name: tuple(timing) for name, timing in alone.items()},
        "traffic": {name: vars(sequence.total()) for name, sequence in sequences.items()},
    }


def _all_reduces(device: torch.device) -> dict[str, Callable[[], object]]:
    payloads = {
        size: torch.zeros(size // torch.bfloat16.itemsize, dtype=torch.bfloat16, device=device)
        for size in PAYLOAD_BYTES
    }
    return {str(size): functools.partial(dist.all_reduce, payload) for size, payload in payloads.items()}


def _record(sizes: BlockSizes, device: torch.device) -> dict[str, CollectiveSequence]:
    """Return what a block issues in a pass, by scheme and pass."""
    sequences: dict[str, CollectiveSequence] = {}
    for name, candidate in SCHEMES.items():
        config = block_config(sizes, candidate.kind)
        block = make_block(config, candidate, sizes.shape, DTYPES[sizes.dtype], device)
        forward, backward = CollectiveSequence(), CollectiveSequence()
        with count_collectives(forward):
            y = block.forward()
        with count_collectives(backward):
            y.backward(block.upstream)
        sequences |= {f"{name}, {pass_}": each for pass_, each in zip(PASSES, (forward, backward), strict=True)}
    return sequences


def _report(found: dict[str, Any], setup: Setup) -> Report:
    single = {payload: Timings(*pair) for payload, pair in found["all_reduce"].items()}
    medians = {payload: Quartiles.of(timing.wall).median for payload, timing in single.items()}
    line = fit_line(medians, setup.num_processes)
    replayed = {name: Timings(*pair) for name, pair in found["replayed"].items()}
    others = [name for name in SCHEMES if name != "bottleneck"]
    pairs = [(f"{name}, {pass_}", f"bottleneck, {pass_}") for pass_ in PASSES for name in others]
    paper = {
        (f"{above}, forward", f"{below}, forward"): ratio
        for (above, below), ratio in over_bottleneck(ALL_REDUCE_MILLISECONDS["7B"]).items()
    }
    report = compare(
        f"collectives alone; those of one block: {setup.described}",
        replayed,
        pairs,
        paper=paper,
        notes=[
            f"All-reduce, fitted: {line.latency_milliseconds:.3g} ms and {line.bandwidth_gb_per_second:.3g} GB/s sent"
            " by each process.",
            "GB/s in the table: payload over the median time.",
        ],
        figures={
            "all_reduce": {str(payload): as_milliseconds(timing) for payload, timing in single.items()},
            "fitted": line._asdict(),
            "traffic": found["traffic"],
            "sizes": setup.figures,
        },
    )
    rows = [_all_reduce_row(payload, timing) for payload, timing in single.items()]
    rates = [_rate(found["traffic"][name]["bytes"], timing) for name, timing in replayed.items()]
    below = [[*row, rate] for row, rate in zip(report.rows, [*rates, *[""] * len(pairs)], strict=True)]
    return replace(
        report,
        headings=[*report.headings, "GB/s"],
        rows=[*rows, *below],
        bars=(_bars(replayed), Bars("all-reduce", "ms", _by_size(medians))),
    )


def _all_reduce_row(payload: int, timing: Timings) -> list[str]:
    times = [*Quartiles.of(timing.wall), Quartiles.of(timing.cpu).median]
    return [
        f"all-reduce of {_in_words(payload)}, ms",
        *(f"{1e3 * value:.2f}" for value in times),
        "",
        _rate(payload, timing),
    ]


def _rate(payload: int, timing: Timings) -> str:
    return f"{payload / Quartiles.of(timing.wall).median / 1e9:.2g}"


def _in_words(payload: int) -> str:
    return f"{payload // 2**20} MiB" if payload >= 2**20 else f"{payload // 2**10} KiB"


def _by_size(seconds: Mapping[int, float]) -> dict[str, dict[str, float]]:
    return {_in_words(payload): {"all-reduce": 1e3 * value} for payload, value in seconds.items()}


def _bars(replayed: Mapping[str, Timings]) -> Bars:
    groups = {
        pass_: {name: 1e3 * Quartiles.of(replayed[f"{name}, {pass_}"].wall).median for name in SCHEMES}
        for pass_ in PASSES
    }
    return Bars("a block's collectives alone", "ms", groups)
