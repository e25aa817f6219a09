"""Which process failed first: the one thing to know when several stop at once."""

import logging

import torch.distributed as dist

from lightning_boost.strategy.lightning_internals import default_store

_FIRST_FAILURE = "lightning_boost/first_failure"
_log = logging.getLogger(__name__)


def report_failure(exception: BaseException, process: int) -> None:
    """Note this process's failure for the others; if another one failed before it, say which and why.

    A process whose peer has died fails in turn, with an error that tells of a lost connection and nothing else.

    Args:
        exception: What ended this process.
        process: Its global number.
    """
    if not dist.is_initialized():
        return
    mine = f"process {process}: {type(exception).__name__}: {exception}"
    try:
        first = default_store().compare_set(_FIRST_FAILURE, "", mine).decode()
    except (RuntimeError, ValueError):
        # the process that holds the store is gone; its own report stands above
        _log.error("Process %d stopped because another process did: look for the first error above.", process)
        return
    if first != mine:
        _log.error("Process %d stopped because another process failed first. %s", process, first)
