"""Recompute: a block's activations are computed a second time in backward instead of being kept from forward.

``low_rank`` keeps what is small or has cost a collective, the latents, and runs the rest of a block again. ``block``
keeps a block's input only and runs all of it again, its collectives too. Latents are the same on every process of the
tensor axis, so each may keep a share of them, which are gathered for the second run.
"""

import functools
import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn
from typing_extensions import Self, override

from lightning_boost.collectives import Label, all_gather, group_index, group_size
from lightning_boost.layout import Decoder, projection_of
from lightning_boost.model.factor_pair import factor_names

Recompute = Literal["none", "low_rank", "block"]
KINDS = ("none", "low_rank", "block")
LatentStore = Literal["whole", "sharded"]
STORES = ("whole", "sharded")

_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past", "kv_cache")
"""Names under which layers are given keys and values that they extend."""


@dataclass(frozen=True, kw_only=True)
class RecomputeOptions:
    """What a user chooses of recompute.

    Raises:
        ValueError: If a name is unknown, the blocks are none, or something is to be kept where all is run again.
    """

    kind: Recompute = "none"
    every: float = 1
    """Of how many blocks one is recomputed, as a whole number, or the share of blocks, below 1."""

    keep_attention: bool = False
    """Whether attention's output is kept too, so that attention is not run again."""

    store_latents: LatentStore = "whole"
    """Whether each process of the tensor axis keeps the latents whole, or a share of them that is gathered again."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"recompute ({self.kind!r}) must be one of {', '.join(map(repr, KINDS))}.")
        is_number = isinstance(self.every, int | float) and not isinstance(self.every, bool)
        if not is_number or not (0 < self.every < 1 or (self.every >= 1 and float(self.every).is_integer())):
            raise ValueError(
                f"recompute_every ({self.every!r}) must be a whole number k of at least 1, for every k-th block, or a"
                " share of the blocks between 0 and 1; 1 recomputes all."
            )
        if self.keep_attention and self.kind == "block":
            raise ValueError(
                "keep_attention (True) must be False with recompute 'block', which runs all of a block again; set"
                " recompute to 'low_rank' to keep attention's output."
            )
        if self.store_latents not in STORES:
            raise ValueError(f"store_latents ({self.store_latents!r}) must be one of {', '.join(map(repr, STORES))}.")
        if self.store_latents == "sharded" and self.kind == "block":
            raise ValueError(
                "store_latents ('sharded') must be 'whole' with recompute 'block', which keeps no latents; set"
                " recompute to 'low_rank' to keep a share of them."
            )

    def __str__(self) -> str:
        if self.kind == "none":
            return "no recompute"
        where = "every block" if self.every == 1 else f"every {self.every:g}. block"
        if self.every < 1:
            where = f"{self.every:.0%} of the blocks"
        kept = [", attention kept"] * self.keep_attention + [", latents sharded"] * (self.store_latents == "sharded")
        return f"recompute {self.kind} in {where}{''.join(kept)}"

    def choose(self, num_blocks: int) -> list[int]:
        """Return the indices of the blocks that are recomputed: spread evenly, the first among them."""
        # a share as it was meant, not as floating point holds it
        share = 1 / Fraction(self.every) if self.every >= 1 else Fraction(self.every).limit_denominator(1000)
        share = share or Fraction(1, 1000)
        return [index for index in range(num_blocks) if ceil((index + 1) * share) > ceil(index * share)]


@runtime_checkable
class AsksForRecompute(Protocol):
    """A callback that chooses recompute in the strategy's stead."""

    recompute_options: RecomputeOptions


