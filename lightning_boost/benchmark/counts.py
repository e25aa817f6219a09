"""``benchmark counts``: what a decoder block moves, multiplies and keeps on one process of several, counted.

The modules that train are run on one process of a group whose collectives do nothing, so any size and any number of
processes is counted in seconds, without a GPU. What is counted grows with tokens alone: a few are run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from lightning_boost.benchmark.blocks import SCHEMES, Block, Candidate, make_block, make_model, with_kind
from lightning_boost.benchmark.live_memory import LiveMemory
from lightning_boost.benchmark.paper import FLOPS_RATIO, GRADIENT_RATIO, INTENSITY_RATIO, MEMORY_GIB, VOLUME_RATIO
from lightning_boost.benchmark.report import Bars, Report
from lightning_boost.collectives import CollectiveLog, count_collectives
from lightning_boost.config import LlamaConfig
from lightning_boost.layout import find_decoder
from lightning_boost.mesh import shard_bounds
from lightning_boost.recompute import RecomputeOptions
from lightning_boost.tensor_parallel.check import check_tensor_size
from lightning_boost.tensor_parallel.scheme import scheme_for

_TOKENS_RUN = 16


@dataclass(frozen=True)
class PassCounts:
    """Of one pass of a block, on one process."""

    launches: int
    """Collectives."""

    values_per_token: float
    """That the process hands to them."""

    bytes: int
    gemm_flops: int

    saved_values_per_token: float
    """That forward leaves for backward: bytes over those of the dtype. The block's output, which the next one keeps as
    its input, counts; its input and its parameters do not."""


Counts = dict[str, PassCounts]
"""By pass: ``forward``, ``backward``."""


def count_block(
    config: LlamaConfig,
    candidate: Candidate,
    *,
    tensor_parallel_size: int,
    num_tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    recompute: RecomputeOptions | None = None,
) -> Counts:
    """Count a block of a model under a scheme, on the first process.

    Args:
        config: The model; its kind gives way to the candidate's.
        candidate: Scheme and kind.
        tensor_parallel_size: Processes, all but one of which do not exist.
        num_tokens: For which bytes and FLOPs are given.
        dtype: Of parameters and activations.
        recompute: What is computed again in backward.
    """
    with processes_that_do_nothing(tensor_parallel_size):
        block = make_block(config, candidate, (1, _TOKENS_RUN), dtype, torch.device("cpu"), recompute)
        counted = _count_step(block)
    scale = num_tokens / _TOKENS_RUN
    return {
        pass_: PassCounts(
            launches=log.total().launches,
            values_per_token=log.total().values / _TOKENS_RUN,
            bytes=round(log.total().bytes * scale),
            gemm_flops=round(flops * scale),
            saved_values_per_token=kept / dtype.itemsize / _TOKENS_RUN,
        )
        for pass_, (log, flops, kept) in counted.items()
    }


def _count_step(block: Block) -> dict[str, tuple[CollectiveLog, int, int]]:
    """Return collectives, FLOPs and the bytes that are kept when the pass has ended, by pass."""
    block.step()  # caches of the first call are no block's
    with count_collectives() as forward_log, FlopCounterMode(display=False) as forward_flops:
        y = block.forward()
    with count_collectives() as backward_log, FlopCounterMode(display=False) as backward_flops:
        y.backward(block.upstream)
    del y
    memory = LiveMemory()
    with memory:
        y = block.forward()
    kept = memory.bytes
    del y
    return {
        "forward": (forward_log, forward_flops.get_total_flops(), kept),
        "backward": (backward_log, backward_flops.get_total_flops(), 0),
    }


@contextmanager
def processes_that_do_nothing(size: int) -> Iterator[None]:
    """Be the first of a group of processes whose others do not exist."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def parameters_per_process(config: LlamaConfig, candidate: Candidate, tensor_parallel_size: int) -> int:
    """Return the parameters of a whole model that the first process of the tensor axis holds."""
    decoder = find_decoder(make_model(with_kind(config, candidate.kind), torch.bfloat16))
    placements = scheme_for(decoder, candidate.scheme).placements(decoder, tensor_parallel_size)
    total = 0
    for name, parameter in decoder.root.named_parameters():
        shape, placement = list(parameter.shape), placements.get(name)
        if isinstance(placement, Shard):
            _, shape[placement.dim] = shard_bounds(shape[placement.dim], tensor_parallel_size, 0)
        total += prod(shape)
    return total


def mlp_intensity(config: LlamaConfig, scheme: str, tensor_parallel_size: int, num_tokens: int) -> float:
    """Return FLOPs per byte of the GEMMs of one projection into the MLP; bf16, every operand read or written once."""
    hidden, features = config.hidden_size, config.intermediate_size
    size = with_kind(config, "cola").bottleneck_size_of(0, "up_proj") or 0
    forms: dict[str, list[tuple[float, float]]] = {
        "full_rank": [(hidden, features / tensor_parallel_size)],
        "vanilla": [(hidden, size / tensor_parallel_size), (size / tensor_parallel_size, features)],
        "bottleneck": [(hidden / tensor_parallel_size, size), (size, features / tensor_parallel_size)],
    }
    products = forms[scheme]
    flops = sum(2 * num_tokens * depth * width for depth, width in products)
    values = sum(num_tokens * depth + depth * width + num_tokens * width for depth, width in products)
    return flops / (2 * values)


