"""Random numbers of processes that share layers, which must draw the same ones, and of runs that go on."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_boost.strategy.lightning_internals import collect_random_states, restore_random_states

RandomStates = dict[str, Any]


def random_states(device: torch.device) -> RandomStates:
    """Return where this process's random numbers stand: torch's on CPU and device, NumPy's and Python's.

    Args:
        device: Where this process computes; its number differs from process to process and is not kept.
    """
    states = collect_random_states(include_cuda=False)
    name, keys, *rest = states["numpy"]
    # as a tensor, since a checkpoint is read without any class of NumPy's
    states["numpy"] = (name, torch.tensor(keys.tolist()), *rest)
    if device.type == "cuda":
        states["device"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: RandomStates, device: torch.device) -> None:
    """Go on from ``random_states``, of this process or of another."""
    name, keys, *rest = states["numpy"]
    restore_random_states({**states, "numpy": (name, keys.tolist(), *rest)})
    if device.type == "cuda" and "device" in states:
        torch.cuda.set_rng_state(states["device"], device)


class TrainingRandomNumbers:
    """The random numbers of training: they go on over a checkpoint, and evaluations do not touch them.

    Args:
        device: Where this process computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.next: RandomStates | None = None
        """Those that training will begin with, if a run goes on."""

        self._aside: RandomStates | None = None

    def begin(self) -> None:
        """Begin training with the numbers of the run that was saved, if there is one."""
        if self.next is not None:
            set_random_states(self.next, self.device)
            self.next = None

    def put_aside(self) -> None:
        """Remember them while something else draws."""
        self._aside = random_states(self.device)

    def take_back(self) -> None:
        """Go on with those that were put aside."""
        if self._aside is not None:
            set_random_states(self._aside, self.device)
            self._aside = None


def agree_on_random_numbers(group: ProcessGroup, device: torch.device) -> None:
    """Give a group's processes the random states of its first one, where no ``seed_everything`` has seen to it.

    Args:
        group: Processes that hold parts of one replica.
        device: Where this process computes.
    """
    states = [random_states(device)]
    dist.broadcast_object_list(states, group=group, group_src=0)
    set_random_states(states[0], device)