def recompute_layers(
    decoder: Decoder,
    options: RecomputeOptions,
    communicating: Collection[OpOverload],
    replicated: Collection[OpOverload],
) -> None:
    """Let a decoder's layers be run again in backward, in place.

    A layer gets a class that is derived from its own, so that a deep copy of it runs its own weights.

    Args:
        decoder: The model, its layers already swapped for their parallel twins.
        options: What is recomputed, and where.
        communicating: Operators that must not run twice.
        replicated: Those of them whose first result is the same on every process.
    """
    if options.kind == "none":
        return
    contexts = noop_context_fn
    if options.kind == "low_rank":
        policy = _Policy(frozenset(communicating), _latent_weights(decoder), options.keep_attention)
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        if options.store_latents == "sharded":
            contexts = functools.partial(_share_out, frozenset(replicated), contexts)
    layers = list(decoder.layers.values())
    classes = {layer_class: _recomputed(layer_class, contexts) for layer_class in set(map(type, layers))}
    for index in options.choose(len(layers)):
        layers[index].__class__ = classes[type(layers[index])]
    owner = decoder.layout.layers.rpartition(".")[0]
    decoder.root.get_submodule(owner).register_forward_pre_hook(_make_no_cache, with_kwargs=True)


def check_layers(decoder: Decoder) -> None:
    """Check that a derived class will be heard: a ``forward`` that an instance has of its own would hide its class's.

    Raises:
        ValueError: If a layer has one.
    """
    for name, layer in decoder.layers.items():
        if "forward" in vars(layer):
            raise ValueError(
                f"recompute needs layers whose forward is their class's, and {name} has one of its own (set on the"
                " instance). Define it in the class, or set recompute to 'none'."
            )


