"""The table of scheme ``bottleneck``, and of its ungrouped form."""

from dataclasses import dataclass

from torch.distributed.tensor import Shard
from torch.nn import Embedding, Linear, Module

from lightning_boost.layout import Decoder, ProjectionGroup, parameters_of, projection_of
from lightning_boost.model.factor_pair import factor_names, out_features
from lightning_boost.model.initialization import set_module
from lightning_boost.tensor_parallel.bottleneck import (
    BottleneckParallelLinear,
    DenseMember,
    FeatureShardedEmbedding,
    LowRankMember,
    NormalizedProjections,
)
from lightning_boost.tensor_parallel.check import norm_eps
from lightning_boost.tensor_parallel.dense import RowParallelLinear
from lightning_boost.tensor_parallel.gathered_norm import GatheredNorm
from lightning_boost.tensor_parallel.handing_out import GroupMember
from lightning_boost.tensor_parallel.placement import (
    OUTPUT_FEATURES,
    WHOLE,
    Placements,
    check_parts,
    crossings,
    dense,
    ends,
    head_norms,
    is_replicated,
)
from lightning_boost.tensor_parallel.swap import own_rows, put, swap_crossings, swap_head, swap_heads
from lightning_boost.tensor_parallel.ungrouped import UngroupedNorm, UngroupedProjection
from lightning_boost.tensor_parallel.vocabulary import VocabularyParallelEmbedding


@dataclass(frozen=True)
class BottleneckScheme:
    """The hidden stream stays split over features; the only all-reduces are as wide as the bottleneck."""

    is_grouped: bool = True
    """Whether the projections behind a norm share their collectives; only benchmarks have them not."""

    def check(self, decoder: Decoder) -> None:
        """Check that projections are factor pairs or dense, and norms RMSNorms."""
        check_parts(decoder, self.placements(decoder, 2))

    def placements(self, decoder: Decoder, size: int) -> Placements:
        """Return how each parameter is split."""
        layout = decoder.layout
        table = ends(decoder, norm=OUTPUT_FEATURES)
        for layer_name, layer in decoder.layers.items():
            for group in layout.groups:
                table[f"{layer_name}.{group.norm}.weight"] = OUTPUT_FEATURES
            for name in layout.projections():
                module = projection_of(layer, name)
                path = f"{layer_name}.{parameters_of(name, module)}"
                names = factor_names(module)
                if names is None:
                    table |= dense(decoder, path, name, size, lone_bias=OUTPUT_FEATURES)
                else:
                    is_whole = is_replicated(decoder, name, size)
                    table[path + names.factor_a] = Shard(names.in_dim)
                    table[path + names.factor_b] = WHOLE if is_whole else Shard(names.out_dim)
                    table[path + names.bias] = WHOLE if is_whole else OUTPUT_FEATURES
            table |= head_norms(decoder, layer_name, layer)
            table |= crossings(decoder, layer_name, layer)
        return table

    def swap(self, decoder: Decoder, group: str) -> None:
        """Put the parallel twins in place."""
        layout = decoder.layout
        for layer in decoder.layers.values():
            for projections in layout.groups:
                if self.is_grouped or any(
                    isinstance(projection_of(layer, name), Linear) for name in projections.projections
                ):
                    _swap_group(decoder, layer, projections, group)
                else:
                    _swap_ungrouped(decoder, layer, projections, group)
            for lone in layout.lone_projections:
                module = projection_of(layer, lone.projection)
                twin: Module
                if isinstance(module, Linear):
                    twin = RowParallelLinear(module, group, lone.chunk, shard_features=True)
                else:
                    twin = BottleneckParallelLinear(module, group, lone.chunk)
                put(layer, lone.projection, twin)
            swap_crossings(decoder, layer)
            swap_heads(decoder, layer, group)
        embedding, final_norm = decoder.part(layout.embedding), decoder.part(layout.final_norm)
        assert isinstance(embedding, Embedding)
        eps = norm_eps(final_norm, layout.final_norm)
        table: Module
        if decoder.is_tied:
            table = VocabularyParallelEmbedding(embedding, group, shard_features=True)
        else:
            table = FeatureShardedEmbedding(embedding)
        swap_head(decoder, group)
        set_module(decoder.root, layout.embedding, table)
        set_module(decoder.root, layout.final_norm, GatheredNorm(final_norm, eps, group))

    def split_region(self, decoder: Decoder) -> tuple[list[str], list[str]]:
        """Return the embedding and the final norm: everything between them is split."""
        return [decoder.layout.embedding], [decoder.layout.final_norm]

    def hidden_width(self, decoder: Decoder, size: int) -> int:
        """Return ``D/tp``."""
        return decoder.hidden_size // size


def _swap_group(decoder: Decoder, layer: Module, projections: ProjectionGroup, group: str) -> None:
    members: list[GroupMember] = []
    for name in projections.projections:
        module = projection_of(layer, name)
        rows = own_rows(decoder, name, out_features(module), group)
        member = DenseMember(module, rows) if isinstance(module, Linear) else LowRankMember(module, rows)
        member.join(members)
        put(layer, name, member)
    norm = layer.get_submodule(projections.norm)
    eps = norm_eps(norm, projections.norm)
    twin = NormalizedProjections(norm, eps, members, decoder.hidden_size, group, projections.chunk)
    set_module(layer, projections.norm, twin)


def _swap_ungrouped(decoder: Decoder, layer: Module, projections: ProjectionGroup, group: str) -> None:
    norm = layer.get_submodule(projections.norm)
    twin = UngroupedNorm(norm, norm_eps(norm, projections.norm), decoder.hidden_size)
    for name in projections.projections:
        module = projection_of(layer, name)
        rows = own_rows(decoder, name, out_features(module), group)
        put(layer, name, UngroupedProjection(module, rows, twin, group, projections.chunk))
    set_module(layer, projections.norm, twin)
