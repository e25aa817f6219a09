"""The one door to underscored names of Lightning 2.6's modules."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.imports import _IS_INTERACTIVE as IS_INTERACTIVE
from lightning.fabric.utilities.seed import _collect_rng_states as collect_random_states
from lightning.fabric.utilities.seed import _set_rng_states as restore_random_states
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import ClusterEnvironment, SLURMEnvironment
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.distributed_c10d import _get_default_store
from typing_extensions import override

__all__ = [
    "IS_INTERACTIVE",
    "STARTED_BY",
    "CheckedLauncher",
    "SignalFlags",
    "at_step_borders",
    "collect_random_states",
    "default_store",
    "detects_anomalies",
    "is_at_last_batch",
    "link_by",
    "restore_random_states",
    "without_recorded_names",
]

_log = logging.getLogger(__name__)

STARTED_BY = "LIGHTNING_BOOST_STARTED_BY"
"""Environment variable that tells a process which one started it."""

_CHILD_POLL_SECONDS = 0.5
_CHILD_GRACE_SECONDS = 12.0
"""For this process to say why it ends, after one that it started has; longer than processes wait for one another."""


class CheckedLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, which first asks whether there is anything to launch for.

    Each process that it starts runs the script again, so a wrong option would be reported by all of them.

    Args:
        check: Raises if the run of a Trainer cannot work.
        cluster_environment: Tells addresses and positions.
        num_processes: Processes of this node.
        num_nodes: Nodes.
    """

    def __init__(
        self,
        check: Callable[[Trainer], None],
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._check = check

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Check, start the other processes of this node, and run ``function``."""
        self._check(trainer)
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        # a Trainer's second call, validate behind fit for instance, finds the processes there
        if not self.procs:
            os.environ[STARTED_BY] = str(os.getpid())
            self._call_children_scripts()
            del os.environ[STARTED_BY]
            # Lightning's own observer kills this process as soon as a child has ended, with no time to say why
            threading.Thread(target=self._watch_children, daemon=True, name="lightning_boost_child_watch").start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def _watch_children(self) -> None:
        failed: tuple[int, int] | None = None
        while failed is None:
            time.sleep(_CHILD_POLL_SECONDS)
            codes = [process.poll() for process in self.procs]
            if all(code == 0 for code in codes):
                return
            failed = next(((number, code) for number, code in enumerate(codes, 1) if code), None)
        # this thread ends with the process, if that ends by itself
        time.sleep(_CHILD_GRACE_SECONDS)
        number, code = failed
        _log.error("The others are ended after %s", self._end_of(number, code))
        self.kill(signal.SIGKILL)
        os._exit(max(code, 1))

    def _end_of(self, number: int, code: int) -> str:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"process {self.cluster_environment.node_rank() * self.num_processes + number}, which {how}."

    def killed_child(self) -> str | None:
        """Return which of the processes that this one started was killed, if one was, and by what."""
        time.sleep(_CHILD_POLL_SECONDS)
        for number, process in enumerate(self.procs, 1):
            code = process.poll()
            if code is not None and code < 0:
                return self._end_of(number, code)
        return None

    def end_children(self, grace_seconds: float) -> None:
        """Give the processes that this one started time to end by themselves, then end them."""
        deadline = time.monotonic() + grace_seconds
        for process in self.procs:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                # a process that waits in a collective does not heed SIGTERM
                process.send_signal(signal.SIGKILL)


class SignalFlags(_SignalConnector):
    """Notes which signals came while a Trainer fits, and does nothing else when they come.

    Lightning's own handlers do their work, collectives among it, wherever in a step the process happens to be.
    A second signal ends the process at once.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._received: set[int] = set()
        self._requeue_signals: set[int] = set()
        self.is_requeued = False

    @classmethod
    def of(cls, trainer: Trainer) -> "SignalFlags":
        """Return a Trainer's, in the place of Lightning's."""
        flags = trainer._signal_connector
        if not isinstance(flags, SignalFlags):
            trainer._signal_connector = flags = cls(trainer)
        return flags

    @override
    def register_signal_handlers(self) -> None:
        """Note signals from now on; while nothing is trained, there is nothing to save and they act as ever."""
        self.received_sigterm = self.is_requeued = False
        self._received.clear()
        self._original_handlers = self._get_current_signal_handlers()
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        environment = self.trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            self._requeue_signals = {environment.requeue_signal or signal.SIGUSR1}
        for signum in {signal.SIGTERM, signal.SIGUSR1, *self._requeue_signals}:
            # as with Lightning, a handler of the user's is called beside that of SIGTERM and instead of the others
            if signum == signal.SIGTERM or not self._has_already_handler(signum):
                self._register_signal(signum, self._note)

    def _note(self, signum: int, frame: Any) -> None:
        if self._received - self._requeue_signals:
            if self.trainer.strategy.launcher is not None:
                self.trainer.strategy.launcher.kill(signal.SIGKILL)
            os._exit(128 + signum)
        self._received.add(signum)
        other = self._original_handlers.get(signum)
        if callable(other):
            other(signum, frame)

    def to_stop(self) -> int:
        """Return the signal that asks to save and stop, or 0."""
        return max(self._received - self._requeue_signals, default=0)

    def to_requeue(self) -> int:
        """Return the signal that asks to save and put the job in Slurm's queue again, or 0."""
        return max(self._received & self._requeue_signals, default=0)

    def requeue(self) -> None:
        """Save and requeue as Lightning does, but at the border of a step; training goes on until Slurm ends it."""
        self.is_requeued = True
        for signum in self._requeue_signals:
            self._slurm_sigusr_handler_fn(signum, sys._getframe())


def at_step_borders(trainer: Trainer, function: Callable[[], None]) -> None:
    """Have ``function`` called before the first batch of each optimizer step, instead of Lightning's vote on SIGTERM.

    That is before each batch, and heeds the signals of process 0 alone. Nothing has been fetched or counted there for
    the batch to come, and no gradient waits for the next ones.
    """
    loop = trainer.fit_loop.epoch_loop

    def advance(data_fetcher: Any) -> None:
        if not loop._should_accumulate():
            function()
        type(loop).advance(loop, data_fetcher)

    loop.__dict__["advance"] = advance
    loop.__dict__["_broadcast_sigterm_tensor"] = _nothing


def _nothing() -> None:
    return


def detects_anomalies(trainer: Trainer) -> bool:
    """Return whether a Trainer was given ``detect_anomaly=True``."""
    return trainer._detect_anomaly


def link_by(callback: ModelCheckpoint, link: Callable[[Path, Path], None]) -> None:
    """Have ``link(path, target)`` called where a callback with ``save_last="link"`` would make a link at once."""
    callback.__dict__["_link_checkpoint"] = lambda trainer, target, path: link(Path(path), Path(target))


def is_at_last_batch(trainer: Trainer) -> bool:
    """Return whether what validates, tests or predicts is at its last batch."""
    loop: Any = trainer._active_loop
    return bool(loop.batch_progress.is_last_batch)


@contextmanager
def without_recorded_names(trainer: Trainer) -> Iterator[None]:
    """Take the hooks with which ``PyTorchProfiler`` names modules off, and put them on those that are there after."""
    register = getattr(getattr(trainer, "profiler", None), "_register", None)
    if register is None:
        yield
        return
    register.__exit__(None, None, None)
    yield
    register.__enter__()


def default_store() -> dist.Store:
    """Return the key-value store that all processes of the default group share."""
    return _get_default_store()