def check_shares(config: LlamaConfig, tensor_parallel_size: int, num_tokens: int) -> None:
    """Check that there is something to count.

    Raises:
        ValueError: If the tokens or the processes are fewer than one, or these cannot share the model.
    """
    for name, value in {"tokens": num_tokens, "tensor_parallel_size": tensor_parallel_size}.items():
        if value < 1:
            raise ValueError(f"{name} ({value}) must be at least 1.")
    check_tensor_size(find_decoder(make_model(config, torch.bfloat16)), tensor_parallel_size)


def measure_counts(config: LlamaConfig, *, tensor_parallel_size: int, num_tokens: int) -> Report:
    """Count a block under every scheme, in bf16.

    Args:
        config: The model; by default the paper's 7B.
        tensor_parallel_size: Processes.
        num_tokens: For which bytes and FLOPs are given.

    Raises:
        ValueError: If the tokens or the processes are fewer than one, or these cannot share the model.
    """
    check_shares(config, tensor_parallel_size, num_tokens)
    counts = {
        name: count_block(config, candidate, tensor_parallel_size=tensor_parallel_size, num_tokens=num_tokens)
        for name, candidate in SCHEMES.items()
    }
    parameters = {
        name: parameters_per_process(config, candidate, tensor_parallel_size) for name, candidate in SCHEMES.items()
    }
    intensity = {
        name: mlp_intensity(config, name, tensor_parallel_size, num_tokens)
        for name in ("full_rank", "vanilla", "bottleneck")
    }
    ratios = _ratios(counts, parameters, intensity)
    return Report(
        title=f"a block of {config.hidden_size} features, tensor {tensor_parallel_size}, {num_tokens:,} tokens, bf16;"
        " on one process",
        headings=("", "launches", "values a token", "MiB", "GEMM GFLOP", "kept, values a token"),
        rows=[row for name, passes in counts.items() for row in _rows(name, passes)],
        figures={
            "schemes": {
                name: {pass_: asdict(each) for pass_, each in passes.items()} for name, passes in counts.items()
            },
            "parameters_per_process": parameters,
            "mlp_flops_per_byte": intensity,
            "ratios": {name: {"counted": value, "paper": of_paper} for name, (value, of_paper) in ratios.items()},
            "sizes": {"tensor_parallel_size": tensor_parallel_size, "tokens": num_tokens},
        },
        notes=[*_notes(ratios), _weights(parameters)],
        bars=(
            Bars(
                "values a token that a process hands to collectives",
                "values",
                {
                    pass_: {name: passes[pass_].values_per_token for name, passes in counts.items()}
                    for pass_ in ("forward", "backward")
                },
            ),
        ),
    )


Ratios = dict[str, tuple[float, float | None]]
"""What was counted, and what the paper has for it."""


def _ratios(counts: dict[str, Counts], parameters: dict[str, int], intensity: dict[str, float]) -> Ratios:
    full_rank = counts["full_rank"]["forward"]
    moved: Ratios = {
        f"values forward, {name} over full_rank": (
            passes["forward"].values_per_token / full_rank.values_per_token,
            VOLUME_RATIO.get(name),
        )
        for name, passes in counts.items()
        if name != "full_rank"
    }
    return moved | {
        "GEMM FLOPs, full_rank over bottleneck": (
            full_rank.gemm_flops / counts["bottleneck"]["forward"].gemm_flops,
            FLOPS_RATIO,
        ),
        "MLP FLOPs a byte, vanilla over full_rank": (
            intensity["vanilla"] / intensity["full_rank"],
            INTENSITY_RATIO["vanilla over full_rank"],
        ),
        "MLP FLOPs a byte, bottleneck over vanilla": (
            intensity["bottleneck"] / intensity["vanilla"],
            INTENSITY_RATIO["bottleneck over vanilla"],
        ),
        "gradients to reduce over replicas, full_rank over bottleneck": (
            parameters["full_rank"] / parameters["bottleneck"],
            GRADIENT_RATIO,
        ),
    }


def _rows(name: str, passes: Counts) -> Iterator[list[str]]:
    for pass_, each in passes.items():
        kept = f"{each.saved_values_per_token:,.0f}" if pass_ == "forward" else ""
        yield [
            f"{name}, {pass_}",
            f"{each.launches}",
            f"{each.values_per_token:,.0f}",
            f"{each.bytes / 2**20:,.1f}",
            f"{each.gemm_flops / 1e9:,.1f}",
            kept,
        ]


def _notes(ratios: Ratios) -> Iterator[str]:
    for name, (value, of_paper) in ratios.items():
        yield f"{name}: {value:.2f}" + ("" if of_paper is None else f" (paper {of_paper:g})")


def _weights(parameters: dict[str, int]) -> str:
    written = ", ".join(f"{name} {2 * number / 2**30:.2f}" for name, number in parameters.items())
    return f"weights of the whole model on one process, GiB: {written} (paper {MEMORY_GIB['bottleneck']['weights']:g})"
