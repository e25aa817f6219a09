"""``benchmark recompute``: what a block keeps, what it takes, and memory saved for each millisecond added."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from lightning_boost.benchmark.blocks import (
    DTYPES,
    SCHEMES,
    Block,
    block_config,
    in_words,
    machine_balance,
    make_block,
)
from lightning_boost.benchmark.live_memory import LiveMemory
from lightning_boost.benchmark.paper import RECOMPUTE_MIB_PER_MILLISECOND
from lightning_boost.benchmark.report import Bars, Report
from lightning_boost.benchmark.setup import Setup
from lightning_boost.benchmark.timing import Quartiles, Timings, time_interleaved
from lightning_boost.collectives import count_collectives
from lightning_boost.recompute import RecomputeOptions

NONE, LOW_RANK, BLOCK = (RecomputeOptions(kind=kind) for kind in ("none", "low_rank", "block"))

CANDIDATES: dict[tuple[str, str], RecomputeOptions] = {
    ("bottleneck", "none"): NONE,
    ("bottleneck", "low_rank"): LOW_RANK,
    ("bottleneck", "low_rank, attention kept"): RecomputeOptions(kind="low_rank", keep_attention=True),
    ("bottleneck", "low_rank, sharded"): RecomputeOptions(kind="low_rank", store_latents="sharded"),
    ("bottleneck", "block"): BLOCK,
    ("vanilla_sharded", "none"): NONE,
    ("vanilla_sharded", "block"): BLOCK,
    ("vanilla", "none"): NONE,
    ("vanilla", "block"): BLOCK,
}
"""Options of recompute by scheme and their name there."""

BASELINE = "vanilla_sharded, block"
"""Whose memory saved for each millisecond others are compared with."""

_MIB = 2**20


class Saving(NamedTuple):
    """What recompute does to a block."""

    kept_mib: float
    launches: int
    """Collectives of a step, both passes."""

    milliseconds: Quartiles
    """Of a step."""

    added: Quartiles
    """Milliseconds beyond the scheme's step without recompute, repetition by repetition."""

    saved_mib: float

    @property
    def mib_per_millisecond(self) -> float | None:
        """Saved over the median of what was added; ``None`` where nothing was."""
        return self.saved_mib / self.added.median if self.added.median > 0 else None


def measure_recompute(setup: Setup) -> Report | None:
    """Count and time one block, forward and backward, under each form of recompute."""
    found = setup.run(_measure)
    return None if found is None else _report(found, setup)


def _measure(device: torch.device, setup: Setup) -> dict[str, Any]:
    given = setup.sizes
    blocks = {}
    for (scheme, name), options in CANDIDATES.items():
        candidate = SCHEMES[scheme]
        config, dtype = block_config(given, candidate.kind), DTYPES[given.dtype]
        blocks[f"{scheme}, {name}"] = make_block(config, candidate, given.shape, dtype, device, options)
    counted = {name: _count(block) for name, block in blocks.items()}
    steps = {name: block.step for name, block in blocks.items()}
    times = time_interleaved(steps, repetitions=setup.repetitions, warmup=1, device=device)
    return {
        "counted": counted,
        "times": {name: tuple(timing) for name, timing in times.items()},
        "machine": machine_balance(given, device),
    }


def _count(block: Block) -> tuple[int, int]:
    """Return the bytes that forward leaves and the collectives of a step."""
    with count_collectives() as log:
        block.step()
    memory = LiveMemory()
    with memory:
        y = block.forward()
    kept = memory.settled()
    del y
    return kept, log.total().launches


def _report(found: Mapping[str, Any], setup: Setup) -> Report:
    savings = {}
    for scheme, name in CANDIDATES:
        own, plain = (found["counted"][f"{scheme}, {each}"] for each in (name, "none"))
        wall, plain_wall = (Timings(*found["times"][f"{scheme}, {each}"]).wall for each in (name, "none"))
        savings[f"{scheme}, {name}"] = Saving(
            kept_mib=own[0] / _MIB,
            launches=own[1],
            milliseconds=Quartiles.of([1e3 * seconds for seconds in wall]),
            added=Quartiles.of([1e3 * (one - other) for one, other in zip(wall, plain_wall, strict=True)]),
            saved_mib=(plain[0] - own[0]) / _MIB,
        )
    baseline = savings[BASELINE].mib_per_millisecond
    paper = RECOMPUTE_MIB_PER_MILLISECOND[4]
    of_paper = {"bottleneck, low_rank": paper["bottleneck"] / paper["vanilla"]}
    return Report(
        title=f"recompute of one block, forward and backward: {setup.described}",
        headings=("", "kept, MiB", "collectives", "ms", "added, ms", "MiB saved a ms", f"over {BASELINE}", "paper"),
        rows=[_row(name, saving, baseline, of_paper.get(name)) for name, saving in savings.items()],
        figures={
            "forms": {name: _figures(saving, baseline) for name, saving in savings.items()},
            "paper": {f"{name} over vanilla": value for name, value in of_paper.items()},
            "machine": found["machine"],
            "sizes": setup.figures,
        },
        notes=[
            "Kept: the bytes that forward leaves for backward on one process, counted; parameters and input apart."
            " Times are medians; what was added is taken repetition by repetition.",
            in_words(found["machine"]),
        ],
        bars=(
            Bars(
                "what a block keeps for backward", "MiB", {"": {name: each.kept_mib for name, each in savings.items()}}
            ),
        ),
    )


def _row(name: str, saving: Saving, baseline: float | None, of_paper: float | None) -> list[str]:
    cells = [name, f"{saving.kept_mib:.1f}", f"{saving.launches}", f"{saving.milliseconds.median:.1f}"]
    if saving.saved_mib == 0:
        return [*cells, "", "", "", ""]
    figures = (saving.mib_per_millisecond, _over(saving, baseline), of_paper)
    return [*cells, f"{saving.added.median:.1f}", *("" if value is None else f"{value:.2f}" for value in figures)]


def _over(saving: Saving, baseline: float | None) -> float | None:
    rate = saving.mib_per_millisecond
    return None if rate is None or baseline is None else rate / baseline


def _figures(saving: Saving, baseline: float | None) -> dict[str, Any]:
    return {
        "kept_mib": saving.kept_mib,
        "collectives": saving.launches,
        "milliseconds": saving.milliseconds._asdict(),
        "added_milliseconds": saving.added._asdict(),
        "saved_mib": saving.saved_mib,
        "saved_mib_per_millisecond": saving.mib_per_millisecond,
        f"over_{BASELINE}": _over(saving, baseline),
    }
