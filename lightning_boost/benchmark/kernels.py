"""``benchmark kernels``: what fusing element-wise passes saves, by count; on a GPU by time, too.

Counts need neither a GPU nor Triton's interpreter. Registers and shared memory are those of kernels that are compiled
for GPUs that are not there. On a GPU every kernel is timed beside torch's operations and beside the speed of a copy,
and one process's share of a decoder block fused, plain, compiled, and dense; its collectives do nothing.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.util import find_spec
from typing import Any

import torch
from typing_extensions import override

from lightning_boost.benchmark.counts import check_shares, processes_that_do_nothing
from lightning_boost.benchmark.element_wise import element_wise_bytes, moved_bytes
from lightning_boost.benchmark.kernel_times import BlockTimes, KernelTimes, time_block, time_cases
from lightning_boost.benchmark.live_memory import UncomputedProducts
from lightning_boost.benchmark.processes import Device
from lightning_boost.benchmark.report import Bars, Report
from lightning_boost.benchmark.timing import check_repetitions
from lightning_boost.collectives import register_group
from lightning_boost.config import LlamaConfig
from lightning_boost.kernels.cases import Case, Sizes, cases
from lightning_boost.kernels.dispatch import fused_everywhere, is_interpreting, plain_kernels
from lightning_boost.kernels.operators import FAKES

TARGETS = (80, 90)
"""Compute capabilities that kernels are compiled for."""

MIB = 2**20


def measure_kernels(
    config: LlamaConfig,
    *,
    tensor_parallel_size: int,
    num_tokens: int,
    sequence_length: int = 4096,
    device: Device = "cpu",
    repetitions: int = 20,
) -> Report:
    """Count what the kernels of a block and of the loss move, and time them on a GPU.

    Args:
        config: The model.
        tensor_parallel_size: Processes, all but one of which do not exist.
        num_tokens: Of a micro-batch.
        sequence_length: Of its sequences.
        device: ``"cuda"``: times, too.
        repetitions: Of every time.

    Raises:
        ValueError: If the sizes do not go together, or there is no GPU to time on.
    """
    check_shares(config, tensor_parallel_size, num_tokens)
    check_repetitions(repetitions)
    if sequence_length < 1 or num_tokens % sequence_length:
        raise ValueError(
            f"tokens ({num_tokens}) must be a multiple of the sequence length ({sequence_length}), which is at least 1:"
            " set tokens or sequence_length."
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device ('cuda') needs a GPU, and torch sees none; set it to 'cpu' for what is counted alone.")
    sizes = share_of(config, tensor_parallel_size, num_tokens, sequence_length)
    moved = {
        name: element_wise_bytes(
            config, tensor_parallel_size=tensor_parallel_size, num_tokens=num_tokens, is_fused=is_fused
        )
        for name, is_fused in (("plain", False), ("fused", True))
    }
    loss = {name: loss_buffers(config, tensor_parallel_size, num_tokens, is_fused=name == "fused") for name in moved}
    table: dict[str, dict[str, Any]] = {case.name: {"bytes": bytes_} for case, bytes_ in _signatures(sizes)}
    for name, resources in _resources(sizes).items():
        table[name] |= resources
    notes = [*_bytes_in_words(moved), *_loss_in_words(loss)]
    timed: KernelTimes | None = None
    blocks: BlockTimes | None = None
    if device == "cuda":
        gpu = torch.device(device)
        timed = time_cases(replace(sizes, loss_rows=num_tokens), repetitions, gpu)
        blocks = time_block(config, tensor_parallel_size, num_tokens, sequence_length, repetitions, gpu)
        notes += [*timed.in_words(), *blocks.in_words()]
    return Report(
        title=f"kernels of a block of {config.hidden_size} features, tensor {tensor_parallel_size},"
        f" {num_tokens:,} tokens, bf16; one process",
        headings=["", "MiB", *(f"sm_{target}: registers" for target in TARGETS), *KernelTimes.headings(timed)],
        rows=[
            [name, f"{row['bytes'] / MIB:,.1f}", *_registers(row), *KernelTimes.cells(timed, name)]
            for name, row in table.items()
        ],
        figures={
            "kernels": table,
            "element_wise_bytes": moved,
            "loss_bytes": loss,
            "times": None if timed is None else asdict(timed),
            "block_milliseconds": None if blocks is None else asdict(blocks),
        },
        notes=notes,
        bars=(Bars("bytes that element-wise passes of a block move", "GiB", _bars(moved)),),
    )


def share_of(config: LlamaConfig, tensor_parallel_size: int, num_tokens: int, sequence_length: int) -> Sizes:
    """Return the sizes of tensors on the first process."""
    names = ("q_proj", "k_proj", "v_proj")
    bottlenecks = [config.bottleneck_size_of(0, name) or 0 for name in names]
    return Sizes(
        rows=num_tokens,
        tokens=sequence_length,
        hidden=config.hidden_size // tensor_parallel_size,
        latents=sum(bottlenecks),
        gated=config.intermediate_size // tensor_parallel_size,
        heads=config.num_attention_heads // tensor_parallel_size,
        head_size=config.head_size,
        vocabulary=-(-config.vocab_size // tensor_parallel_size),
        processes=tensor_parallel_size,
    )


class _LossMemory(UncomputedProducts):
    """Follows the loss's memory; where kernels are fused, they are looked at instead of run."""

    def __init__(self, *, is_fused: bool) -> None:
        super().__init__()
        self.is_fused = is_fused

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in FAKES or not self.is_fused:
            return super().__torch_dispatch__(func, types, args, kwargs)
        with self:
            return FAKES[func](*args, **(kwargs or {}))


