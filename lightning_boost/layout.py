"""Where the parts of a decoder stand, by dotted name.

A layout is all that this package knows of a model: which module is the embedding, which norm each group of
projections reads, and so on. ``LLAMA`` fits every model of that family's naming and is looked for by itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property

from torch import nn

from lightning_boost.model.crossing import Crossing
from lightning_boost.model.factor_pair import JOINED, JoinedPair, out_features
from lightning_boost.model.loss import NextTokenLoss


@dataclass(frozen=True, kw_only=True)
class ProjectionGroup:
    """Projections that read the same norm, which nothing else reads. Names are relative to a decoder layer.

    Each projection's output must be features that may be split evenly: heads, or features of the MLP. One that computes
    two things at once (a fused gate and up) cannot be described. One whose factors are two modules, which ``forward``
    calls after one another, is written with both names: ``"attn.q_down + attn.q_up"``.
    """

    norm: str
    projections: tuple[str, ...]
    chunk: str
    """What the group's collectives are called in counts."""


@dataclass(frozen=True, kw_only=True)
class LoneProjection:
    """A projection with no norm in front of it. The name is relative to a decoder layer."""

    projection: str
    chunk: str
    """What its collectives are called in counts."""


@dataclass(frozen=True, kw_only=True)
class DecoderLayout:
    """Dotted names of a decoder's parts, relative to the module that holds all of them.

    Heads are read from the model's ``config`` or the attention module's ``head_size`` or ``head_dim``, or given here.
    """

    embedding: str
    layers: str
    """The list of decoder layers."""

    groups: tuple[ProjectionGroup, ...]
    lone_projections: tuple[LoneProjection, ...]
    final_norm: str
    head: str
    key_value_projections: tuple[str, ...] = ()
    """Those of the projections that give key/value heads, of which there may be fewer than processes."""

    head_norms: tuple[str, ...] = ()
    """RMSNorms over the features of each head, the same for all heads, relative to a layer; need not be there."""

    loss: str | None = None
    """A module called with (hidden, head weight, labels) that may go through the vocabulary in shares; absent in models
    that take their loss from logits."""

    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None

    def projections(self) -> list[str]:
        """Names of every projection of a layer."""
        grouped = [name for group in self.groups for name in group.projections]
        return grouped + [lone.projection for lone in self.lone_projections]

    def model_parts(self) -> list[str]:
        """Names that must resolve from the model's root."""
        return [self.embedding, self.layers, self.final_norm, self.head]

    def layer_parts(self) -> list[str]:
        """Names that must resolve from each layer."""
        projections = [part for name in self.projections() for part in name.split(JOINED)]
        return [group.norm for group in self.groups] + projections


LLAMA = DecoderLayout(
    embedding="model.embed_tokens",
    layers="model.layers",
    groups=(
        ProjectionGroup(
            norm="input_layernorm",
            projections=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            chunk="qkv",
        ),
        ProjectionGroup(norm="post_attention_layernorm", projections=("mlp.gate_proj", "mlp.up_proj"), chunk="gate_up"),
    ),
    lone_projections=(
        LoneProjection(projection="self_attn.o_proj", chunk="o"),
        LoneProjection(projection="mlp.down_proj", chunk="down"),
    ),
    final_norm="model.norm",
    head="lm_head",
    key_value_projections=("self_attn.k_proj", "self_attn.v_proj"),
    head_norms=("self_attn.q_norm", "self_attn.k_norm"),
    loss="loss",
)
"""The names of LLaMA, Mistral, Qwen2, Qwen3 and CoLA in Hugging Face's form, and of this package's own model."""


def _in_two_modules(projection: str) -> str:
    stem = projection.removesuffix("_proj")
    return f"{stem}_v_proj{JOINED}{stem}_u_proj"


SVD_LLM = replace(
    LLAMA,
    groups=tuple(replace(group, projections=tuple(map(_in_two_modules, group.projections))) for group in LLAMA.groups),
    lone_projections=tuple(
        replace(lone, projection=_in_two_modules(lone.projection)) for lone in LLAMA.lone_projections
    ),
    key_value_projections=tuple(map(_in_two_modules, LLAMA.key_value_projections)),
)
"""The names of SVD-LLM, which keeps the factor into a bottleneck as ``q_v_proj`` and the one out of it as
``q_u_proj``."""


