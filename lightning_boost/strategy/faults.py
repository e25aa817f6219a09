"""A run whose processes end together: which one failed first, and an end for those that do not notice."""

import itertools
import logging
import os
import sys
import threading
import time
import traceback
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_boost.strategy.lightning_internals import STARTED_BY, default_store

_log = logging.getLogger(__name__)
_num_runs = itertools.count(1)

_POLL_SECONDS = 1.0
_GRACE_SECONDS = 6.0
"""For a process to end by itself after another one has failed: errors travel to those that wait for it."""

_OWN_GRACE_SECONDS = 25.0
"""For a process that has failed itself to clean up."""

_WAITERS_SECONDS = 2.0
"""Within which those that wait in the same collective give up after one another."""

_CAUSE_SECONDS = 1.0
"""For whoever knows why a connection was lost to say so first."""

_NO_CAUSE = (
    "\nIt lost its connection to another process, which has not said why, as one that is killed does not. What started"
    " the processes tells which: torchrun, Slurm, or the process 0 of a node."
)

_PATIENCE_WITH_OTHERS = 10.0
_PATIENCE_WITH_WAITING = 2.0

_FRAMES = 8
_STORE_IS_GONE = "process 0, or what started it, does not answer any more"


def watch_starter() -> None:
    """Until the process group exists, end this process if the one that started it is gone; it would wait for it."""
    # those that this process may start have another starter
    starter = os.environ.pop(STARTED_BY, None)
    if starter is not None:
        threading.Thread(target=_watch_starter, args=(int(starter),), daemon=True).start()


def _watch_starter(starter: int) -> None:
    while not dist.is_initialized():
        if os.getppid() != starter:
            _end(
                f"Process {os.environ.get('LOCAL_RANK')} of this node is ended: process 0, which started it, was killed"
                " or has ended before they shared a group."
            )
        time.sleep(_POLL_SECONDS)


class PeerWatch:
    """Watches, on a thread, whether another process of the run has failed, and then ends this one too.

    A process that waits for the one that failed gets an error of its own and ends. One that does something else, or
    hangs, hears nothing: it is given time, and then says where it is and stops.

    Args:
        process: Global number of this process.
        timeout: That of collectives, for the sentence that tells of it.
    """

    def __init__(self, process: int, timeout: timedelta) -> None:
        self._process, self._timeout = process, timeout
        self._prefix = f"lightning_boost/run_{next(_num_runs)}"
        self._stopped = threading.Event()
        self._grace_seconds = _GRACE_SECONDS
        self._thread = threading.Thread(target=self._watch, daemon=True, name="lightning_boost_peer_watch")

    def start(self) -> None:
        """Begin, once the process group exists."""
        self._thread.start()

    def stop(self) -> None:
        """End, when the run has."""
        self._stopped.set()

    def report(self, exception: BaseException, cause: str | None = None) -> float:
        """Say which process failed first, and why, whether that is this one or another.

        A process whose peer has died fails in turn, with an error that tells of a lost connection and nothing else.

        Args:
            exception: What ended this process.
            cause: What is known to have gone before it.

        Returns:
            Seconds for which other processes may still have something to say.
        """
        if not dist.is_initialized():
            return _PATIENCE_WITH_WAITING
        self._grace_seconds = _OWN_GRACE_SECONDS
        mine = f"process {self._process}: {type(exception).__name__}: {exception}"
        is_timeout = _says(exception, "timed out", "application timeout")
        try:
            if is_timeout:
                mine += self._who_did_not_come()
            elif cause is None and _says(exception, "connection"):
                time.sleep(_CAUSE_SECONDS)
                mine += _NO_CAUSE
            mine = cause or mine
            first = default_store().compare_set(f"{self._prefix}/first_failure", "", mine).decode()
        except (RuntimeError, ValueError):
            _log.error("Process %d stops because %s. Look for the first error above.", self._process, _STORE_IS_GONE)
            return _PATIENCE_WITH_OTHERS
        _log.error("The first failure was that of %s", first)
        return _PATIENCE_WITH_OTHERS if is_timeout or first != mine else _PATIENCE_WITH_WAITING

    def _who_did_not_come(self) -> str:
        """Return a sentence on the processes that do not wait in a collective as this one did."""
        store = default_store()
        store.set(f"{self._prefix}/waited_{self._process}", "")
        time.sleep(_WAITERS_SECONDS)
        missing = [
            str(each) for each in range(dist.get_world_size()) if not store.check([f"{self._prefix}/waited_{each}"])
        ]
        if not missing:
            return ""
        return (
            f"\nIt waited in the collective of the traceback above for process {', '.join(missing)}, which did not join"
            f" it within timeout ({self._timeout}) and is shown below where it is, if it still runs."
        )

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            failure = self._failure_elsewhere()
            if failure is not None:
                if not self._stopped.wait(self._grace_seconds):
                    _end(
                        f"Process {self._process} has not ended {self._grace_seconds:g} s after the first failure, that"
                        f" of {failure}\nIt is ended where it is:\n{_where_the_main_thread_is()}"
                    )
                return

    def _failure_elsewhere(self) -> str | None:
        try:
            store, key = default_store(), f"{self._prefix}/first_failure"
            return store.get(key).decode() if store.check([key]) else None
        except (RuntimeError, ValueError):
            return f"another process: {_STORE_IS_GONE}."


def _end(message: str) -> None:
    _log.error(message)
    sys.stderr.flush()
    os._exit(1)


def _says(exception: BaseException, *words: str) -> bool:
    return isinstance(exception, RuntimeError) and any(each in str(exception).lower() for each in words)


def _where_the_main_thread_is() -> str:
    frame: Any = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)[-_FRAMES:])