def loss_buffers(config: LlamaConfig, tensor_parallel_size: int, num_tokens: int, *, is_fused: bool) -> dict[str, int]:
    """Return the most bytes that the loss holds on the first process, beside its inputs, by what they are for."""
    vocabulary = -(-config.vocab_size // tensor_parallel_size)
    hidden = torch.zeros(num_tokens, config.hidden_size, dtype=torch.bfloat16)
    weight = torch.zeros(vocabulary, config.hidden_size, dtype=torch.bfloat16)
    targets = torch.zeros(num_tokens, dtype=torch.int64)

    def peak(*needed: bool) -> int:
        memory = _LossMemory(is_fused=is_fused)
        with memory:
            torch.ops.lightning_boost.vocabulary_loss(
                hidden, weight, targets, torch.ones(()), config.vocab_size, 0.0, needed, group
            )
        return memory.peak

    with processes_that_do_nothing(tensor_parallel_size), fused_everywhere() if is_fused else plain_kernels():
        world = torch.distributed.group.WORLD
        assert world is not None
        group = register_group(world)
        both = peak(True, True)
        of_hidden, of_weight = both - peak(False, True), both - peak(True, False)
        return {"logits": both - of_hidden - of_weight, "hidden gradient": of_hidden, "weight gradient": of_weight}


def _signatures(sizes: Sizes) -> Iterator[tuple[Case, int]]:
    """Yield every case with the bytes that it reads and writes."""
    for case in cases(sizes, torch.bfloat16, torch.device("meta")):
        operator = getattr(torch.ops.lightning_boost, case.function).default
        yield case, moved_bytes(operator, case.args, {}, FAKES[operator](*case.args))


def _resources(sizes: Sizes) -> dict[str, dict[str, Any]]:
    """Return what every case takes of GPUs that are not there; nothing where Triton is missing or interprets."""
    if find_spec("triton") is None or is_interpreting():
        return {}
    from lightning_boost.kernels.ahead_of_time import compile_cases

    found: dict[str, dict[str, Any]] = {}
    for target in TARGETS:
        for each in compile_cases(sizes, torch.bfloat16, target):
            resources = {"registers": each.registers, "shared_bytes": each.shared, "spilled_bytes": each.spilled}
            found.setdefault(each.case, {})[f"sm_{target}"] = resources
    return found


def _registers(row: dict[str, Any]) -> Iterator[str]:
    for target in TARGETS:
        found = row.get(f"sm_{target}")
        spilled = found["spilled_bytes"] if found else 0
        yield "" if found is None else f"{found['registers']}" + (f", {spilled} B spilled" if spilled else "")


def _bytes_in_words(moved: dict[str, dict[str, int]]) -> Iterator[str]:
    for pass_ in ("forward", "backward"):
        plain, fused = moved["plain"][pass_], moved["fused"][pass_]
        yield (
            f"element-wise passes of a block, {pass_}: {plain / MIB:,.0f} MiB by torch's operations,"
            f" {fused / MIB:,.0f} MiB fused ({plain / fused:.2f} times fewer)"
        )


def _loss_in_words(loss: dict[str, dict[str, int]]) -> Iterator[str]:
    for name, buffers in loss.items():
        written = ", ".join(f"{what} {bytes_ / 2**30:.3f}" for what, bytes_ in buffers.items())
        yield f"most that the loss holds, {name}, GiB: {written}"


def _bars(moved: dict[str, dict[str, int]]) -> dict[str, dict[str, float]]:
    return {pass_: {name: passes[pass_] / 2**30 for name, passes in moved.items()} for pass_ in ("forward", "backward")}