@dataclass(frozen=True)
class Decoder:
    """A model whose parts a layout has found.

    What is read from parts that will be replaced is remembered from its first reading.
    """

    root: nn.Module
    layout: DecoderLayout

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The decoder layers by full name, in order; of a model that is cut into stages those that are here."""
        layers = self.root.get_submodule(self.layout.layers).named_children()
        here = {index: layer for index, layer in layers if not getattr(layer, "is_absent", False)}
        return {f"{self.layout.layers}.{index}": layer for index, layer in here.items()}

    def part(self, name: str) -> nn.Module:
        """Return the part of the whole model called ``name`` in the layout."""
        return self.root.get_submodule(name)

    @property
    def hidden_size(self) -> int:
        """``D``."""
        return self.root.get_parameter(f"{self.layout.embedding}.weight").shape[-1]

    @cached_property
    def is_tied(self) -> bool:
        """Whether the embedding and the head share one weight."""
        return self.part(self.layout.embedding).weight is self.part(self.layout.head).weight

    def own_key_value_rows(self, name: str, out_features: int, size: int, index: int) -> tuple[int, int] | None:
        """Return the rows of a replicated key/value projection that process ``index`` of ``size`` reads.

        ``None`` where the projection is split: it gives no key/value heads, or as many as there are processes. Process
        ``i`` has the query heads that read key/value head ``i // (size / K)``.
        """
        _, key_value_heads = self.attention_heads
        if name not in self.layout.key_value_projections or key_value_heads >= size:
            return None
        head_size = out_features // key_value_heads
        head = index // (size // key_value_heads)
        return head * head_size, (head + 1) * head_size

    @property
    def own_loss(self) -> NextTokenLoss | None:
        """The loss module that the layout names, if the model holds it."""
        loss = getattr(self.root, self.layout.loss or "", None)
        return loss if type(loss) is NextTokenLoss else None

    @cached_property
    def attention_heads(self) -> tuple[int, int]:
        """Attention heads and key/value heads.

        Raises:
            ValueError: If neither the layout, nor the model's ``config``, nor the attention module tells.
        """
        layout, config = self.layout, getattr(self.root, "config", None)
        heads = layout.num_attention_heads or getattr(config, "num_attention_heads", None)
        key_value = layout.num_key_value_heads or getattr(config, "num_key_value_heads", None)
        if heads is None:
            heads, key_value = self._heads_from_attention()
        return heads, key_value or heads

    def crossings(self, layer: nn.Module) -> dict[str, Crossing]:
        """Return where latents of the layer before come into a layer of this package's own model, by name in it."""
        return {name: module for name, module in layer.named_modules() if isinstance(module, Crossing)}

    def attention(self, layer: nn.Module) -> nn.Module:
        """Return the module of a layer that holds the projections of the first group."""
        return layer.get_submodule(owner_of(self.layout.groups[0].projections[0]))

    def _heads_from_attention(self) -> tuple[int, int]:
        layer = next(iter(self.layers.values()))
        query, key, *_ = self.layout.groups[0].projections
        attention = self.attention(layer)
        head_size = getattr(attention, "head_size", None) or getattr(attention, "head_dim", None)
        if not isinstance(head_size, int):
            raise ValueError(
                f"the number of attention heads is not known: the model has no config.num_attention_heads and"
                f" {type(attention).__name__} has no head_size or head_dim."
                " Give DecoderLayout(num_attention_heads=…, num_key_value_heads=…)."
            )
        return tuple(out_features(projection_of(layer, name)) // head_size for name in (query, key))  # type: ignore


def owner_of(projection: str) -> str:
    """Return the name of the module that holds a projection, or both modules of one."""
    return projection.split(JOINED)[0].rpartition(".")[0]


def projection_of(layer: nn.Module, name: str) -> nn.Module:
    """Return a layer's projection; one in two modules as a ``JoinedPair``."""
    down, _, up = name.partition(JOINED)
    if not up:
        return layer.get_submodule(down)
    leaf_names = [part.rpartition(".")[2] for part in (down, up)]
    return JoinedPair(leaf_names[0], layer.get_submodule(down), leaf_names[1], layer.get_submodule(up))


def parameters_of(name: str, projection: nn.Module) -> str:
    """Return what stands before the names of a projection's parameters, relative to its layer."""
    return f"{owner_of(name) if isinstance(projection, JoinedPair) else name}."


def find_decoder(module: nn.Module, layout: DecoderLayout | None = None) -> Decoder:
    """Find the outermost submodule of ``module`` in which every part of the layout resolves.

    Args:
        module: Typically a LightningModule.
        layout: Names to look for; ``None`` takes ``LLAMA``, or else ``SVD_LLM``.

    Raises:
        ValueError: If there is none; the message lists what was looked for and the nearest names there are.
    """
    candidates = [candidate for _, candidate in module.named_modules()]
    for wanted in (layout,) if layout else (LLAMA, SVD_LLM):
        for candidate in candidates:
            if not any(True for _ in _missing_parts(candidate, wanted)):
                return Decoder(candidate, wanted)
    wanted = layout or LLAMA
    nearest = min(candidates, key=lambda candidate: sum(1 for _ in _missing_parts(candidate, wanted)))
    raise ValueError(_describe_missing(module, nearest, wanted))


def _missing_parts(root: nn.Module, layout: DecoderLayout) -> Iterator[str]:
    """Yield the names that do not resolve; a layer's parts are looked up in every layer."""
    yield from (name for name in layout.model_parts() if not _has(root, name))
    if not _has(root, layout.layers):
        return
    layers = list(root.get_submodule(layout.layers).named_children())
    if not layers:
        yield f"{layout.layers}.0"
    for index, layer in layers:
        yield from (f"{layout.layers}.{index}.{name}" for name in layout.layer_parts() if not _has(layer, name))


def _has(module: nn.Module, name: str) -> bool:
    try:
        module.get_submodule(name)
    except AttributeError:
        return False
    return True


def _describe_missing(module: nn.Module, nearest: nn.Module, layout: DecoderLayout) -> str:
    """Write what was looked for in ``module`` and, in its most similar submodule, what was not found."""
    missing = list(_missing_parts(nearest, layout))
    if len(missing) > len(layout.model_parts()) - 1:
        looked_for = ", ".join([*layout.model_parts(), *layout.layer_parts()])
        return (
            f"{type(module).__name__} holds no decoder that strategy 'boost' can swap: none of its submodules has all"
            f" of {looked_for}. If it is not built yet, build it in __init__ or configure_model; if it names its parts"
            " otherwise, pass BoostParallelStrategy(layout=DecoderLayout(…))."
        )
    names = [name for name, _ in nearest.named_modules() if name]
    lines = []
    for part in missing[:5]:
        close = get_close_matches(part, names, n=3, cutoff=0.6)
        lines.append(f"{part} (nearest: {', '.join(close) or 'nothing'})")
    return (
        f"{type(nearest).__name__} lacks parts of the decoder that strategy 'boost' swaps: {'; '.join(lines)}."
        " If it names its parts otherwise, pass BoostParallelStrategy(layout=DecoderLayout(…))."
    )
