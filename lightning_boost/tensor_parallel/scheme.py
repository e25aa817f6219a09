"""Schemes: tables that tell which layer of a decoder becomes which, and which dim of each parameter is split."""

from typing import Protocol

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.nn import Embedding, Linear, Module

from lightning_boost.collectives import group_index, group_size
from lightning_boost.layout import Decoder, ProjectionGroup, parameters_of, projection_of
from lightning_boost.model.factor_pair import JOINED, factor_names, out_features
from lightning_boost.model.initialization import set_module
from lightning_boost.tensor_parallel.bottleneck import (
    BottleneckParallelLinear,
    DenseMember,
    FactorPair,
    FeatureShardedEmbedding,
    GroupMember,
    LowRankMember,
    NormalizedProjections,
)
from lightning_boost.tensor_parallel.check import (
    check_ends,
    check_head_norm,
    check_projection,
    check_whole_model,
    norm_eps,
)
from lightning_boost.tensor_parallel.dense import RowParallelLinear, Rows
from lightning_boost.tensor_parallel.full_rank import (
    ColumnParallelLinear,
    GatheredEmbedding,
    ReplicatedNorm,
)
from lightning_boost.tensor_parallel.gathered_norm import GatheredNorm
from lightning_boost.tensor_parallel.heads import HeadNorm, count_own_heads
from lightning_boost.tensor_parallel.joined import DownPlace, UpPlace
from lightning_boost.tensor_parallel.vocabulary import (
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    VocabularyParallelLoss,
)

INPUT_FEATURES = Shard(1)
"""Row-parallel: a weight ``[out, in]`` is split over input features."""

OUTPUT_FEATURES = Shard(0)
"""Column-parallel: a weight ``[out, in]`` is split over output features."""

WHOLE = Replicate()
"""The same on every process."""

Placements = dict[str, Placement]


class Scheme(Protocol):
    """One way to split a decoder over the tensor axis."""

    def check(self, decoder: Decoder) -> None:
        """Check that every part can be swapped; raises a ``ValueError`` that names the part."""

    def placements(self, decoder: Decoder, size: int) -> Placements:
        """Return how each parameter is split over ``size`` processes, by its name in the decoder."""

    def swap(self, decoder: Decoder, group: str) -> None:
        """Replace the decoder's modules in place; their parameters are already shares."""

    def split_region(self, decoder: Decoder) -> tuple[list[str], list[str]]:
        """Return the modules whose output is split over the axis, and those whose output is whole again."""

    def hidden_width(self, decoder: Decoder, size: int) -> int:
        """Return the features of the hidden stream that each of ``size`` processes holds between layers."""


class BottleneckScheme:
    """The hidden stream stays split over features; the only all-reduces are as wide as the bottleneck."""

    def check(self, decoder: Decoder) -> None:
        """Check that projections are factor pairs or dense, norms RMSNorms, and that a pair is among them."""
        _check_parts(decoder, self)

    def placements(self, decoder: Decoder, size: int) -> Placements:
        """Return how each parameter is split."""
        layout = decoder.layout
        table = _ends(decoder, norm=OUTPUT_FEATURES)
        for layer_name, layer in decoder.layers.items():
            for group in layout.groups:
                table[f"{layer_name}.{group.norm}.weight"] = OUTPUT_FEATURES
            for name in layout.projections():
                module = projection_of(layer, name)
                path = f"{layer_name}.{parameters_of(name, module)}"
                names = factor_names(module)
                if names is None:
                    table |= _dense(decoder, path, name, size, lone_bias=OUTPUT_FEATURES)
                else:
                    is_whole = _is_replicated(decoder, name, size)
                    table[path + names.factor_a] = Shard(names.in_dim)
                    table[path + names.factor_b] = WHOLE if is_whole else Shard(names.out_dim)
                    table[path + names.bias] = WHOLE if is_whole else OUTPUT_FEATURES
            table |= _head_norms(decoder, layer_name, layer)
        return table

    def swap(self, decoder: Decoder, group: str) -> None:
        """Put the parallel twins in place."""
        layout = decoder.layout
        for layer in decoder.layers.values():
            for projections in layout.groups:
                _swap_group(decoder, layer, projections, group)
            for lone in layout.lone_projections:
                module = projection_of(layer, lone.projection)
                twin: Module
                if isinstance(module, Linear):
                    twin = RowParallelLinear(module, group, lone.chunk, shard_features=True)
                else:
                    twin = BottleneckParallelLinear(module, group, lone.chunk)
                _place(layer, lone.projection, twin)
            _swap_heads(decoder, layer, group)
        embedding, final_norm = decoder.part(layout.embedding), decoder.part(layout.final_norm)
        assert isinstance(embedding, Embedding)
        eps = norm_eps(final_norm, layout.final_norm)
        table: Module
        if decoder.is_tied:
            table = VocabularyParallelEmbedding(embedding, group, shard_features=True)
        else:
            table = FeatureShardedEmbedding(embedding)
        _swap_head(decoder, group)
        set_module(decoder.root, layout.embedding, table)
        set_module(decoder.root, layout.final_norm, GatheredNorm(final_norm, eps, group))

    def split_region(self, decoder: Decoder) -> tuple[list[str], list[str]]:
        """Return the embedding and the final norm: everything between them is split."""
        return [decoder.layout.embedding], [decoder.layout.final_norm]

    def hidden_width(self, decoder: Decoder, size: int) -> int:
        """Return ``D/tp``."""
        return decoder.hidden_size // size


