"""Schemes: tables that tell which layer of a decoder becomes which, and which dim of each parameter is split."""

from typing import Protocol

from torch.distributed.tensor import Placement, Shard
from torch.nn import Embedding, Linear, Module

from lightning_boost.model.initialization import set_module
from lightning_boost.model.low_rank import LowRankLinear
from lightning_boost.tensor_parallel.bottleneck import (
    BottleneckParallelLinear,
    FeatureShardedEmbedding,
    NormalizedProjections,
    ProjectionSlice,
)
from lightning_boost.tensor_parallel.check import check_ends, check_projection, norm_eps
from lightning_boost.tensor_parallel.layout import Decoder, ProjectionGroup
from lightning_boost.tensor_parallel.vocabulary import GatheredNorm, VocabularyParallelHead, VocabularyParallelLoss

INPUT_FEATURES = Shard(1)
"""Row-parallel: a weight ``[out, in]`` is split over input features."""

OUTPUT_FEATURES = Shard(0)
"""Column-parallel: a weight ``[out, in]`` is split over output features."""


class Scheme(Protocol):
    """One way to split a decoder over the tensor axis."""

    def check(self, decoder: Decoder) -> None:
        """Check that every part can be swapped; raises a ``ValueError`` that names the part."""

    def placements(self, decoder: Decoder) -> dict[str, Placement]:
        """Return how each parameter is split, by its name in the decoder."""

    def swap(self, decoder: Decoder, group: str) -> None:
        """Replace the decoder's modules in place; their parameters are already shares."""


class BottleneckScheme:
    """The hidden stream stays split over features; the only all-reduces are as wide as the bottleneck."""

    def check(self, decoder: Decoder) -> None:
        """Check that projections are factor pairs and norms are RMSNorms."""
        layout = decoder.layout
        for layer_name, layer in decoder.layers.items():
            for group in layout.groups:
                norm_eps(layer.get_submodule(group.norm), f"{layer_name}.{group.norm}")
            for name in layout.projections():
                check_projection(layer.get_submodule(name), f"{layer_name}.{name}")
        norm_eps(decoder.part(layout.final_norm), layout.final_norm)
        check_ends(decoder)

    def placements(self, decoder: Decoder) -> dict[str, Placement]:
        """Return how each parameter is split."""
        layout = decoder.layout
        table: dict[str, Placement] = {
            f"{layout.embedding}.weight": INPUT_FEATURES,
            f"{layout.final_norm}.weight": OUTPUT_FEATURES,
            f"{layout.head}.weight": OUTPUT_FEATURES,
        }
        for layer in decoder.layers:
            for group in layout.groups:
                table[f"{layer}.{group.norm}.weight"] = OUTPUT_FEATURES
            for name in layout.projections():
                table[f"{layer}.{name}.factor_a.weight"] = INPUT_FEATURES
                table[f"{layer}.{name}.factor_b.weight"] = OUTPUT_FEATURES
                table[f"{layer}.{name}.factor_b.bias"] = OUTPUT_FEATURES
        return table

    def swap(self, decoder: Decoder, group: str) -> None:
        """Put the parallel twins in place."""
        layout, root = decoder.layout, decoder.root
        for layer in decoder.layers.values():
            for projections in layout.groups:
                _swap_group(layer, projections, decoder.hidden_size, group)
            for lone in layout.lone_projections:
                set_module(
                    layer, lone.projection, BottleneckParallelLinear(_pair(layer, lone.projection), group, lone.chunk)
                )
        final_norm = decoder.part(layout.final_norm)
        embedding, head = decoder.part(layout.embedding), decoder.part(layout.head)
        assert isinstance(embedding, Embedding), "check() has seen to it"
        assert isinstance(head, Linear), "check() has seen to it"
        set_module(root, layout.embedding, FeatureShardedEmbedding(embedding))
        set_module(root, layout.final_norm, GatheredNorm(final_norm, norm_eps(final_norm, layout.final_norm), group))
        set_module(root, layout.head, VocabularyParallelHead(head, group))
        if layout.loss and decoder.has_own_loss:
            set_module(root, layout.loss, VocabularyParallelLoss(group))


def _swap_group(layer: Module, projections: ProjectionGroup, hidden_size: int, group: str) -> None:
    members: list[ProjectionSlice] = []
    for index, name in enumerate(projections.projections):
        members.append(ProjectionSlice(_pair(layer, name), index, members))
        set_module(layer, name, members[-1])
    norm = layer.get_submodule(projections.norm)
    eps = norm_eps(norm, projections.norm)
    set_module(
        layer, projections.norm, NormalizedProjections(norm, eps, members, hidden_size, group, projections.chunk)
    )


def _pair(layer: Module, name: str) -> LowRankLinear:
    pair = layer.get_submodule(name)
    assert isinstance(pair, LowRankLinear)
    return pair


SCHEMES: dict[str, Scheme] = {"bottleneck": BottleneckScheme()}
