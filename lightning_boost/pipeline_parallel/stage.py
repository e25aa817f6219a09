"""One stage of a pipeline: the user's own ``forward``, of which only the stage's layers are run.

Every process of a pipeline sees the whole batch's token ids, so each runs the model's ``forward`` from its beginning:
masks and positions come out as they do on one process. Layers that stand elsewhere hand on what they get; the one in
front of the stage's first layer hands in what was received, the one behind its last layer ends the forward there.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_boost.layout import Decoder
from lightning_boost.model.initialization import set_module
from lightning_boost.pipeline_parallel.latents import border_before
from lightning_boost.pipeline_parallel.places import (
    Absent,
    AbsentEmbedding,
    LayerForm,
    Place,
    Receive,
    Send,
    StageEnd,
    check_form,
    find_form,
    layers_replaced,
)
from lightning_boost.pipeline_parallel.split import StagePlan


def cut_to_stages(decoder: Decoder, plan: StagePlan, width: int, group: str | None = None) -> list["Stage"]:
    """Remove from a model, in place, what none of this process's stages holds, and return the stages.

    Names of what stays are those of the whole model.

    Args:
        decoder: The model, its parameters already this process's shares.
        plan: Which layers stand where.
        width: Features of the hidden stream on one process.
        group: Name of the tensor axis's group, where it has more than one process.
    """
    layout = decoder.layout
    dtype = decoder.root.get_parameter(f"{layout.embedding}.weight").dtype
    for name in plan.absent_parts(decoder):
        part = decoder.part(name)
        absent = AbsentEmbedding(part, width, dtype) if name == layout.embedding else Absent(part)
        set_module(decoder.root, name, absent)
    form = find_form(decoder, next(iter(decoder.layers.values())))
    return [Stage(decoder, index, plan, form, group) for index in plan.own]


class Stage(nn.Module):
    """What ``torch.distributed.pipelining`` runs: maps a hidden state to the next, from or to the ends of the model.

    It owns its parameters beside the model, which keeps their names, so that the data axis can make units of both.

    Args:
        decoder: The model, cut to this process's stages.
        index: Of this stage.
        plan: Which layers stand where.
        form: Of the model's layers.
        group: Name of the tensor axis's group, where it has more than one process.
    """

    def __init__(
        self, decoder: Decoder, index: int, plan: StagePlan, form: LayerForm, group: str | None = None
    ) -> None:
        super().__init__()
        self.is_first, self.is_last = index == 0, index == len(plan.stages) - 1
        layout, layers = decoder.layout, plan.stages[index]
        all_layers = list(decoder.part(layout.layers).children())
        self.own_layers = nn.ModuleList(all_layers[layer] for layer in layers)
        check_form(form, self.own_layers[0])
        names = [layout.embedding] if self.is_first else []
        names += [layout.final_norm, layout.head] if self.is_last else []
        self.ends = nn.ModuleList(decoder.part(name) for name in names)
        places: list[nn.Module] = [Place(layer, form) for layer in all_layers]
        places[layers.start : layers.stop] = list(self.own_layers)
        self._receive = None
        self.latents_before = self.latents_behind = None
        """Of the borders before and behind, where latents cross them."""
        if not self.is_first:
            self.latents_before = border_before(self.own_layers[0], group)
            self._receive = Receive(all_layers[layers.start - 1], form, self.latents_before)
            places[layers.start - 1] = self._receive
        if not self.is_last:
            self.latents_behind = border_before(all_layers[layers.stop], group)
            places[layers.stop] = Send(all_layers[layers.stop], form, self.latents_behind)
        # of the model, which this stage is a part of: neither is registered here
        self._decoder = decoder
        self._places: dict[str, nn.Module | None] = {str(index): place for index, place in enumerate(places)}
        self.call: Callable[[int], Any] | None = None
        """Runs the model's forward on a micro-batch, given its number."""

    @override
    def forward(self, *received: Tensor, number: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the stage.

        Args:
            received: Nothing on the first stage, else the hidden state ``[b, T, D/tp]`` of the stage before, and a
                share ``[⌈b T/tp⌉, R]`` of the latents where latents cross.
            number: Of the micro-batch, ``[1]``.
        """
        assert self.call is not None
        if self._receive is not None:
            self._receive.received = received
        try:
            with layers_replaced(self._decoder, self._places):
                output: Tensor = self.call(int(number))
        except StageEnd as end:
            return end.output  # type: ignore[no-any-return]
        finally:
            if self._receive is not None:
                self._receive.received = ()
        return output
