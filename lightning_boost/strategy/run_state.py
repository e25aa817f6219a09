"""What replicas have of their own beside the model: random numbers, and positions of loaders that keep one."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module, Parameter

from lightning_boost.mesh import DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS
from lightning_boost.strategy.random_numbers import RandomStates, random_states

_KEY = "boost_replicas"
_TIES = "boost_tied_weights"


def add_replicas(checkpoint: dict[str, Any], mesh: DeviceMesh, device: torch.device) -> None:
    """Put every replica's state into the trainer's, of which process 0 writes its own; all processes call this."""
    is_first = mesh[PIPELINE_AXIS].get_local_rank() == mesh[TENSOR_AXIS].get_local_rank() == 0
    mine = {"random_states": random_states(device), "loaders": _loader_states(checkpoint)} if is_first else None
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    # in the order of the data axis, since processes of one pipeline place and tensor place are
    checkpoint[_KEY] = [each for each in everyones if each is not None]


def take_replica(checkpoint: dict[str, Any], mesh: DeviceMesh) -> RandomStates | None:
    """Put this replica's state in the place of process 0's; return its random states, if there are any.

    Where there are other replicas than before, all go on with the random numbers of the first.
    """
    replicas = checkpoint.pop(_KEY, None)
    if not replicas:
        return None
    axis = mesh[DATA_AXIS]
    mine = replicas[axis.get_local_rank() if axis.size() == len(replicas) else 0]
    if mine["loaders"]:
        checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = mine["loaders"]
    states: RandomStates = mine["random_states"]
    return states


def add_ties(checkpoint: dict[str, Any], module: Module) -> None:
    """Note which parameters are another one under a second name, since each name is saved with values of its own."""
    first: dict[Parameter, str] = {}
    ties = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name:
            ties[name] = first[parameter]
    checkpoint[_TIES] = ties


def saved_ties(trainer_state: dict[str, Any]) -> dict[str, str]:
    """Return the second names of the parameters that have any, and the first one for each; none where not noted."""
    return dict(trainer_state.get(_TIES, {}))


def saved_replicas(trainer_state: dict[str, Any]) -> list[list[Any]]:
    """Return the states of the training loaders of each replica that saved; none where that was not noted."""
    return [list(replica["loaders"]) for replica in trainer_state.get(_KEY, [])]


def _loader_states(checkpoint: dict[str, Any]) -> list[Any]:
    states: list[Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader", [])
    return states
