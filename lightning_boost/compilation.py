"""Decoder layers through ``torch.compile``, each by itself and in place: one graph forward, and one backward.

Layers of one make share their graphs, so that a model takes little longer to compile than one of its layers. Only a
layer's ``forward`` is compiled: names of parameters stay, and so do hooks on the layer, which run around the graph.
Operators that communicate are single calls of the graph, counted and timed where they run.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from lightning_boost.layout import Decoder
from lightning_boost.recompute.layers import CACHES, RecomputedForward, train_without_cache
from lightning_boost.tensor_parallel.local_parameter import local
from lightning_boost.torch_internals import private

_num_dispatch_modes = private("torch._C", "_len_torch_dispatch_stack")
_has_any_global_hook = private("torch.nn.modules.module", "_has_any_global_hook")

BACKEND = "inductor"

MOST_GRAPHS = 256
"""For all layers, in training and evaluation, with masks and without: above torch's default of 8, which layers of
different sizes would reach."""


def compile_layers(decoder: Decoder) -> None:
    """Compile a decoder's layers in place, each when it is first called.

    Args:
        decoder: The model, its layers already swapped for their parallel twins and recomputed where they are to be.
    """
    for layer in decoder.layers.values():
        compile_layer(layer)
    train_without_cache(decoder)


def compile_layer(layer: nn.Module) -> None:
    """Compile one layer, as ``compile_layers`` does."""
    recomputed: RecomputedForward | None = vars(layer).get("forward")
    if recomputed is not None and recomputed.keeping is None:
        # two runs of a whole graph: no graph could have its collectives twice
        recomputed.choose = CompiledForward(layer, None).choose
    else:
        # as recompute does: a derived class would be another type, with another name and pickled otherwise
        vars(layer)["forward"] = CompiledForward(layer, recomputed)


def check_to_compile(decoder: Decoder) -> None:
    """Check that layers can be compiled, and are not already.

    Raises:
        ValueError: If a layer has a ``forward`` of its own, or something is compiled.
    """
    for name, layer in decoder.layers.items():
        if "forward" in vars(layer):
            raise ValueError(
                f"compile (True) needs layers whose forward is their class's, and {name} has one of its own (set on the"
                " instance). Define it in the class, or set compile to False."
            )
    for name, module in decoder.root.named_modules():
        if module._compiled_call_impl is not None:
            raise ValueError(
                f"{name or type(module).__name__} must not be compiled where compile is True, which compiles each"
                " layer. Leave out its compile(), or set compile to False."
            )


def hooked_modules(decoder: Decoder) -> list[str]:
    """Return the modules inside of layers whose hooks keep the layers from running compiled."""
    return [
        f"{layer}.{name}"
        for layer, module in decoder.layers.items()
        for name, inside in module.named_modules()
        if inside is not module and _has_hooks(inside)
    ]


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class CompiledForward:
    """Stands as a layer's ``forward`` and runs that of its class, or its recomputed one, as a compiled graph.

    A call that a graph would hide something of runs as it is, uncompiled: one with a cache, which grows with each
    token; one with hooks on modules inside, or on all modules, as a verification sets; and one under a dispatch mode,
    such as torch's counter of FLOPs.

    Args:
        layer: Whose ``forward`` is its class's still, or recomputed.
        recomputed: What stands as its ``forward`` and is to be in the graph, if it is recomputed.
    """

    def __init__(self, layer: nn.Module, recomputed: RecomputedForward | None) -> None:
        self.traced = TracedLayer(layer, recomputed)
        self._recomputed = recomputed
        self._inside = [module for module in layer.modules() if module is not layer]
        self._names = list(inspect.signature(layer.forward).parameters)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the class's ``forward``, which other libraries and the pipeline look at."""
        return inspect.signature(self._plain())

    def _plain(self) -> Callable[..., Any]:
        layer = self.traced.layer
        return MethodType(type(layer).forward, layer) if self._recomputed is None else self._recomputed

    @torch.compiler.disable(recursive=False, reason="its graph is compiled by itself")  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer's class returns.

        Raises:
            RuntimeError: If ``forward`` cannot be one graph, or the compiler fails.
        """
        return self.choose(args, kwargs)(*args, **kwargs)

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """Return what runs a call with these arguments: the graph, or the layer as it is."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        runs_as_it_is = (
            any(given.get(name) is not None for name in CACHES)
            or any(map(_has_hooks, self._inside))
            or _has_any_global_hook()
            or _num_dispatch_modes() > 0
        )
        return self._plain() if runs_as_it_is else self._run_graph

    def _run_graph(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with self.traced.local_parameters():
                return _compiled(BACKEND)(self.traced, *args, **kwargs)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            raise RuntimeError(_in_words(error, type(self.traced.layer).__name__)) from error


class TracedLayer(nn.Module):
    """What a compiler sees of a layer: what its class computes, in two runs where it is recomputed.

    Args:
        layer: The layer.
        recomputed: What stands as its ``forward``, if it is recomputed.
    """

    def __init__(self, layer: nn.Module, recomputed: RecomputedForward | None) -> None:
        super().__init__()
        self.layer = layer
        self.recomputed = recomputed
        self._places = [
            (module, leaf)
            for module in layer.modules()
            for leaf, each in module._parameters.items()
            if each is not None
        ]

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer's class returns."""
        if self.recomputed is not None:
            return self.recomputed.traced(*args, **kwargs)
        return type(self.layer).forward(self.layer, *args, **kwargs)

    @contextmanager
    def local_parameters(self) -> Iterator[None]:
        """Put this process's shares in the places of parameters on a tensor axis, for the time of a call.

        A compiler must not see the DTensors themselves: torch cannot cut a graph for recompute in which they are read,
        and what a graph refers to cannot be moved to a device as a DTensor is.
        """
        # looked up anew: a data axis puts other ones in their places for the time of a call
        found: list[tuple[dict[str, Any], str, Any]] = [
            (owner._parameters, leaf, owner._parameters[leaf]) for owner, leaf in self._places
        ]
        try:
            for parameters, leaf, parameter in found:
                parameters[leaf] = local(parameter)
            yield
        finally:
            for parameters, leaf, parameter in found:
                parameters[leaf] = parameter


@cache
def _compiled(backend: str) -> Callable[..., Any]:
    options: dict[str, Any] = {"fullgraph": True, "backend": backend}
    # torch before 2.13 has one limit for all that is compiled
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = MOST_GRAPHS
    compiled: Callable[..., Any] = torch.compile(_run, **options)
    return compiled


def _run(traced: TracedLayer, *args: Any, **kwargs: Any) -> Any:
    return traced(*args, **kwargs)


def _in_words(error: Exception, layer: str) -> str:
    """Say what an error of torch's compiler means for layers of a class, and the way out."""
    if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
        return (
            f"compile (True) must be False with a {layer} whose calls take more than {MOST_GRAPHS} graphs: a graph is"
            " for the Python values that forward has read, a counter's among them, and torch's warning above has the"
            " last one that differed. Change that, or set compile to False."
        )
    # the parent of all errors that come from behind the graph
    if isinstance(error, torch._dynamo.exc.ShortenTraceback):
        reason = str(getattr(error, "inner_exception", error)).partition("\n")[0]
        return (
            f"compile (True) must be False where torch's compiler does not work, here on a {layer} ({reason}). It takes"
            " a C++ compiler, g++ or the one that CXX names, and on GPUs Triton. Install what is missing, or set"
            " compile to False."
        )
    return (
        f"compile (True) must be False with a {layer}, whose forward torch cannot compile as one graph"
        f" ({_reason(str(error))}; above is where). Change that, or set compile to False."
    )


def _reason(message: str) -> str:
    """Return the first line of a message of torch's compiler, and the one that tells of the layer's own code."""
    first, *others = (line.strip() for line in message.splitlines())
    # an explanation is general: read where there is nothing else
    for start in ("Developer debug context: ", "Explanation: "):
        for line in others:
            if line.startswith(start):
                return f"{first}: {line.removeprefix(start)}"
    return first
