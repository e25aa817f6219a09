"""Times of kernels and of a block on one GPU, interleaved, by the GPU's own clock."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from lightning_boost.benchmark.blocks import Candidate, make_block
from lightning_boost.benchmark.counts import processes_that_do_nothing
from lightning_boost.benchmark.element_wise import moved_bytes
from lightning_boost.benchmark.timing import Quartiles
from lightning_boost.compilation import compile_layer
from lightning_boost.config import LlamaConfig
from lightning_boost.kernels.cases import Sizes, cases
from lightning_boost.kernels.dispatch import plain_kernels
from lightning_boost.kernels.operators import FAKES

_COPIED_BYTES = 2**30
_WARMUP = 3
_BUSY_SIZE, _BUSY_PRODUCTS = 8192, 6
"""Products of such matrices take some 10 ms on an H100, 25 ms on an A100."""


@dataclass(frozen=True)
class KernelTimes:
    """Of every case."""

    card: str
    copy_gb_per_second: float
    """Bytes read and written by a copy of a GiB, over its time."""
    fused: dict[str, float]
    """Microseconds of the kernel, median."""
    plain: dict[str, float]
    """Of torch's operations."""
    copy: dict[str, float]
    """Of a copy that moves as many bytes, counted by the kernel's signature, and leaves as many in the cache."""
    gb_per_second: dict[str, float]
    """Of the kernel."""

    @staticmethod
    def headings(times: "KernelTimes | None") -> list[str]:
        """Return the headings of what ``cells`` gives."""
        return [] if times is None else ["µs", "torch, µs", "of a copy's speed"]

    @staticmethod
    def cells(times: "KernelTimes | None", name: str) -> list[str]:
        """Return a case's cells of a table; none where nothing was timed."""
        if times is None:
            return []
        fused = times.fused[name]
        return [f"{fused:.0f}", f"{times.plain[name]:.0f}", f"{times.copy[name] / fused:.0%}"]

    def in_words(self) -> Iterator[str]:
        """Yield a line of the card."""
        yield f"{self.card}: a copy moves {self.copy_gb_per_second:,.0f} GB/s"


@dataclass(frozen=True)
class BlockTimes:
    """Milliseconds of one process's share of a block, forward and backward, collectives left out; medians."""

    milliseconds: dict[str, float]

    def in_words(self) -> Iterator[str]:
        """Yield a line of times and one of ratios."""
        times = self.milliseconds
        yield "a block's share, collectives left out, ms: " + ", ".join(f"{name} {t:.2f}" for name, t in times.items())
        fused = times["fused"]
        yield "over fused: " + ", ".join(f"{name} {t / fused:.2f}" for name, t in times.items() if name != "fused")


def time_cases(sizes: Sizes, repetitions: int, device: torch.device) -> KernelTimes:
    """Time every kernel on the GPU, beside torch's operations and a copy.

    Args:
        sizes: Of the tensors, which should be larger than the GPU's cache.
        repetitions: Of each.
        device: The GPU.
    """
    whole = Quartiles.of(time_on_gpu({"copy": _copying(_COPIED_BYTES, device)}, repetitions)["copy"]).median
    found: dict[str, dict[str, float]] = {"fused": {}, "plain": {}, "copy": {}}
    speed = {}
    for case in cases(sizes, torch.bfloat16, device):
        operator = getattr(torch.ops.lightning_boost, case.function).default

        def run_fused(operator: Callable[..., object] = operator, args: tuple[object, ...] = case.args) -> None:
            operator(*args)

        def run_plain(operator: Callable[..., object] = operator, args: tuple[object, ...] = case.args) -> None:
            with plain_kernels():
                operator(*args)

        moved = moved_bytes(operator, case.args, {}, FAKES[operator](*case.args))
        candidates = {"fused": run_fused, "plain": run_plain, "copy": _copying(moved // 2, device)}
        times = time_on_gpu(candidates, repetitions)
        for name, microseconds in found.items():
            microseconds[case.name] = 1e6 * Quartiles.of(times[name]).median
        speed[case.name] = moved / found["fused"][case.name] / 1e3
    return KernelTimes(
        torch.cuda.get_device_name(),
        2 * _COPIED_BYTES / whole / 1e9,
        gb_per_second=speed,
        **found,
    )


def _copying(num_bytes: int, device: torch.device) -> Callable[[], object]:
    """Return what copies so many bytes: reads them, and writes as many."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def time_block(
    config: LlamaConfig,
    tensor_parallel_size: int,
    num_tokens: int,
    sequence_length: int,
    repetitions: int,
    device: torch.device,
) -> BlockTimes:
    """Time one process's share of a block on the GPU: fused, plain, compiled, and dense in Megatron's form.

    Args:
        config: The model.
        tensor_parallel_size: Processes, all but one of which do not exist.
        num_tokens: Of a micro-batch.
        sequence_length: Of its sequences.
        repetitions: Of each.
        device: The GPU.
    """
    shape = num_tokens // sequence_length, sequence_length
    with processes_that_do_nothing(tensor_parallel_size):
        low_rank, dense = Candidate("bottleneck"), Candidate("full_rank", "full_rank")
        blocks = {
            name: make_block(config, candidate, shape, torch.bfloat16, device)
            for name, candidate in {
                "fused": low_rank,
                "plain": low_rank,
                "fused compiled": low_rank,
                "plain compiled": low_rank,
                "full_rank": dense,
            }.items()
        }

        def step(name: str) -> Callable[[], None]:
            def run() -> None:
                with plain_kernels() if name.startswith("plain") else nullcontext():
                    blocks[name].step()

            return run

        for name, block in blocks.items():
            if name.endswith("compiled"):
                compile_layer(block.module)
        candidates = {name: step(name) for name in blocks}
        times = time_on_gpu(candidates, repetitions)
    return BlockTimes({name: 1e3 * Quartiles.of(each).median for name, each in times.items()})


def time_on_gpu(candidates: Mapping[str, Callable[[], object]], repetitions: int) -> dict[str, list[float]]:
    """Return the seconds of every candidate by the GPU's clock, each run in turn.

    The GPU is kept busy until a candidate is launched whole: what launching takes is not its time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    square = torch.zeros(_BUSY_SIZE, _BUSY_SIZE, dtype=torch.bfloat16, device="cuda")
    product = torch.empty_like(square)
    for repetition in range(_WARMUP + repetitions):
        for name, run in candidates.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(_BUSY_PRODUCTS):
                torch.mm(square, square, out=product)
            start.record()
            run()
            end.record()
            end.synchronize()
            if repetition >= _WARMUP:
                seconds[name].append(start.elapsed_time(end) / 1e3)
    return seconds
