"""Which process failed first: the one thing to know when several stop at once."""

import logging

import torch.distributed as dist

from lightning_boost.strategy.lightning_internals import default_store

_log = logging.getLogger(__name__)


def report_failure(exception: BaseException, process: int, run: int) -> None:
    """Say which process failed first, and why, whether that is this one or another.

    A process whose peer has died fails in turn, with an error that tells of a lost connection and nothing else.

    Args:
        exception: What ended this process.
        process: Its global number.
        run: Number of the run among those of this process group, so that an earlier failure is not told again.
    """
    if not dist.is_initialized():
        return
    mine = f"process {process}: {type(exception).__name__}: {exception}"
    try:
        first = default_store().compare_set(f"lightning_boost/first_failure_of_run_{run}", "", mine).decode()
    except (RuntimeError, ValueError):
        # the process that holds the store is gone; what it had to say stands above
        _log.error("Process %d stops because another one has: look for the first error above.", process)
        return
    _log.error("The first failure was that of %s", first)
