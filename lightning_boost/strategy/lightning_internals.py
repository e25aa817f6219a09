"""The one door to underscored names of Lightning 2.6's modules."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.imports import _IS_INTERACTIVE as IS_INTERACTIVE
from lightning.fabric.utilities.seed import _collect_rng_states as collect_random_states
from lightning.fabric.utilities.seed import _set_rng_states as restore_random_states
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch.distributed.distributed_c10d import _get_default_store
from typing_extensions import override

__all__ = [
    "IS_INTERACTIVE",
    "CheckedLauncher",
    "collect_random_states",
    "default_store",
    "detects_anomalies",
    "restore_random_states",
    "without_recorded_names",
]


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
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def end_children(self, grace_seconds: float) -> None:
        """Give the processes that this one started time to end by themselves, then end them."""
        deadline = time.monotonic() + grace_seconds
        for process in self.procs:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                # a process that waits in a collective does not heed SIGTERM
                process.send_signal(signal.SIGKILL)


def detects_anomalies(trainer: Trainer) -> bool:
    """Return whether a Trainer was given ``detect_anomaly=True``."""
    return trainer._detect_anomaly


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