class FullRankScheme:
    """Megatron's form: the hidden stream is whole on every process, all-reduces are as wide as it."""

    def check(self, decoder: Decoder) -> None:
        """Check that projections are dense and norms RMSNorms."""
        _check_parts(decoder, self)

    def placements(self, decoder: Decoder, size: int) -> Placements:
        """Return how each parameter is split."""
        table = _ends(decoder, norm=WHOLE)
        for layer_name, layer in decoder.layers.items():
            for group in decoder.layout.groups:
                table[f"{layer_name}.{group.norm}.weight"] = WHOLE
            for name in decoder.layout.projections():
                table |= _dense(decoder, f"{layer_name}.{name}.", name, size, lone_bias=WHOLE)
            table |= _head_norms(decoder, layer_name, layer)
        return table

    def swap(self, decoder: Decoder, group: str) -> None:
        """Put the parallel twins in place."""
        layout = decoder.layout
        for layer in decoder.layers.values():
            for projections in layout.groups:
                for name in projections.projections:
                    module = _linear(layer, name)
                    rows = _own_rows(decoder, name, module.out_features, group)
                    set_module(layer, name, ColumnParallelLinear(module, rows, group, projections.chunk))
                _swap_norm(layer, projections.norm, group, projections.chunk)
            for lone in layout.lone_projections:
                module = _linear(layer, lone.projection)
                twin = RowParallelLinear(module, group, lone.chunk, shard_features=False)
                set_module(layer, lone.projection, twin)
            _swap_heads(decoder, layer, group)
        embedding = decoder.part(layout.embedding)
        assert isinstance(embedding, Embedding)
        table: Module
        if decoder.is_tied:
            table = VocabularyParallelEmbedding(embedding, group, shard_features=False)
        else:
            table = GatheredEmbedding(embedding, group)
        _swap_head(decoder, group)
        set_module(decoder.root, layout.embedding, table)
        _swap_norm(decoder.root, layout.final_norm, group, "head")

    def split_region(self, decoder: Decoder) -> tuple[list[str], list[str]]:
        """Return the projections into heads and the MLP's features, and those out of them."""
        layout = decoder.layout
        lone = [projection.projection for projection in layout.lone_projections]
        grouped = [name for name in layout.projections() if name not in lone]
        begins = [f"{layer}.{name}" for layer in decoder.layers for name in grouped]
        return begins, [f"{layer}.{name}" for layer in decoder.layers for name in lone]

    def hidden_width(self, decoder: Decoder, size: int) -> int:
        """Return ``D``."""
        return decoder.hidden_size


SCHEMES: dict[str, Scheme] = {"bottleneck": BottleneckScheme(), "full_rank": FullRankScheme()}


def scheme_for(decoder: Decoder) -> Scheme:
    """Return the scheme of a decoder: ``bottleneck`` if any of its projections is a factor pair."""
    modules = [projection_of(layer, name) for layer in decoder.layers.values() for name in decoder.layout.projections()]
    return SCHEMES["bottleneck" if any(map(factor_names, modules)) else "full_rank"]


def _check_parts(decoder: Decoder, scheme: Scheme) -> None:
    layout = decoder.layout
    for layer_name, layer in decoder.layers.items():
        for group in layout.groups:
            norm_eps(layer.get_submodule(group.norm), f"{layer_name}.{group.norm}")
        for name in layout.projections():
            check_projection(projection_of(layer, name), f"{layer_name}.{name}")
        for name, norm in _present_head_norms(decoder, layer).items():
            check_head_norm(norm, f"{layer_name}.{name}", _head_size(decoder, layer))
    norm_eps(decoder.part(layout.final_norm), layout.final_norm)
    check_ends(decoder)
    check_whole_model(decoder, set(scheme.placements(decoder, 2)))


