"""A few processes that run one function together: started here, or by torchrun."""

import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Device = Literal["cpu", "cuda"]

_TIMEOUT = timedelta(minutes=5)
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def is_under_torchrun() -> bool:
    """Tell whether torchrun has started this process, and others beside it."""
    return dist.is_torchelastic_launched()


def check_alone(what: str) -> None:
    """Check that a benchmark that needs no peers is not run by several processes.

    Raises:
        ValueError: If torchrun has started this one.
    """
    if is_under_torchrun():
        raise ValueError(
            f"benchmark {what} must not be run by torchrun, whose processes would each do all of it: start it with"
            " python -m lightning_boost."
        )


def run_pinned(function: Callable[..., Any], num_processes: int, *args: Any, device: Device = "cpu") -> Any:
    """Run ``function(device, *args)`` in processes that share a group; return what process 0 gives.

    On a CPU each process has an equal part of this machine's cores to itself: left to the scheduler, two of them are
    often put on one core, and what is then measured is the scheduler. Under torchrun the processes are those that it
    has started, and all but process 0 return ``None``.

    Args:
        function: At the top of a module; its result must pickle. Given the device of its process first.
        num_processes: At least 1 and no more than there are cores, or GPUs.
        args: Handed to the function.
        device: Where it computes.

    Raises:
        ValueError: If there are fewer cores or GPUs than processes, or torchrun has started another number of them.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") and device == "cpu" else []
    if cores and len(cores) < num_processes and not is_under_torchrun():
        raise ValueError(
            f"processes ({num_processes}) must be at most {len(cores)}, the cores of this machine: one for each."
        )
    return _run(function, num_processes, cores, device, args)


def run_together(function: Callable[..., Any], num_processes: int, *args: Any, device: Device = "cpu") -> Any:
    """Do the same on whatever cores there are; for what is not timed."""
    return _run(function, num_processes, [], device, args)


def leave(code: int) -> int:
    """End this process if torchrun has started it, with everything said and its group gone; else return the code.

    Where Python takes torch's threads down with it, that ends in an abort now and then.
    """
    if is_under_torchrun():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _check_gpus(device: Device, num_processes: int) -> None:
    if device == "cuda" and torch.cuda.device_count() < num_processes:
        raise ValueError(
            f"device ('cuda') needs a GPU for each of {num_processes} processes, and torch sees"
            f" {torch.cuda.device_count()}; set processes, or device to 'cpu'."
        )


def _run(
    function: Callable[..., Any], num_processes: int, cores: list[int], device: Device, args: tuple[Any, ...]
) -> Any:
    if is_under_torchrun():
        return _run_under_torchrun(function, num_processes, cores, device, args)
    _check_gpus(device, num_processes)
    with tempfile.TemporaryDirectory() as folder:
        rendezvous, result = Path(folder) / "rendezvous", Path(folder) / "result.pt"
        mp.spawn(_run_one, (num_processes, cores, device, rendezvous, result, function, args), nprocs=num_processes)
        return torch.load(result, weights_only=True)


def _run_one(
    index: int,
    num_processes: int,
    cores: list[int],
    device: Device,
    rendezvous: Path,
    result: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    place = _take_place(cores[index::num_processes], device, index)
    dist.init_process_group(
        _BACKENDS[device], init_method=f"file://{rendezvous}", rank=index, world_size=num_processes, timeout=_TIMEOUT
    )
    found = function(place, *args)
    if index == 0:
        torch.save(found, result)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as in ``leave``


def _run_under_torchrun(
    function: Callable[..., Any], num_processes: int, cores: list[int], device: Device, args: tuple[Any, ...]
) -> Any:
    local, num_local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if int(os.environ["WORLD_SIZE"]) != num_processes:
        raise ValueError(
            f"processes ({num_processes}) must be the number that torchrun has started ({os.environ['WORLD_SIZE']})."
        )
    _check_gpus(device, num_local)
    place = _take_place(cores[local::num_local], device, local)
    dist.init_process_group(_BACKENDS[device], timeout=_TIMEOUT)
    found = function(place, *args)
    is_first = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    return found if is_first else None


def _take_place(own_cores: list[int], device: Device, index: int) -> torch.device:
    """Give this process its cores, or its GPU."""
    if device == "cuda":
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    if own_cores:
        # before torch starts a thread, which would keep the cores it was born with
        os.sched_setaffinity(0, own_cores)
    torch.set_num_threads(max(1, len(own_cores)))
    return torch.device("cpu")
