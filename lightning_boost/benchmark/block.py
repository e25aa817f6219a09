"""``benchmark block``: forward and backward of one decoder block, scheme beside scheme, on pinned CPU processes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_boost.benchmark.processes import run_pinned
from lightning_boost.benchmark.timing import Quartiles, Timings, ratios, time_interleaved
from lightning_boost.config import LlamaConfig, LowRankConfig, LowRankKind
from lightning_boost.layout import find_decoder
from lightning_boost.mesh import ParallelSizes, build_mesh
from lightning_boost.model.llama import LlamaForCausalLM
from lightning_boost.model.rotary import rotary_tables
from lightning_boost.parallelize import parallelize
from lightning_boost.tensor_parallel.check import check_tensor_size

SCHEMES: dict[str, LowRankKind] = {"full_rank": "full_rank", "bottleneck": "cola"}
"""Schemes that are compared, and the kind of model that each is for."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""Dtypes that are measured, by their names as options."""


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """Sizes of the block and of its input; by default those whose balance on a CPU is near a 7B model's on GPUs.

    Raises:
        ValueError: If a size is below 1 or the dtype is not measured.
    """

    hidden_size: int = 1024
    intermediate_size: int = 2752
    bottleneck_size: int = 256
    num_attention_heads: int = 16
    num_sequences: int = 4
    sequence_length: int = 512
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("num_sequences", "sequence_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"sizes.{name} ({getattr(self, name)}) must be at least 1.")
        if self.dtype not in DTYPES:
            raise ValueError(f"sizes.dtype ({self.dtype!r}) must be one of {', '.join(DTYPES)}.")

    @property
    def num_tokens(self) -> int:
        """Rows of every GEMM."""
        return self.num_sequences * self.sequence_length


@dataclass(frozen=True)
class BlockResult:
    """What was measured."""

    times: dict[str, Timings]
    gemm_gflops_per_second: float
    """Of one process, at the block's own up-projection."""

    all_reduce_gb_per_second: float
    """Payload over time, at the payload of the block's grouped q, k and v."""

    def full_rank_over_bottleneck(self) -> Quartiles:
        """Return the ratios of wall times; above 1 the bottleneck is faster."""
        return ratios(self.times["full_rank"].wall, self.times["bottleneck"].wall)

    def full_rank_over_bottleneck_cpu(self) -> Quartiles:
        """Return the ratios of CPU times."""
        return ratios(self.times["full_rank"].cpu, self.times["bottleneck"].cpu)


def measure_block(sizes: BlockSizes, *, num_processes: int, repetitions: int, warmup: int = 2) -> BlockResult:
    """Measure one block under every scheme, interleaved.

    Args:
        sizes: Of the block.
        num_processes: Tensor size; a core for each.
        repetitions: Of every scheme.
        warmup: Repetitions before, not measured.

    Raises:
        ValueError: If there are fewer cores than processes, fewer than two repetitions, or sizes that the processes
            cannot share.
    """
    if repetitions < 2:
        raise ValueError(f"repetitions ({repetitions}) must be at least 2: quartiles are taken.")
    for kind in SCHEMES.values():
        check_tensor_size(find_decoder(_make_model(sizes, kind)), num_processes)
    found = run_pinned(_measure, num_processes, vars(sizes), repetitions, warmup)
    times = {name: Timings(*pair) for name, pair in found["times"].items()}
    return BlockResult(times, found["gemm_gflops_per_second"], found["all_reduce_gb_per_second"])


def _measure(sizes: dict[str, object], repetitions: int, warmup: int) -> dict[str, object]:
    given = BlockSizes(**sizes)  # type: ignore[arg-type]
    candidates = {name: _make_step(given, kind) for name, kind in SCHEMES.items()}
    times = time_interleaved(candidates, repetitions=repetitions, warmup=warmup)
    balance = time_interleaved(_probes(given), repetitions=9, warmup=2)
    gemm, reduced = (Quartiles.of(balance[name].wall).median for name in ("gemm", "all_reduce"))
    flops = 2 * given.num_tokens * given.bottleneck_size * given.intermediate_size / dist.get_world_size()
    payload = given.num_tokens * 3 * given.bottleneck_size * DTYPES[given.dtype].itemsize
    return {
        "times": {name: tuple(timing) for name, timing in times.items()},
        "gemm_gflops_per_second": flops / gemm / 1e9,
        "all_reduce_gb_per_second": payload / reduced / 1e9,
    }


def block_config(sizes: BlockSizes, kind: LowRankKind, *, num_layers: int = 1, vocab_size: int = 64) -> LlamaConfig:
    """Return the configuration of a model of such blocks."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=sizes.num_attention_heads,
        low_rank=LowRankConfig(kind=kind, bottleneck_size=sizes.bottleneck_size),
    )


def _make_model(sizes: BlockSizes, kind: LowRankKind) -> LlamaForCausalLM:
    """Return a model of one block, without values."""
    with torch.device("meta"):
        return LlamaForCausalLM(block_config(sizes, kind)).to(DTYPES[sizes.dtype])


def _make_step(sizes: BlockSizes, kind: LowRankKind) -> Callable[[], object]:
    """Return a function that runs one block forward and backward on this process's part."""
    size, model, dtype = dist.get_world_size(), _make_model(sizes, kind), DTYPES[sizes.dtype]
    mesh = build_mesh(ParallelSizes(tensor_parallel_size=size), "cpu")
    parallelize(find_decoder(model), mesh, device=torch.device("cpu"), seed=0)
    block = model.model.layers[0]
    width = sizes.hidden_size if kind == "full_rank" else sizes.hidden_size // size
    generator = torch.Generator().manual_seed(0)
    shape = (sizes.num_sequences, sizes.sequence_length, width)
    x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    upstream = torch.randn(shape, generator=generator).to(dtype)
    rotary = rotary_tables(torch.arange(sizes.sequence_length), sizes.sequence_length, model.config, like=x)

    def step() -> None:
        y: Tensor = block(x, rotary)
        y.backward(upstream)
        x.grad = None
        block.zero_grad()

    return step


def _probes(sizes: BlockSizes) -> dict[str, Callable[[], object]]:
    """Return what tells the machine's balance: the block's largest GEMM of a pair, and its widest all-reduce."""
    dtype = DTYPES[sizes.dtype]
    latents = torch.randn(sizes.num_tokens, sizes.bottleneck_size).to(dtype)
    factor = torch.randn(sizes.bottleneck_size, sizes.intermediate_size // dist.get_world_size()).to(dtype)
    payload = torch.zeros(sizes.num_tokens, 3 * sizes.bottleneck_size, dtype=dtype)
    return {"gemm": lambda: latents @ factor, "all_reduce": lambda: dist.all_reduce(payload)}
