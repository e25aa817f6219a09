"""What stands, on one stage, in the places of layers and parts that another stage holds."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_boost.layout import Decoder
from lightning_boost.model.crossing import Latents
from lightning_boost.pipeline_parallel.latents import LatentBorder

_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "forward"})

_NUM_TOKENS = 16


class Absent(nn.Module):
    """In the place of a part that another stage holds; shows the part's own attributes, such as a layer's kind.

    Args:
        part: That is not here.
    """

    is_absent = True

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        own = {name: value for name, value in vars(part).items() if name not in _OF_EVERY_MODULE}
        self.__dict__.update({name: value for name, value in own.items() if not isinstance(value, nn.Module | Tensor)})

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

    def __init__(self, part: nn.Module, width: int, dtype: torch.dtype) -> None:
        super().__init__(part)
        self._width = width
        self._dtype = dtype

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Map ``[B, T]`` to zeros ``[B, T, width]``."""
        zero = torch.zeros((), dtype=self._dtype, device=input.device)
        return zero.expand(*input.shape, self._width)


class StageEnd(BaseException):
    """Leaves the model's forward behind the stage's last layer; not an ``Exception``, lest the model catches it."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


@dataclass(frozen=True)
class LayerForm:
    """How a model's layers are given the hidden state, and how they return it."""

    argument: str
    """Name of the hidden state among a layer's arguments."""

    num_outputs: int | None = None
    """Length of the tuple that a layer returns, the hidden state first; ``None``: it returns the hidden state alone."""

    def taken_from(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the hidden state that a layer is called with."""
        hidden: Tensor = args[0] if args else kwargs[self.argument]
        return hidden

    def returned(self, hidden: Tensor) -> Any:
        """Return the hidden state as a layer does; what else a layer returns is not there."""
        return hidden if self.num_outputs is None else (hidden, *[None] * (self.num_outputs - 1))


def find_form(decoder: Decoder, layer: nn.Module) -> LayerForm:
    """Find out the form of a model's layers: run the model on a few tokens up to its first layer.

    Whatever other arguments it cannot do without, labels or a mask, are token ids as well: only the form counts. A
    model that cannot be run so is taken to have layers that return the hidden state alone; ``check_form`` sees if they
    do not.

    Args:
        decoder: The model, cut to this process's stages.
        layer: One that is here; it runs in the place of the first.
    """
    argument = next(iter(inspect.signature(layer.forward).parameters), "")
    if hasattr(layer, "crossing_sizes"):
        # this package's own, which cannot run in the place of the first: that one receives no latents
        return LayerForm(argument, 2)
    places: dict[str, nn.Module | None] = dict.fromkeys(
        decoder.root.get_submodule(decoder.layout.layers)._modules, layer
    )
    device = next(layer.parameters()).device
    token_ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.long, device=device)
    devices = [device] if device.type == "cuda" else []
    handle = layer.register_forward_hook(_end_behind)
    output = None
    try:
        with torch.no_grad(), torch.random.fork_rng(devices), layers_replaced(decoder, places):
            decoder.root(token_ids, **dict.fromkeys(_needed_beside_first(decoder.root), token_ids))
    except StageEnd as end:
        output = end.output
    except Exception:  # a user's forward may raise anything
        pass
    finally:
        handle.remove()
    return LayerForm(argument, len(output) if isinstance(output, tuple | list) else None)


def check_form(form: LayerForm, layer: nn.Module) -> None:
    """Let a layer raise a ``TypeError`` if it returns the hidden state otherwise than the places of the others do."""

    def check(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, Tensor) != (form.num_outputs is None):
            raise TypeError(
                f"a layer returned a {type(output).__name__}, where layers on other pipeline stages are taken to return"
                f" {'the hidden state alone' if form.num_outputs is None else 'a tuple'}: the model could not be run on"
                " 16 token ids to see. Give what else its forward needs a default, or let layers return the hidden"
                " state alone."
            )

    layer.register_forward_hook(check)


def _needed_beside_first(model: nn.Module) -> list[str]:
    """Return the names of the arguments of a model's forward that have no default, but for the first."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    _, *others = inspect.signature(model.forward).parameters.values()
    return [each.name for each in others if each.kind in named and each.default is inspect.Parameter.empty]


def _end_behind(_: nn.Module, __: Any, output: Any) -> None:
    raise StageEnd(output)


@contextmanager
def layers_replaced(decoder: Decoder, places: dict[str, nn.Module | None]) -> Iterator[None]:
    """Let a model's list of layers hold others for a while."""
    layers = decoder.root.get_submodule(decoder.layout.layers)
    kept, layers._modules = layers._modules, places
    try:
        yield
    finally:
        layers._modules = kept


class Place(Absent):
    """A layer of another stage: hands on the hidden state.

    Args:
        layer: That would stand here.
        form: Of the model's layers.
    """

    def __init__(self, layer: nn.Module, form: LayerForm) -> None:
        super().__init__(layer)
        self._form = form

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden state as a layer does."""
        return self._form.returned(self._form.taken_from(args, kwargs))


class Receive(Place):
    """The layer before the stage's first: gives what the stage before has sent.

    Args:
        layer: That would stand here.
        form: Of the model's layers.
        border: Of the latents that come with the hidden state, if any do.
    """

    received: tuple[Tensor, ...] = ()

    def __init__(self, layer: nn.Module, form: LayerForm, border: LatentBorder | None) -> None:
        super().__init__(layer, form)
        self.border = border

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what was received, as a layer does."""
        hidden, *share = self.received
        return self._form.returned(hidden) if self.border is None else (hidden, self._latents(hidden, *share))

    def _latents(self, hidden: Tensor, share: Tensor) -> Latents:
        assert self.border is not None
        return self.border.unpack(share, hidden.shape[:-1])


class Send(Place):
    """The layer behind the stage's last: ends the forward with the hidden state that it gets.

    Args:
        layer: That would stand here.
        form: Of the model's layers.
        border: Of the latents that go with the hidden state, if any do.
    """

    def __init__(self, layer: nn.Module, form: LayerForm, border: LatentBorder | None) -> None:
        super().__init__(layer, form)
        self.border = border

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """End the forward.

        Raises:
            StageEnd: Always.
        """
        hidden = self._form.taken_from(args, kwargs)
        raise StageEnd(hidden if self.border is None else (hidden, self.border.pack(kwargs["latents"])))
