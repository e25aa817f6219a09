"""Interleaved timing: in each repetition every candidate runs once, so that a busy moment strikes all of them."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist


class Quartiles(NamedTuple):
    """Of a sample of ratios or times."""

    p25: float
    median: float
    p75: float

    @classmethod
    def of(cls, sample: Sequence[float]) -> "Quartiles":
        """Return the quartiles of a sample of at least two."""
        return cls(*statistics.quantiles(sample, n=4, method="inclusive"))


class Timings(NamedTuple):
    """Seconds of every repetition."""

    wall: list[float]
    """Of the slowest process."""

    cpu: list[float]
    """Mean over processes; steadier than wall time on a busy machine."""


def time_interleaved(
    candidates: Mapping[str, Callable[[], object]], *, repetitions: int, warmup: int, device: torch.device
) -> dict[str, Timings]:
    """Run every candidate in turn, again and again; all processes call this together.

    Args:
        candidates: What to run, by name.
        repetitions: Measured.
        warmup: Not measured, before.
        device: Of this process; a GPU is waited for.
    """
    timings = {name: Timings([], []) for name in candidates}
    for repetition in range(warmup + repetitions):
        for name, run in candidates.items():
            dist.barrier()
            wait_for(device)
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            wait_for(device)
            spent = [time.perf_counter() - wall, time.process_time() - cpu]
            elapsed = torch.tensor(spent, dtype=torch.float64, device=device)
            slowest, total = elapsed.clone(), elapsed.clone()
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            dist.all_reduce(total)
            if repetition >= warmup:
                timings[name].wall.append(slowest[0].item())
                timings[name].cpu.append(total[1].item() / dist.get_world_size())
    return timings


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done what it was given; a CPU's work is done when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_repetitions(repetitions: int) -> None:
    """Check that there is a sample to take quartiles of.

    Raises:
        ValueError: If there are fewer than two repetitions.
    """
    if repetitions < 2:
        raise ValueError(f"repetitions ({repetitions}) must be at least 2: quartiles are taken.")


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> Quartiles:
    """Return the quartiles of the ratios of two candidates' times, repetition by repetition."""
    return Quartiles.of([above / below for above, below in zip(numerator, denominator, strict=True)])
