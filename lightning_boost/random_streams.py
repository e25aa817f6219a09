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

from lightning_boost.layout import Decoder
from lightning_boost.mesh import DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS

State = list[Tensor]


@dataclass(frozen=True)
class _Region:
    """A part of forward with a stream of its own; the states of the stream around it, and how its own began."""

    around: State
    around_if_used: State
    """One draw further, so that the next region of the kind begins otherwise."""

    own: State


class RandomStreams:
    """Switches torch's default random stream along a forward.

    What is drawn follows from the stream as the model is called, and from nothing else: the same seed gives the same
    masks, also where a part of the model is run again from the random state it started from. A model that draws nothing
    leaves the stream as it was.

    Args:
        mesh: All processes.
        device: Whose stream is switched, beside the CPU's.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self._device = device
        self._pipeline = mesh[PIPELINE_AXIS]
        self._place_of_model = _place(mesh, PIPELINE_AXIS, DATA_AXIS)
        self._place_of_share = _place(mesh, TENSOR_AXIS)
        self._model: _Region | None = None
        self._split: _Region | None = None

    def attach(self, decoder: Decoder, begins: Sequence[str], ends: Sequence[str]) -> None:
        """Register the hooks.

        Args:
            decoder: The model; before and after its forward the stream is the user's.
            begins: Names of modules whose output is split over the tensor axis.
            ends: Names of modules whose output is whole again.
        """
        decoder.root.register_forward_pre_hook(self._enter_model)
        decoder.root.register_forward_hook(self._leave_model, always_call=True)
        for name in begins:
            decoder.part(name).register_forward_hook(self._enter_split)
        for name in ends:
            decoder.part(name).register_forward_hook(self._leave_split)

    def _enter_model(self, *_: Any) -> None:
        self._model = self._enter(*self._place_of_model)

    def _leave_model(self, _: nn.Module, arguments: Any, output: Any) -> None:
        self._leave_split()
        if self._model is not None:
            # without an output the forward has failed here, and other stages may wait for ever
            self._leave(self._model, on_any_stage=output is not None)
            self._model = None

    def _enter_split(self, *_: Any) -> None:
        if self._split is None:
            self._split = self._enter(*self._place_of_share)

    def _leave_split(self, *_: Any) -> None:
        if self._split is not None:
            self._leave(self._split)
            self._split = None

    def _enter(self, place: int, num_places: int) -> _Region:
        around = self._state()
        # a seed for every place, of which this process takes its own
        seed = int(torch.randint(2**62, (num_places,))[place])
        around_if_used = self._state()
        self._seed(seed)
        return _Region(around, around_if_used, own=self._state())

    def _leave(self, region: _Region, *, on_any_stage: bool = False) -> None:
        is_used = any(not torch.equal(now, then) for now, then in zip(self._state(), region.own, strict=True))
        if on_any_stage and self._pipeline.size() > 1:
            # the user's stream goes on alike on all processes of a replica
            votes = torch.tensor(int(is_used), device=self._device)
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._pipeline.get_group())
            is_used = bool(votes)
        self._restore(region.around_if_used if is_used else region.around)

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


def _place(mesh: DeviceMesh, *axes: str) -> tuple[int, int]:
    """Return this process's place among all coordinates on some axes, and how many there are."""
    place = 0
    for axis in axes:
        place = place * mesh[axis].size() + mesh[axis].get_local_rank()
    return place, math.prod(mesh[axis].size() for axis in axes)
