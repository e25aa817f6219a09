"""Run a function in several processes that are forked from this one, already warm: some 0.2 s for two."""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("fork")
_COLLECTIVE_TIMEOUT = timedelta(seconds=60)


def run_processes(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Run ``function(*args)`` in ``world_size`` processes that share a gloo group; return their results in order.

    Results must pickle: give numbers, strings and CPU tensors. The first error ends all processes and is raised here
    with its process number.
    """
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = Path(folder) / "rendezvous"
        connections: dict[Connection, int] = {}
        processes = []
        for index in range(world_size):
            receiving, sending = _context.Pipe(duplex=False)
            arguments = (function, args, index, world_size, rendezvous, sending)
            processes.append(_context.Process(target=_run_one, args=arguments, daemon=True))
            processes[-1].start()
            sending.close()
            connections[receiving] = index
        try:
            return _collect(connections, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill() if process.exitcode is None and not _ends_soon(process) else None
                process.join()


def _ends_soon(process: Any) -> bool:
    process.join(timeout=2.0)
    return process.exitcode is not None


def _collect(connections: dict[Connection, int], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = dict(connections)
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"processes {sorted(waiting.values())} gave no result in time")
        for connection in ready:
            index = waiting.pop(connection)  # type: ignore[arg-type]
            try:
                error, result = connection.recv()  # type: ignore[union-attr]
            except EOFError:
                error, result = "it died without a word (a gloo size mismatch aborts the process)", None
            if error is not None:
                raise RuntimeError(f"process {index} of {len(connections)} failed: {error}")
            results[index] = result
    return [results[index] for index in range(len(connections))]


def _run_one(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    index: int,
    world_size: int,
    rendezvous: Path,
    sending: Connection,
) -> None:
    torch.set_num_threads(1)
    # what torchrun would set: Lightning then starts no processes of its own
    os.environ.update(
        RANK=str(index),
        LOCAL_RANK=str(index),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="tests",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
    )
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=index,
            world_size=world_size,
            timeout=_COLLECTIVE_TIMEOUT,
        )
        result = function(*args)
        dist.barrier()
        sending.send((None, result))
        dist.destroy_process_group()
    except BaseException:
        sending.send((traceback.format_exc(), None))
        os._exit(1)
