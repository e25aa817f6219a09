"""Decoder blocks to be measured: one under each scheme, on this process's share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_boost.benchmark.timing import Quartiles, time_interleaved
from lightning_boost.config import LlamaConfig, LowRankConfig, LowRankKind
from lightning_boost.layout import find_decoder
from lightning_boost.mesh import ParallelSizes, build_mesh, legal_tensor_sizes
from lightning_boost.model.llama import LlamaForCausalLM
from lightning_boost.model.rotary import rotary_tables
from lightning_boost.parallelize import parallelize
from lightning_boost.recompute import RecomputeOptions
from lightning_boost.tensor_parallel.scheme import SchemeName, scheme_for

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""Dtypes that are measured, by their names as options."""


class Candidate(NamedTuple):
    """A way to compute a model."""

    scheme: SchemeName
    kind: LowRankKind = "cola"


SCHEMES: dict[str, Candidate] = {
    "full_rank": Candidate("full_rank", "full_rank"),
    "vanilla": Candidate("vanilla"),
    "vanilla_sharded": Candidate("vanilla_sharded"),
    "bottleneck": Candidate("bottleneck"),
}
"""What is compared, by name."""


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """Sizes of the block and of its input; by default those whose balance on a CPU is near a 7B model's on GPUs.

    Raises:
        ValueError: If a size is below 1, the dtype is not measured, heads are not of equal, even size, or the
            bottleneck is none.
    """

    hidden_size: int = 1024
    intermediate_size: int = 2752
    bottleneck_size: int = 256
    num_attention_heads: int = 16
    num_sequences: int = 4
    sequence_length: int = 512
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if name != "dtype" and size < 1:
                raise ValueError(f"sizes.{name} ({size}) must be at least 1.")
        if self.dtype not in DTYPES:
            raise ValueError(f"sizes.dtype ({self.dtype!r}) must be one of {', '.join(DTYPES)}.")
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"sizes.hidden_size ({self.hidden_size}) must be a multiple of twice sizes.num_attention_heads"
                f" ({self.num_attention_heads}): heads are of equal, even size."
            )
        if self.bottleneck_size > min(self.hidden_size, self.intermediate_size):
            raise ValueError(
                f"sizes.bottleneck_size ({self.bottleneck_size}) must be at most the smaller of sizes.hidden_size"
                f" ({self.hidden_size}) and sizes.intermediate_size ({self.intermediate_size})."
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Sequences, and tokens of each."""
        return self.num_sequences, self.sequence_length

    @property
    def num_tokens(self) -> int:
        """Rows of every GEMM."""
        return self.num_sequences * self.sequence_length

    def described(self, num_processes: int) -> str:
        """Return the sizes in words."""
        return (
            f"hidden {self.hidden_size}, MLP {self.intermediate_size}, bottleneck {self.bottleneck_size},"
            f" {self.num_tokens:,} tokens, {self.dtype}, {num_processes} processes"
        )


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


def make_model(config: LlamaConfig, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return a model without values."""
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(dtype)


def check_sizes(sizes: BlockSizes, num_processes: int) -> None:
    """Check that processes can share a block, before any is started.

    Raises:
        ValueError: If there are none, or they cannot.
    """
    if num_processes < 1:
        raise ValueError(f"processes ({num_processes}) must be at least 1.")
    heads = sizes.num_attention_heads
    if heads % num_processes:
        raise ValueError(
            f"sizes.num_attention_heads ({heads}) must be a multiple of processes ({num_processes}); legal numbers of"
            f" processes: {', '.join(map(str, legal_tensor_sizes(heads)))}."
        )


class Block:
    """One block and an input for it.

    Args:
        module: The decoder layer, with this process's share.
        config: Its model's.
        width: Features of the hidden state that this process holds.
        shape: Sequences, and tokens of each.
        dtype: Of the input.
    """

    def __init__(
        self, module: nn.Module, config: LlamaConfig, width: int, shape: tuple[int, int], dtype: torch.dtype
    ) -> None:
        self.module, device = module, next(module.parameters()).device
        generator = torch.Generator().manual_seed(0)
        self.x, self.upstream = (torch.randn(*shape, width, generator=generator).to(device, dtype) for _ in range(2))
        self.x.requires_grad_()
        self.rotary = rotary_tables(torch.arange(shape[1], device=device), shape[1], config, like=self.x)

    def forward(self) -> Tensor:
        """Run the block."""
        y: Tensor = self.module(self.x, self.rotary)
        return y

    def step(self) -> None:
        """Run the block forward and backward."""
        self.forward().backward(self.upstream)
        self.x.grad = None
        self.module.zero_grad()


def make_block(
    config: LlamaConfig,
    candidate: Candidate,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    recompute: RecomputeOptions | None = None,
) -> Block:
    """Return a block of a model under a scheme, split over all processes.

    Args:
        config: The model; of its layers one is made.
        candidate: Scheme and kind.
        shape: Sequences, and tokens of each.
        dtype: Of parameters and input.
        device: Of this process.
        recompute: What is computed again in backward.
    """
    size = dist.get_world_size()
    model = make_model(replace(with_kind(config, candidate.kind), num_hidden_layers=1, vocab_size=64), dtype)
    decoder = find_decoder(model)
    width = scheme_for(decoder, candidate.scheme).hidden_width(decoder, size)
    mesh = build_mesh(ParallelSizes(tensor_parallel_size=size), device.type)
    parallelize(decoder, mesh, device=device, seed=0, scheme=candidate.scheme, recompute=recompute)
    return Block(model.model.layers[0], model.config, width, shape, dtype)


def with_kind(config: LlamaConfig, kind: LowRankKind) -> LlamaConfig:
    """Return the same model with linears of another kind."""
    return replace(config, low_rank=replace(config.low_rank, kind=kind))


def machine_balance(sizes: BlockSizes, device: torch.device) -> dict[str, float]:
    """Measure what tells the machine's balance: the block's largest GEMM of a pair, and its widest all-reduce."""
    found = time_interleaved(_probes(sizes, device), repetitions=9, warmup=2, device=device)
    gemm, reduced = (Quartiles.of(found[name].wall).median for name in ("gemm", "all_reduce"))
    flops = 2 * sizes.num_tokens * sizes.bottleneck_size * sizes.intermediate_size / dist.get_world_size()
    payload = sizes.num_tokens * 3 * sizes.bottleneck_size * DTYPES[sizes.dtype].itemsize
    return {"gemm_gflops_per_second": flops / gemm / 1e9, "all_reduce_gb_per_second": payload / reduced / 1e9}


def _probes(sizes: BlockSizes, device: torch.device) -> dict[str, Callable[[], object]]:
    dtype = DTYPES[sizes.dtype]
    latents = torch.randn(sizes.num_tokens, sizes.bottleneck_size).to(device, dtype)
    factor = torch.randn(sizes.bottleneck_size, sizes.intermediate_size // dist.get_world_size()).to(device, dtype)
    payload = torch.zeros(sizes.num_tokens, 3 * sizes.bottleneck_size, dtype=dtype, device=device)
    return {"gemm": lambda: latents @ factor, "all_reduce": lambda: dist.all_reduce(payload)}


def in_words(machine: Mapping[str, float]) -> str:
    """Return the machine's balance as a line."""
    flops, bytes_ = machine["gemm_gflops_per_second"], machine["all_reduce_gb_per_second"]
    return (
        f"Machine: {flops:.3g} GFLOP/s a process, all-reduce {bytes_:.2g} GB/s (payload over time),"
        f" {flops / bytes_:.0f} FLOP a byte."
    )
