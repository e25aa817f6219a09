"""One stage of a pipeline: the user's own ``forward``, of which only the stage's layers are run.

Every process of a pipeline sees the whole batch's token ids, so each runs the model's ``forward`` from its beginning:
masks and positions come out as they do on one process. Layers that stand elsewhere hand on what they get; the one in
front of the stage's first layer hands in what was received, the one behind its last layer ends the forward there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_boost.layout import Decoder
from lightning_boost.model.initialization import set_module
from lightning_boost.pipeline_parallel.split import StagePlan


class Absent(nn.Module):
    """In the place of a part that another stage holds."""

    is_absent = True

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to be run.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "a part of the model that stands on another pipeline stage was called past the model's forward: call the"
            " model as a whole, loss = model(…, labels=…)."
        )


class AbsentEmbedding(Absent):
    """Gives zeros in the shape of the hidden stream, which the first layer present replaces by what was received."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width = width
        self.dtype = dtype

    @override
    def forward(self, input_ids: Tensor) -> Tensor:
        """Map ``[B, T]`` to zeros ``[B, T, width]``."""
        zero = torch.zeros((), dtype=self.dtype, device=input_ids.device)
        return zero.expand(*input_ids.shape, self.width)


class _Skip(nn.Module):
    """A layer of another stage: hands on the hidden state."""

    @override
    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


class _Receive(nn.Module):
    """The layer before the stage's first: gives what the stage before has sent."""

    received: Tensor | None = None

    @override
    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert self.received is not None
        return self.received


class _StageEnd(BaseException):
    """Leaves the model's forward behind the stage's last layer; not an ``Exception``, lest the model catches it."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Send(nn.Module):
    """The layer behind the stage's last: ends the forward with the hidden state that it gets."""

    @override
    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise _StageEnd(hidden)


def cut_to_stages(decoder: Decoder, plan: StagePlan, width: int) -> list["Stage"]:
    """Remove from a model, in place, what none of this process's stages holds, and return the stages.

    Names of what stays are those of the whole model.

    Args:
        decoder: The model, its parameters already this process's shares.
        plan: Which layers stand where.
        width: Features of the hidden stream on one process.
    """
    layout = decoder.layout
    dtype = decoder.root.get_parameter(f"{layout.embedding}.weight").dtype
    for name in plan.absent_parts(decoder):
        part = AbsentEmbedding(width, dtype) if name == layout.embedding else Absent()
        set_module(decoder.root, name, part)
    return [Stage(decoder, index, plan.stages[index], len(plan.stages)) for index in plan.own]


class Stage(nn.Module):
    """What ``torch.distributed.pipelining`` runs: maps a hidden state to the next, from or to the ends of the model.

    It owns its parameters beside the model, which keeps their names, so that the data axis can make units of both.

    Args:
        decoder: The model, cut to this process's stages.
        index: Of this stage.
        layers: That it holds.
        num_stages: Of the whole pipeline.
    """

    def __init__(self, decoder: Decoder, index: int, layers: range, num_stages: int) -> None:
        super().__init__()
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        layout = decoder.layout
        model_list = decoder.root.get_submodule(layout.layers)
        all_layers = list(model_list.children())
        self.own_layers = nn.ModuleList(all_layers[layer] for layer in layers)
        names = [layout.embedding] if self.is_first else []
        names += [layout.final_norm, layout.head] if self.is_last else []
        self.ends = nn.ModuleList(decoder.part(name) for name in names)
        self._receive = _Receive()
        places: list[nn.Module] = [_Skip() for _ in all_layers]
        places[layers.start : layers.stop] = list(self.own_layers)
        if not self.is_first:
            places[layers.start - 1] = self._receive
        if not self.is_last:
            places[layers.stop] = _Send()
        # of the model, which this stage is a part of: neither is registered here
        self.__dict__["_list"] = model_list
        self.__dict__["_places"] = {str(index): place for index, place in enumerate(places)}
        self.call: Callable[[int], Any] | None = None
        """Runs the model's forward on a micro-batch, given its number."""

    @override
    def forward(self, *received: Tensor, number: Tensor) -> Tensor:
        """Run the stage.

        Args:
            received: Nothing on the first stage, else the hidden state ``[b, T, D/tp]`` of the stage before.
            number: Of the micro-batch, ``[1]``.
        """
        assert self.call is not None
        self._receive.received = received[0] if received else None
        try:
            with self._in_place():
                output: Tensor = self.call(int(number))
        except _StageEnd as end:
            return end.hidden
        finally:
            self._receive.received = None
        return output

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Let the model's list of layers be this stage's."""
        layers = self.__dict__["_list"]
        all_of_process = layers._modules
        layers._modules = self.__dict__["_places"]
        try:
            yield
        finally:
            layers._modules = all_of_process
