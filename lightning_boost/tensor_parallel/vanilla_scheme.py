"""The tables of scheme ``vanilla`` and of its form with sharded heads."""

from dataclasses import dataclass

from torch.distributed.tensor import Placement, Shard
from torch.nn import Module

from lightning_boost.layout import Decoder, ProjectionGroup, parameters_of, projection_of
from lightning_boost.model.factor_pair import factor_names, out_features
from lightning_boost.model.initialization import set_module
from lightning_boost.tensor_parallel.bottleneck import LowRankMember
from lightning_boost.tensor_parallel.check import norm_eps
from lightning_boost.tensor_parallel.handing_out import GroupMember
from lightning_boost.tensor_parallel.placement import (
    OUTPUT_FEATURES,
    WHOLE,
    Placements,
    check_kind,
    check_parts,
    crossings,
    ends,
    head_norms,
    is_replicated,
    split_projections,
)
from lightning_boost.tensor_parallel.swap import (
    own_rows,
    put,
    swap_crossings,
    swap_head_norms,
    swap_heads,
    swap_whole_ends,
)
from lightning_boost.tensor_parallel.vanilla import VanillaLinear, VanillaMember, VanillaNorm
from lightning_boost.tensor_parallel.vanilla_sharded import ShardedVanillaLinear, ShardedVanillaNorm


@dataclass(frozen=True)
class VanillaScheme:
    """Factors are split over the bottleneck; every pair's output is summed at full width."""

    is_sharded: bool = False
    """Whether each process computes its own heads and MLP features only, instead of all of them."""

    @property
    def name(self) -> str:
        """As an option."""
        return "vanilla_sharded" if self.is_sharded else "vanilla"

    def check(self, decoder: Decoder) -> None:
        """Check that projections are factor pairs and norms RMSNorms."""
        check_kind(decoder, self.name, needs_pairs=True)
        check_parts(decoder, self.placements(decoder, 2))

    def placements(self, decoder: Decoder, size: int) -> Placements:
        """Return how each parameter is split."""
        table = ends(decoder, norm=WHOLE)
        for layer_name, layer in decoder.layers.items():
            for group in decoder.layout.groups:
                table[f"{layer_name}.{group.norm}.weight"] = WHOLE
            for name in decoder.layout.projections():
                module = projection_of(layer, name)
                path = f"{layer_name}.{parameters_of(name, module)}"
                names = factor_names(module)
                if names is not None:
                    table[path + names.factor_a] = Shard(1 - names.in_dim)
                    table[path + names.factor_b] = Shard(1 - names.out_dim)
                    table[path + names.bias] = self._bias(decoder, name, size)
            table |= head_norms(decoder, layer_name, layer)
            table |= crossings(decoder, layer_name, layer)
        return table

    def _bias(self, decoder: Decoder, name: str, size: int) -> Placement:
        is_lone = name in [lone.projection for lone in decoder.layout.lone_projections]
        is_split = self.is_sharded and not is_lone and not is_replicated(decoder, name, size)
        return OUTPUT_FEATURES if is_split else WHOLE

    def swap(self, decoder: Decoder, group: str) -> None:
        """Put the parallel twins in place."""
        for layer in decoder.layers.values():
            for projections in decoder.layout.groups:
                self._swap_group(decoder, layer, projections, group)
            for lone in decoder.layout.lone_projections:
                twin = ShardedVanillaLinear if self.is_sharded else VanillaLinear
                put(layer, lone.projection, twin(projection_of(layer, lone.projection), group, lone.chunk))
            swap_crossings(decoder, layer)
            if self.is_sharded:
                swap_heads(decoder, layer, group)
            else:
                swap_head_norms(decoder, layer, group, is_sharded=False)
        swap_whole_ends(decoder, group)

    def _swap_group(self, decoder: Decoder, layer: Module, projections: ProjectionGroup, group: str) -> None:
        members: list[GroupMember] = []
        for name in projections.projections:
            module = projection_of(layer, name)
            member: GroupMember
            if self.is_sharded:
                member = LowRankMember(module, own_rows(decoder, name, out_features(module), group))
            else:
                member = VanillaMember(module, group, projections.chunk)
            member.join(members)
            put(layer, name, member)
        norm = layer.get_submodule(projections.norm)
        eps = norm_eps(norm, projections.norm)
        twin = ShardedVanillaNorm if self.is_sharded else VanillaNorm
        set_module(layer, projections.norm, twin(norm, eps, members, group, projections.chunk))

    def split_region(self, decoder: Decoder) -> tuple[list[str], list[str]]:
        """Return the modules between which each process has its own heads and features; none where all have all."""
        return split_projections(decoder) if self.is_sharded else ([], [])

    def hidden_width(self, decoder: Decoder, size: int) -> int:
        """Return ``D``."""
        return decoder.hidden_size
