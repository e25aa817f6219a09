"""How something is timed: sizes, processes, repetitions, device."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_boost.benchmark.blocks import BlockSizes, check_sizes
from lightning_boost.benchmark.processes import Device, run_pinned
from lightning_boost.benchmark.timing import check_repetitions


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a benchmark is run with.

    Raises:
        ValueError: If there are fewer than two repetitions, or sizes that the processes cannot share.
    """

    sizes: BlockSizes = field(default_factory=BlockSizes)
    """Of a block and its input."""

    num_processes: int = 2
    """Tensor size; a core or a GPU for each."""

    repetitions: int = 15
    """Of everything that is compared."""

    device: Device = "cpu"
    """Where it computes."""

    def __post_init__(self) -> None:
        check_repetitions(self.repetitions)
        check_sizes(self.sizes, self.num_processes)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function(device, setup, *args)`` in all processes, each with its own device.

        Args:
            function: At the top of a module; its result must pickle.
            args: Handed to it.

        Returns:
            What process 0 gives; ``None`` on other processes of torchrun.

        Raises:
            ValueError: If there are fewer cores or GPUs than processes, or torchrun has started another number.
        """
        return run_pinned(function, self.num_processes, self, *args, device=self.device)

    @property
    def described(self) -> str:
        """The block's sizes in words."""
        return self.sizes.described(self.num_processes)

    @property
    def figures(self) -> dict[str, Any]:
        """The sizes for JSON."""
        return {**vars(self.sizes), "processes": self.num_processes}
