"""The one door to underscored names of Lightning 2.6's modules."""

import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.imports import _IS_INTERACTIVE as IS_INTERACTIVE
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch.distributed.distributed_c10d import _get_default_store
from typing_extensions import override

__all__ = ["IS_INTERACTIVE", "CheckedLauncher", "default_store"]


class CheckedLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, which first asks whether there is anything to launch for.

    Each process that it starts runs the script again, so a wrong option would be reported by all of them.

    Args:
        check: Raises if the run cannot work.
        cluster_environment: Tells addresses and positions.
        num_processes: Processes of this node.
        num_nodes: Nodes.
    """

    def __init__(
        self,
        check: Callable[[], None],
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._check = check

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Check, start the other processes of this node, and run ``function``."""
        self._check()
        return super().launch(function, *args, **kwargs)

    def end_children(self, grace_seconds: float) -> None:
        """Give the processes that this one started time to end by themselves, then end them."""
        deadline = time.monotonic() + grace_seconds
        for process in self.procs:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                # a process that waits in a collective does not heed SIGTERM
                process.send_signal(signal.SIGKILL)


def default_store() -> dist.Store:
    """Return the key-value store that all processes of the default group share."""
    return _get_default_store()
