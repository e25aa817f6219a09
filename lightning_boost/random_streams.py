"""Random numbers of a model that several processes compute: dropout, wherever in ``forward`` it stands.

Where a tensor is split, each process draws for its own part; where it is whole, all draw the same; replicas, which see
different data, and stages, which hold different layers, draw differently. torch draws from one stream on each process,
so it is that stream's state that changes on the way through a model: hooks stand where tensors become split and whole
again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_boost.layout import Decoder
from lightning_boost.mesh import DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS, shard_bounds

State = list[Tensor]


@dataclass(frozen=True)
class _Region:
    """A part of forward with a stream of its own; the states of the stream around it, and how its own began."""

    around: State
    around_behind: State
    """One draw further, so that the next region of the kind begins otherwise."""

    own: State


class RandomStreams:
    """Switches torch's default random stream along a forward.

    What is drawn follows from the stream as the model is called, and from nothing else: the same seed gives the same
    masks, also where a part of the model is run again from the random state it started from. A model that draws nothing
    leaves the stream as it was.

    Communication: none on the tensor and data axes, unless a process holds an empty share of some parameter: then, and
    on a pipeline, one all-reduce of one number for each forward.

    Args:
        mesh: All processes.
        device: Whose stream is switched, beside the CPU's.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self._device = device
        self._mesh = mesh
        self._place_of_model = _place(mesh, PIPELINE_AXIS, DATA_AXIS)
        self._place_of_share = _place(mesh, TENSOR_AXIS)
        self._voting_axes: list[str] = []
        self._model: _Region | None = None
        self._split: _Region | None = None
        self._is_used = False
        self._last: State = []
        """The model's stream as a hook has left it; it has been drawn from if it is another one."""

    def attach(self, decoder: Decoder, begins: Sequence[str], ends: Sequence[str]) -> None:
        """Register the hooks.

        Args:
            decoder: The model; before and after its forward the stream is the user's.
            begins: Names of modules whose output is split over the tensor axis.
            ends: Names of modules whose output is whole again.
        """
        # processes that hold other layers, or nothing of a layer, may not draw where the others do
        has_empty_share = any(map(_has_empty_share, decoder.root.parameters()))
        self._voting_axes = [PIPELINE_AXIS] if self._mesh[PIPELINE_AXIS].size() > 1 else []
        self._voting_axes += [TENSOR_AXIS] if has_empty_share else []
        decoder.root.register_forward_pre_hook(self._enter_model)
        decoder.root.register_forward_hook(self._leave_model, always_call=True)
        for name in begins:
            decoder.part(name).register_forward_hook(self._enter_split)
        for name in ends:
            # torch's activation checkpointing ends a second run of a layer by an exception
            decoder.part(name).register_forward_hook(self._leave_split, always_call=True)

    def _enter_model(self, *_: Any) -> None:
        self._split, self._is_used = None, False
        self._model = self._enter(*self._place_of_model)
        self._last = self._model.own

    def _leave_model(self, _: nn.Module, arguments: Any, output: Any) -> None:
        self._leave_split()
        region, self._model = self._model, None
        if region is None:
            return
        is_used = self._is_used or _differ(self._state(), self._last)
        # without an output the forward has failed here, and other processes may wait for ever
        for axis in self._voting_axes if output is not None else ():
            votes = torch.tensor(int(is_used), device=self._device)
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._mesh[axis].get_group())
            is_used = bool(votes)
        self._restore(region.around_behind if is_used else region.around)

    def _enter_split(self, *_: Any) -> None:
        if self._split is None:
            self._split = self._enter(*self._place_of_share)
            if self._model is not None and not _is_second_run():
                self._is_used |= _differ(self._split.around, self._last)

    def _leave_split(self, *_: Any) -> None:
        region, self._split = self._split, None
        if region is None:
            return
        if not _is_second_run():
            self._is_used |= _differ(self._state(), region.own)
            self._last = region.around_behind
        self._restore(region.around_behind)

    def _enter(self, place: int, num_places: int) -> _Region:
        around = self._state()
        # a seed for every place, of which this process takes its own
        seed = int(torch.randint(2**62, (num_places,))[place])
        around_behind = self._state()
        self._seed(seed)
        return _Region(around, around_behind, own=self._state())

    def _state(self) -> State:
        states = [torch.get_rng_state()]
        if self._device.type != "cpu":
            states.append(torch.get_device_module(self._device).get_rng_state())
        return states

    def _seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).manual_seed(seed)

    def _restore(self, states: State) -> None:
        torch.set_rng_state(states[0])
        if self._device.type != "cpu":
            torch.get_device_module(self._device).set_rng_state(states[1])


def _is_second_run() -> bool:
    """Tell whether backward runs a part of the model again: what that draws has been counted, and goes back after it.

    On a pipeline this happens within the model's forward.
    """
    return torch._C._current_graph_task_id() != -1


def _place(mesh: DeviceMesh, *axes: str) -> tuple[int, int]:
    """Return this process's place among all coordinates on some axes, and how many there are."""
    place = 0
    for axis in axes:
        place = place * mesh[axis].size() + mesh[axis].get_local_rank()
    return place, math.prod(mesh[axis].size() for axis in axes)


def _differ(now: State, then: State) -> bool:
    return any(not torch.equal(mine, other) for mine, other in zip(now, then, strict=True))


def _has_empty_share(parameter: Tensor) -> bool:
    """Tell whether a process holds nothing of a parameter; all know, since shares go by the sizes."""
    if not isinstance(parameter, DTensor):
        return False
    placement, size = parameter.placements[-1], parameter.device_mesh.shape[-1]
    if not isinstance(placement, Shard):
        return False
    length = parameter.shape[placement.dim]
    first, last = shard_bounds(length, size, size - 1)
    return first == last
