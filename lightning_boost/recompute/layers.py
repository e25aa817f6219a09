"""Layers that are run again in backward."""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils.checkpoint import checkpoint, noop_context_fn, set_checkpoint_early_stop

from lightning_boost.layout import Decoder
from lightning_boost.recompute.kept import Keeping, latent_weights, traced_contexts
from lightning_boost.recompute.options import RecomputeOptions
from lightning_boost.recompute.runs import Runs

CACHES = ("cache", "past_key_values", "past_key_value", "layer_past", "kv_cache")
"""Names under which layers are given keys and values that they extend."""


def recompute_layers(
    decoder: Decoder,
    options: RecomputeOptions,
    communicating: Collection[OpOverload],
    replicated: Collection[OpOverload],
) -> None:
    """Let a decoder's layers be run again in backward, in place.

    Args:
        decoder: The model, its layers already swapped for their parallel twins.
        options: What is recomputed, and where.
        communicating: Operators that must not run twice.
        replicated: Those of them whose first result is the same on every process.
    """
    if options.kind == "none":
        return
    keeping = None
    if options.kind == "low_rank":
        shared_out = replicated if options.store_latents == "sharded" else ()
        keeping = Keeping(_names(communicating), latent_weights(decoder), options.keep_attention, _names(shared_out))
    layers = list(decoder.layers.values())
    for index in options.choose(len(layers)):
        # a hook cannot wrap forward, and a derived class would be another type, with another name and pickled otherwise
        vars(layers[index])["forward"] = RecomputedForward(layers[index], keeping)
    train_without_cache(decoder)


def train_without_cache(decoder: Decoder) -> None:
    """Let a Hugging Face decoder make no cache in training, unless it is asked for one: its layers would extend it."""
    owner = decoder.layout.layers.rpartition(".")[0]
    decoder.root.get_submodule(owner).register_forward_pre_hook(_make_no_cache, with_kwargs=True)


def _names(operators: Collection[OpOverload]) -> frozenset[str]:
    return frozenset(operator.name() for operator in operators)


def check_layers(decoder: Decoder) -> None:
    """Check that recompute will be heard, and is not asked for twice.

    Raises:
        ValueError: If a layer has a ``forward`` of its own or recomputes by itself, or something is compiled.
    """
    for name, layer in decoder.layers.items():
        if "forward" in vars(layer):
            raise ValueError(
                f"recompute needs layers whose forward is their class's, and {name} has one of its own (set on the"
                " instance). Define it in the class, or set recompute to 'none'."
            )
        _refuse_gradient_checkpointing(layer)
    for name, module in decoder.root.named_modules():
        _refuse_compiled(module, name or type(module).__name__)


def _refuse_gradient_checkpointing(layer: nn.Module) -> None:
    if getattr(layer, "gradient_checkpointing", False):
        raise ValueError(
            "gradient_checkpointing_enable() must not be called with recompute, which does the same with fewer"
            " collectives: leave it out, or set recompute to 'none'."
        )


def _refuse_compiled(module: nn.Module, name: str) -> None:
    if module._compiled_call_impl is not None:
        raise ValueError(
            f"{name} must not be compiled with recompute by its own compile(), which does not see through that. Leave"
            " it out and set compile=True of the strategy, or set recompute to 'none'."
        )


class RecomputedForward:
    """Stands as a layer's ``forward`` and runs that of its class, in backward once more.

    It holds its layer: a deep copy of a layer, or one from a pickle, has one of its own and runs its own weights. A
    call with a cache is run as it is: the second run would extend the cache a second time.

    Args:
        layer: Whose ``forward`` is its class's still.
        keeping: What the second run finds kept; ``None``: the arguments alone.
    """

    def __init__(self, layer: nn.Module, keeping: Keeping | None) -> None:
        self.layer = layer
        self.keeping = keeping
        self.choose: Callable[[tuple[Any, ...], dict[str, Any]], Callable[..., Any]] | None = None
        """Tells what runs in the place of the class's ``forward`` for a call's arguments: the same, compiled or not."""

        self._names = list(inspect.signature(layer.forward).parameters)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the class's ``forward``, which other libraries and the pipeline look at."""
        return inspect.signature(self._plain())

    def _plain(self) -> Callable[..., Any]:
        return MethodType(type(self.layer).forward, self.layer)

    @torch.compiler.disable(reason="a layer that is recomputed must not be compiled")  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer's class returns."""
        layer = self.layer
        # once for both runs: hooks may be there in one of them only
        plain = self._plain() if self.choose is None else self.choose(args, kwargs)
        _refuse_compiled(layer, type(layer).__name__)
        if layer.training:
            _refuse_gradient_checkpointing(layer)
        given = dict(zip(self._names, args, strict=False)) | kwargs
        has_cache = any(given.get(name) is not None for name in CACHES)
        if has_cache or not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        runs = Runs(layer, may_repeat=self.keeping is None)

        def run(*inputs: Any) -> Any:
            named = dict(zip(kwargs, inputs[len(args) :], strict=True))
            with runs.next(), _autocast_without_cache():
                return plain(*inputs[: len(args)], **named)

        contexts = noop_context_fn if self.keeping is None else self.keeping.contexts
        # runs rely on it
        with set_checkpoint_early_stop(True):
            # by position: checkpoint looks there for the devices whose random numbers it keeps
            return checkpoint(run, *args, *kwargs.values(), use_reentrant=False, context_fn=contexts)

    def traced(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer's class returns, within one graph of a compiler, which then parts it into two runs.

        Only where something is kept. What is seen to at each call elsewhere holds of a graph: its two parts are of one
        forward, and what is kept cannot be changed in it.
        """
        layer = self.layer

        def run(*args: Any, **kwargs: Any) -> Any:
            return type(layer).forward(layer, *args, **kwargs)

        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        assert self.keeping is not None
        contexts = partial(traced_contexts, self.keeping)
        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextmanager
def _autocast_without_cache() -> Iterator[None]:
    """Let autocast cast weights in every run: what an earlier call has cast, the second run would not find cast."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _make_no_cache(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before a Hugging Face decoder: training makes a cache by default, which nobody reads."""
    parameters = inspect.signature(model.forward).parameters
    given = dict(zip(parameters, args, strict=False)) | kwargs
    is_asked = any(given.get(name) is not None for name in ("use_cache", *CACHES))
    if torch.is_grad_enabled() and "use_cache" in parameters and not is_asked:
        kwargs = kwargs | {"use_cache": False}
    return args, kwargs