def _ends(decoder: Decoder, *, norm: Placement) -> Placements:
    """Return the placements outside the layers; a weight that embedding and head share is split as the head's."""
    layout = decoder.layout
    return {
        f"{layout.embedding}.weight": OUTPUT_FEATURES if decoder.is_tied else INPUT_FEATURES,
        f"{layout.final_norm}.weight": norm,
        f"{layout.head}.weight": OUTPUT_FEATURES,
    }


def _dense(decoder: Decoder, path: str, name: str, size: int, *, lone_bias: Placement) -> Placements:
    """Return the placements of a dense projection: row-parallel where no norm is in front, else column-parallel."""
    if name in [lone.projection for lone in decoder.layout.lone_projections]:
        return {f"{path}weight": INPUT_FEATURES, f"{path}bias": lone_bias}
    placement = WHOLE if _is_replicated(decoder, name, size) else OUTPUT_FEATURES
    return {f"{path}weight": placement, f"{path}bias": placement}


def _present_head_norms(decoder: Decoder, layer: Module) -> dict[str, Module]:
    inside = dict(layer.named_modules())
    return {name: inside[name] for name in decoder.layout.head_norms if name in inside}


def _head_norms(decoder: Decoder, layer_name: str, layer: Module) -> Placements:
    return {f"{layer_name}.{name}.weight": WHOLE for name in _present_head_norms(decoder, layer)}


def _head_size(decoder: Decoder, layer: Module) -> int:
    return out_features(projection_of(layer, decoder.layout.groups[0].projections[0])) // decoder.attention_heads[0]


def _is_replicated(decoder: Decoder, name: str, size: int) -> bool:
    _, key_value_heads = decoder.attention_heads
    return name in decoder.layout.key_value_projections and key_value_heads < size


def _own_rows(decoder: Decoder, name: str, out_features: int, group: str) -> Rows | None:
    return decoder.own_key_value_rows(name, out_features, group_size(group), group_index(group))


def _linear(layer: Module, name: str) -> Linear:
    module = layer.get_submodule(name)
    assert isinstance(module, Linear)
    return module


def _swap_group(decoder: Decoder, layer: Module, projections: ProjectionGroup, group: str) -> None:
    members: list[GroupMember] = []
    for name in projections.projections:
        module = projection_of(layer, name)
        rows = _own_rows(decoder, name, out_features(module), group)
        member = DenseMember(module, rows) if isinstance(module, Linear) else LowRankMember(module, rows)
        member.join(members)
        _place(layer, name, member)
    norm = layer.get_submodule(projections.norm)
    eps = norm_eps(norm, projections.norm)
    twin = NormalizedProjections(norm, eps, members, decoder.hidden_size, group, projections.chunk)
    set_module(layer, projections.norm, twin)


def _place(layer: Module, name: str, twin: Module) -> None:
    """Put a projection's twin in its place; in two places, where it is two modules."""
    down, _, up = name.partition(JOINED)
    if not up:
        set_module(layer, name, twin)
        return
    assert isinstance(twin, FactorPair)
    set_module(layer, down, DownPlace(twin, down.rpartition(".")[2]))
    set_module(layer, up, UpPlace(twin, up.rpartition(".")[2]))


def _swap_heads(decoder: Decoder, layer: Module, group: str) -> None:
    """Let a layer's attention count and norm this process's heads."""
    for name, norm in _present_head_norms(decoder, layer).items():
        set_module(layer, name, HeadNorm(norm, norm_eps(norm, name), group, name.rpartition(".")[2]))
    count_own_heads(decoder.attention(layer), decoder.attention_heads, group_size(group))


def _swap_norm(owner: Module, name: str, group: str, chunk: str) -> None:
    norm = owner.get_submodule(name)
    set_module(owner, name, ReplicatedNorm(norm, norm_eps(norm, name), group, chunk))


def _swap_head(decoder: Decoder, group: str) -> None:
    layout = decoder.layout
    set_module(decoder.root, layout.head, VocabularyParallelHead(_linear(decoder.root, layout.head), group))
    loss = decoder.own_loss
    if layout.loss and loss is not None:
        set_module(decoder.root, layout.loss, VocabularyParallelLoss(loss, group))
