"""A few processes on this machine that run one function together."""

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_TIMEOUT = timedelta(minutes=5)


def run_pinned(function: Callable[..., Any], num_processes: int, *args: Any) -> Any:
    """Run ``function(*args)`` in new processes that share a gloo group; return what process 0 gives.

    Each process has an equal part of this machine's cores to itself: left to the scheduler, two of them are often put
    on one core, and what is then measured is the scheduler.

    Args:
        function: At the top of a module; its result must pickle.
        num_processes: At least 1 and no more than there are cores.
        args: Handed to the function.

    Raises:
        ValueError: If there are fewer cores than processes.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if cores and len(cores) < num_processes:
        raise ValueError(f"{num_processes} processes need a core each, and this machine has {len(cores)}.")
    return _run(function, num_processes, cores, args)


def run_together(function: Callable[..., Any], num_processes: int, *args: Any) -> Any:
    """Do the same on whatever cores there are; for what is not timed."""
    return _run(function, num_processes, [], args)


def _run(function: Callable[..., Any], num_processes: int, cores: list[int], args: tuple[Any, ...]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        rendezvous, result = Path(folder) / "rendezvous", Path(folder) / "result.pt"
        mp.spawn(_run_one, (num_processes, cores, rendezvous, result, function, args), nprocs=num_processes)
        return torch.load(result, weights_only=True)


def _run_one(
    index: int,
    num_processes: int,
    cores: list[int],
    rendezvous: Path,
    result: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    own = cores[index::num_processes]
    if own:
        # before torch starts a thread, which would keep the cores it was born with
        os.sched_setaffinity(0, own)
    torch.set_num_threads(max(1, len(own)))
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=index, world_size=num_processes, timeout=_TIMEOUT
    )
    found = function(*args)
    if index == 0:
        torch.save(found, result)
    dist.barrier()
    # at once: a group that is taken down while a peer still reads from it may abort the process
    os._exit(0)
