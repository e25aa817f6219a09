"""``benchmark block``, ``grouping``, ``peers`` and ``compile``: one decoder block in several ways."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_boost.benchmark.blocks import (
    DTYPES,
    SCHEMES,
    Block,
    BlockSizes,
    Candidate,
    block_config,
    in_words,
    machine_balance,
    make_block,
    make_model,
)
from lightning_boost.benchmark.paper import BLOCK_FORWARD_MICROSECONDS, ITERATION_SECONDS, over_bottleneck
from lightning_boost.benchmark.peers import apply_plan
from lightning_boost.benchmark.report import Report, compare
from lightning_boost.benchmark.setup import Setup
from lightning_boost.benchmark.timing import Timings, time_interleaved
from lightning_boost.communication_trace import CommunicationTrace, Event
from lightning_boost.compilation import compile_layer
from lightning_boost.mesh import TENSOR_AXIS, ParallelSizes, build_mesh
from lightning_boost.model.initialization import initialize

Steps = dict[str, Callable[[], object]]


def measure_block(setup: Setup) -> Report | None:
    """Time one block under every scheme, forward and backward; ``None`` where ``Setup.run`` gives none."""
    pairs = [(name, "bottleneck") for name in SCHEMES if name != "bottleneck"]
    return _measure(scheme_steps, pairs, over_bottleneck(ITERATION_SECONDS), setup)


def measure_peers(setup: Setup) -> Report | None:
    """Time the block beside the same one under torch's tensor parallelism.

    Raises:
        ValueError: If processes do not divide the bottleneck, which torch's plan splits.
    """
    size = setup.sizes.bottleneck_size
    if size % setup.num_processes:
        raise ValueError(
            f"sizes.bottleneck_size ({size}) must be a multiple of processes ({setup.num_processes}): torch's plan"
            " splits the bottleneck, into equal parts only."
        )
    return _measure(peer_steps, [("peers", "bottleneck")], {}, setup)


def measure_grouping(setup: Setup) -> Report | None:
    """Time the block with and without grouped projections."""
    pairs = [("ungrouped", "grouped"), ("ungrouped, forward", "grouped, forward")]
    default, grouped = BLOCK_FORWARD_MICROSECONDS[4]
    return _measure(grouping_steps, pairs, {pairs[1]: default / grouped}, setup)


def measure_compile(setup: Setup) -> Report | None:
    """Time the block as it is and compiled; it compiles before time is taken."""
    return _measure(compile_steps, [("as it is", "compiled"), ("as it is, forward", "compiled, forward")], {}, setup)


def _measure(
    make_steps: Callable[[BlockSizes, torch.device], Steps],
    pairs: Sequence[tuple[str, str]],
    paper: Mapping[tuple[str, str], float],
    setup: Setup,
) -> Report | None:
    found = setup.run(_run, make_steps)
    if found is None:
        return None
    return compare(
        f"one block, forward and backward: {setup.described}",
        {name: Timings(*pair) for name, pair in found["times"].items()},
        pairs,
        paper=paper,
        notes=[_collectives_in_words(found["collectives"]), in_words(found["machine"])],
        figures={"collectives": found["collectives"], "machine": found["machine"], "sizes": setup.figures},
    )


def _run(device: torch.device, setup: Setup, make_steps: Callable[[BlockSizes, torch.device], Steps]) -> dict[str, Any]:
    steps = make_steps(setup.sizes, device)
    times = time_interleaved(steps, repetitions=setup.repetitions, warmup=2, device=device)
    return {
        "times": {name: tuple(timing) for name, timing in times.items()},
        "collectives": {name: _count(step, device) for name, step in steps.items()},
        "machine": machine_balance(setup.sizes, device),
    }


def _count(step: Callable[[], object], device: torch.device) -> dict[str, dict[str, int]]:
    """Return how many collectives a step launches on a process, torch's own too, and the bytes handed in, by pass."""
    with CommunicationTrace({}, is_cuda=device.type == "cuda").open() as trace:
        step()
    return traffic_by_pass(trace.events())


def traffic_by_pass(events: Sequence[Event]) -> dict[str, dict[str, int]]:
    """Return the launches and bytes of collectives, by pass."""
    by_pass = {pass_: [event.bytes for event in events if event.pass_ == pass_] for pass_ in ("forward", "backward")}
    return {pass_: {"launches": len(sizes), "bytes": sum(sizes)} for pass_, sizes in by_pass.items()}


def _collectives_in_words(collectives: Mapping[str, Mapping[str, Mapping[str, int]]]) -> str:
    written = (
        f"{name} "
        + " + ".join(
            f"{each['launches']} ({each['bytes'] / 2**20:.3g} MiB)" for each in passes.values() if each["launches"]
        )
        for name, passes in collectives.items()
    )
    return f"Collectives of a process, forward + backward: {'; '.join(written)}."


def scheme_steps(sizes: BlockSizes, device: torch.device) -> Steps:
    """Return a step of the block under each scheme."""
    return {name: _block(sizes, candidate, device).step for name, candidate in SCHEMES.items()}


def _block(sizes: BlockSizes, candidate: Candidate, device: torch.device) -> Block:
    return make_block(block_config(sizes, candidate.kind), candidate, sizes.shape, DTYPES[sizes.dtype], device)


def peer_steps(sizes: BlockSizes, device: torch.device) -> Steps:
    """Return a step of the bottleneck's block, and of the same one as torch's own means split it."""
    config = block_config(sizes, "cola")
    model = make_model(config, DTYPES[sizes.dtype])
    initialize(model, std=config.initializer_range, seed=0)
    mesh = build_mesh(ParallelSizes(tensor_parallel_size=dist.get_world_size()), device.type)
    layer = model.model.layers[0].to(device)
    apply_plan(layer, mesh[TENSOR_AXIS])
    peer = Block(layer, config, config.hidden_size, sizes.shape, DTYPES[sizes.dtype])
    return {"peers": peer.step, "bottleneck": _block(sizes, SCHEMES["bottleneck"], device).step}


def grouping_steps(sizes: BlockSizes, device: torch.device) -> Steps:
    """Return the block without and with grouped projections, in both passes and forward alone."""
    blocks = {
        "ungrouped": _block(sizes, Candidate("bottleneck_ungrouped"), device),
        "grouped": _block(sizes, SCHEMES["bottleneck"], device),
    }
    steps: Steps = {name: block.step for name, block in blocks.items()}
    return steps | {f"{name}, forward": block.forward for name, block in blocks.items()}


def compile_steps(sizes: BlockSizes, device: torch.device) -> Steps:
    """Return the block as it is and compiled, in both passes and forward alone."""
    blocks = {name: _block(sizes, SCHEMES["bottleneck"], device) for name in ("as it is", "compiled")}
    compile_layer(blocks["compiled"].module)
    steps: Steps = {name: block.step for name, block in blocks.items()}
    return steps | {f"{name}, forward": block.forward for name, block in blocks.items()}
