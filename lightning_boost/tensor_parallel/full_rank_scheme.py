"""The table of scheme ``full_rank``."""

from torch.nn import Module

from lightning_boost.layout import Decoder, ProjectionGroup
from lightning_boost.model.initialization import set_module
from lightning_boost.tensor_parallel.check import norm_eps
from lightning_boost.tensor_parallel.dense import RowParallelLinear
from lightning_boost.tensor_parallel.full_rank import ColumnParallelMember, ColumnParallelNorm
from lightning_boost.tensor_parallel.handing_out import GroupMember
from lightning_boost.tensor_parallel.placement import (
    WHOLE,
    Placements,
    check_kind,
    check_parts,
    dense,
    ends,
    head_norms,
    split_projections,
)
from lightning_boost.tensor_parallel.swap import (
    linear_at,
    own_rows,
    swap_heads,
    swap_whole_ends,
)


class FullRankScheme:
    """Megatron's form: the hidden stream is whole on every process, all-reduces are as wide as it."""

    def check(self, decoder: Decoder) -> None:
        """Check that projections are dense and norms RMSNorms."""
        check_kind(decoder, "full_rank", needs_pairs=False)
        check_parts(decoder, self.placements(decoder, 2))

    def placements(self, decoder: Decoder, size: int) -> Placements:
        """Return how each parameter is split."""
        table = ends(decoder, norm=WHOLE)
        for layer_name, layer in decoder.layers.items():
            for group in decoder.layout.groups:
                table[f"{layer_name}.{group.norm}.weight"] = WHOLE
            for name in decoder.layout.projections():
                table |= dense(decoder, f"{layer_name}.{name}.", name, size, lone_bias=WHOLE)
            table |= head_norms(decoder, layer_name, layer)
        return table

    def swap(self, decoder: Decoder, group: str) -> None:
        """Put the parallel twins in place."""
        layout = decoder.layout
        for layer in decoder.layers.values():
            for projections in layout.groups:
                _swap_group(decoder, layer, projections, group)
            for lone in layout.lone_projections:
                module = linear_at(layer, lone.projection)
                twin = RowParallelLinear(module, group, lone.chunk, shard_features=False)
                set_module(layer, lone.projection, twin)
            swap_heads(decoder, layer, group)
        swap_whole_ends(decoder, group)

    def split_region(self, decoder: Decoder) -> tuple[list[str], list[str]]:
        """Return the projections into heads and the MLP's features, and those out of them."""
        return split_projections(decoder)

    def hidden_width(self, decoder: Decoder, size: int) -> int:
        """Return ``D``."""
        return decoder.hidden_size


def _swap_group(decoder: Decoder, layer: Module, projections: ProjectionGroup, group: str) -> None:
    members: list[GroupMember] = []
    for name in projections.projections:
        module = linear_at(layer, name)
        rows = own_rows(decoder, name, module.out_features, group)
        member = ColumnParallelMember(module, rows, group, projections.chunk)
        member.join(members)
        set_module(layer, name, member)
    norm = layer.get_submodule(projections.norm)
    eps = norm_eps(norm, projections.norm)
    set_module(layer, projections.norm, ColumnParallelNorm(norm, eps, members, group, projections.chunk))