@dataclass(frozen=True)
class _Policy:
    """Tells what ``low_rank`` keeps of a block, by operator."""

    communicating: frozenset[OpOverload]
    latent_weights: frozenset[tuple[int, int]]
    """Shapes ``[in, R]`` of the factors into a bottleneck, as they are multiplied with."""

    keep_attention: bool

    def __call__(self, _: Any, operator: OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = (
            operator in self.communicating
            or (operator is torch.ops.aten.mm.default and tuple(args[1].shape) in self.latent_weights)
            or (self.keep_attention and _is_attention(operator, args, kwargs))
        )
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _latent_weights(decoder: Decoder) -> frozenset[tuple[int, int]]:
    """Return the shapes ``[in, R]`` of a decoder's factors where its projections are its own modules.

    On a tensor axis latents come from operators that communicate. On one process they are ordinary matrix products,
    known by the shape of what is multiplied with, which autocast does not change.
    """
    shapes = set()
    for layer in decoder.layers.values():
        for projection in (projection_of(layer, name) for name in decoder.layout.projections()):
            names = factor_names(projection)
            if names is not None:
                shape = projection.get_parameter(names.factor_a).shape
                shapes.add((shape[names.in_dim], shape[1 - names.in_dim]))
    return frozenset(shapes)


def _is_attention(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an operator is torch's attention without dropout.

    One that draws must run again: a second run that leaves it out would draw other numbers behind it.
    """
    if not operator.name().startswith("aten::_scaled_dot_product_"):
        return False
    return not _by_name(operator, args, kwargs).get("dropout_p", 0.0)


def _by_name(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False)) | kwargs


Contexts = Callable[[], tuple[TorchDispatchMode, TorchDispatchMode]]
"""Makes what a block's first run and its second are under."""


def _share_out(replicated: Collection[OpOverload], contexts: Contexts) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of a block of which each process keeps a share of what all have whole."""
    shares: deque[_Share] = deque()
    first, second = contexts()
    return _KeepShares(replicated, shares, first), _GatherShares(replicated, shares, second)


@dataclass(frozen=True)
class _Share:
    """What one process keeps of an operator's results: of the first its share, others whole.

    A share is a run of ``⌈values / tp⌉`` values, whichever tokens they are of; the last is filled up with zeros.
    """

    values: Tensor
    shape: torch.Size
    """Of the whole."""

    others: tuple[Tensor, ...]
    group: str
    chunk: str

    @classmethod
    def cut(cls, results: tuple[Tensor, ...], group: str, chunk: str) -> "_Share":
        """Copy this process's share out of an operator's results."""
        whole, *others = results
        length = ceil(whole.numel() / group_size(group))
        start = group_index(group) * length
        mine = whole.reshape(-1)[start : start + length]
        values = whole.new_zeros(length)
        values[: mine.numel()] = mine
        # without the graph, which holds what is kept
        return cls(values, whole.shape, tuple(other.detach() for other in others), group, chunk)

    def gather(self) -> tuple[Tensor, ...]:
        """Return the results; all processes must call this. One all-gather of ``⌈values / tp⌉``."""
        gathered = all_gather(self.values, self.group, Label(self.chunk, "backward"))
        return gathered.view(-1)[: self.shape.numel()].view(self.shape), *self.others


class _SharedOut(TorchDispatchMode):
    """A run of a block in which replicated results are shared out; other operators are left to torch's own context."""

    def __init__(self, replicated: Collection[OpOverload], shares: deque[_Share], others: TorchDispatchMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.replicated, self.shares, self.others = replicated, shares, others

    @override
    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.replicated:
            return self.others.__torch_dispatch__(func, types, args, kwargs)
        return self.run(func, args, kwargs or {})

    def run(self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results of a replicated operator."""
        raise NotImplementedError


class _KeepShares(_SharedOut):
    """The first run: keeps a share."""

    @override
    def run(self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        results, given = operator(*args, **kwargs), _by_name(operator, args, kwargs)
        every = results if isinstance(results, tuple) else (results,)
        self.shares.append(_Share.cut(every, given["group"], given["chunk"]))
        return results


class _GatherShares(_SharedOut):
    """The second run: gathers in the order of the first, which is that of all processes, and frees the shares."""

    has_begun = False

    @override
    def __enter__(self) -> Self:
        if self.has_begun:
            raise RuntimeError(
                "backward may go once through a recomputed block, whose second run frees what was kept. Leave out"
                " retain_graph=True and go backward from the sum of all losses, or set recompute to 'none'."
            )
        self.has_begun = True
        entered: Self = super().__enter__()  # type: ignore[no-untyped-call]
        return entered

    @override
    def run(self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        share = self.shares.popleft()
        assert share.chunk == _by_name(operator, args, kwargs)["chunk"], "the second run differs from the first"
        results = share.gather()
        return results if len(results) > 1 else results[0]


def _recomputed(layer_class: type[nn.Module], contexts: Callable[[], Any]) -> type[nn.Module]:
    """Derive a class of layers that are run again in backward.

    A call with a cache is run as it is: the second run would extend the cache a second time.
    """
    names = list(inspect.signature(layer_class.forward).parameters)[1:]

    @functools.wraps(layer_class.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "gradient_checkpointing", False) and self.training:
            raise ValueError(
                "gradient_checkpointing_enable() must not be called with recompute, which does the same with fewer"
                " collectives: leave it out, or set recompute to 'none'."
            )
        given = dict(zip(names, args, strict=False)) | kwargs
        has_cache = any(given.get(name) is not None for name in _CACHES)
        if has_cache or not torch.is_grad_enabled():
            return layer_class.forward(self, *args, **kwargs)

        def run(*inputs: Any) -> Any:
            named = dict(zip(kwargs, inputs[len(args) :], strict=True))
            with _autocast_without_cache():
                return layer_class.forward(self, *inputs[: len(args)], **named)

        # by position: checkpoint looks there for the devices whose random numbers it keeps
        return checkpoint(run, *args, *kwargs.values(), use_reentrant=False, context_fn=contexts)

    return type(f"Recomputed{layer_class.__name__}", (layer_class,), {"forward": forward})


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
    is_asked = any(given.get(name) is not None for name in ("use_cache", *_CACHES))
    if torch.is_grad_enabled() and "use_cache" in parameters and not is_asked:
        kwargs = kwargs | {"use_cache": False}
    return args, kwargs
