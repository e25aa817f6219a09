"""Random numbers of processes that share layers: they must draw the same ones."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_boost.strategy.lightning_internals import collect_random_states, set_random_states


def agree_on_random_numbers(group: ProcessGroup, device: torch.device) -> None:
    """Give a group's processes the random states of its first one, where no ``seed_everything`` has seen to it.

    Those of torch, on the CPU and on the device, of NumPy and of Python's ``random``.

    Args:
        group: Processes of the tensor axis.
        device: Where this process computes; its number differs from process to process.
    """
    is_cuda = device.type == "cuda"
    states: list[Any] = [
        collect_random_states(include_cuda=False),
        torch.cuda.get_rng_state(device) if is_cuda else None,
    ]
    dist.broadcast_object_list(states, group=group, group_src=0)
    everywhere, on_device = states
    set_random_states(everywhere)
    if is_cuda:
        torch.cuda.set_rng_state(on_device, device)
