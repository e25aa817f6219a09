"""What only works if every process does it, checked before it begins: who is not there is named."""

import itertools
import time
from datetime import timedelta

import torch.distributed as dist

from lightning_boost.strategy.lightning_internals import default_store

PATIENCE = timedelta(seconds=30)
"""For which a process waits for the others to save too; they come within a step of one another."""

_num_saves = itertools.count(1)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05


def await_all_to_save(timeout: timedelta) -> None:
    """Wait until every process is about to save.

    The store tells, and no collective: the others would take it for the next one of theirs.

    Args:
        timeout: That of collectives; the wait is over before the others, in one of theirs, give up.

    Raises:
        RuntimeError: If some do not come.
    """
    number, world_size = next(_num_saves), dist.get_world_size()
    if world_size == 1:
        return
    store, process = default_store(), dist.get_rank()
    prefix = f"lightning_boost/save_{number}"
    store.set(f"{prefix}/process_{process}", "")
    if store.add(f"{prefix}/arrived", 1) == world_size:
        store.set(f"{prefix}/all", "")
    limit = min(PATIENCE, timeout / 2)
    deadline, pause = time.monotonic() + limit.total_seconds(), _FIRST_PAUSE
    while not store.check([f"{prefix}/all"]):
        if time.monotonic() > deadline:
            missing = [each for each in range(world_size) if not store.check([f"{prefix}/process_{each}"])]
            raise RuntimeError(
                f"process {process} saves a checkpoint, and process {', '.join(map(str, missing))} did not within"
                f" {limit.total_seconds():g} s. Each process saves its share: every one must call save_checkpoint."
                " Take the call out of `if trainer.is_global_zero:` or whatever keeps it from some."
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
