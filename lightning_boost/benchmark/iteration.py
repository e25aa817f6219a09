"""``benchmark iteration`` and ``kinds``: training steps of a whole small model, head, loss and optimizer included."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_boost.benchmark.blocks import (
    DTYPES,
    SCHEMES,
    Candidate,
    block_config,
    in_words,
    machine_balance,
)
from lightning_boost.benchmark.paper import (
    ITERATION_SECONDS_BY_KIND,
    ITERATION_SECONDS_BY_MICRO_BATCH,
    over_bottleneck,
)
from lightning_boost.benchmark.report import Report, compare, join
from lightning_boost.benchmark.setup import Setup
from lightning_boost.benchmark.timing import Timings, time_interleaved
from lightning_boost.benchmark.training import Batch, TrainingLoop
from lightning_boost.config import LowRankKind

NUM_LAYERS = 2
VOCAB_SIZE = 4096
MICRO_BATCHES = (1, 2, 4, 8)
KINDS: tuple[LowRankKind, ...] = ("svd", "cola", "lax")
_WARMUP = 2


def measure_iteration(setup: Setup) -> Report | None:
    """Time training steps under every scheme, at several micro-batches instead of the setup's sequences."""
    candidates = {name: tuple(candidate) for name, candidate in SCHEMES.items()}
    found = setup.run(_measure, candidates, list(MICRO_BATCHES))
    if found is None:
        return None
    pairs = [(name, "bottleneck") for name in SCHEMES if name != "bottleneck"]
    reports = {}
    for size, times in found["times"].items():
        paper = over_bottleneck(ITERATION_SECONDS_BY_MICRO_BATCH.get(size, {}))
        reports[size] = compare("", _timings(times), pairs, paper=paper)
    title = f"a training step: {_described(setup)}"
    return _with_machine(join(title, "micro-batch", reports), found["machine"], setup)


def measure_kinds(setup: Setup) -> Report | None:
    """Time training steps of each kind of low-rank linear."""
    candidates = {f"{kind}, {scheme}": (scheme, kind) for kind in KINDS for scheme in ("vanilla", "bottleneck")}
    found = setup.run(_measure, candidates, [setup.sizes.num_sequences])
    if found is None:
        return None
    (times,) = found["times"].values()
    pairs = [(f"{kind}, vanilla", f"{kind}, bottleneck") for kind in KINDS]
    pairs += [(f"{kind}, bottleneck", f"{KINDS[0]}, bottleneck") for kind in KINDS[1:]]
    of_paper = {
        f"{kind}, {scheme}": seconds
        for kind, each in ITERATION_SECONDS_BY_KIND.items()
        for scheme, seconds in each.items()
    }
    paper = {pair: of_paper[pair[0]] / of_paper[pair[1]] for pair in pairs}
    title = f"a training step, {setup.sizes.num_sequences} sequences: {_described(setup)}"
    return _with_machine(compare(title, _timings(times), pairs, paper=paper), found["machine"], setup)


def _described(setup: Setup) -> str:
    sizes = setup.sizes
    return (
        f"{NUM_LAYERS} layers of hidden {sizes.hidden_size}, MLP {sizes.intermediate_size}, bottleneck"
        f" {sizes.bottleneck_size}, vocabulary {VOCAB_SIZE}, sequences of {sizes.sequence_length}, {sizes.dtype},"
        f" {setup.num_processes} processes"
    )


def _with_machine(report: Report, machine: Mapping[str, float], setup: Setup) -> Report:
    figures = {**report.figures, "machine": dict(machine), "sizes": setup.figures}
    return replace(report, figures=figures, notes=[*report.notes, in_words(machine)])


def _timings(times: Mapping[str, Sequence[list[float]]]) -> dict[str, Timings]:
    return {name: Timings(*pair) for name, pair in times.items()}


def _measure(
    device: torch.device, setup: Setup, candidates: dict[str, Any], micro_batches: list[int]
) -> dict[str, Any]:
    given = setup.sizes
    config = block_config(given, "cola", num_layers=NUM_LAYERS, vocab_size=VOCAB_SIZE)
    loops = {
        name: TrainingLoop(config, Candidate(*each), DTYPES[given.dtype], device) for name, each in candidates.items()
    }
    times = {}
    for size in micro_batches:
        batch = _batch(size, given.sequence_length, device)
        steps = {name: (lambda loop=loop, batch=batch: loop.step(batch)) for name, loop in loops.items()}
        measured = time_interleaved(steps, repetitions=setup.repetitions, warmup=_WARMUP, device=device)
        times[size] = {name: tuple(timing) for name, timing in measured.items()}
    return {"times": times, "machine": machine_balance(given, device)}


def _batch(num_sequences: int, sequence_length: int, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(VOCAB_SIZE, (num_sequences, sequence_length), generator=generator).to(device)
    return {"input_ids": input_ids, "labels": input_ids}
