"""Schemes: tables that tell which layer of a decoder becomes which, and which dim of each parameter is split."""

from typing import Literal, Protocol

from lightning_boost.layout import Decoder, projection_of
from lightning_boost.model.factor_pair import factor_names
from lightning_boost.tensor_parallel.bottleneck_scheme import BottleneckScheme
from lightning_boost.tensor_parallel.full_rank_scheme import FullRankScheme
from lightning_boost.tensor_parallel.placement import Placements
from lightning_boost.tensor_parallel.vanilla_scheme import VanillaScheme

SchemeName = Literal["auto", "bottleneck", "bottleneck_ungrouped", "vanilla", "vanilla_sharded", "full_rank"]


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


SCHEMES: dict[str, Scheme] = {
    "bottleneck": BottleneckScheme(),
    "bottleneck_ungrouped": BottleneckScheme(is_grouped=False),
    "vanilla": VanillaScheme(),
    "vanilla_sharded": VanillaScheme(is_sharded=True),
    "full_rank": FullRankScheme(),
}
"""By their names as options. All but ``bottleneck`` and ``full_rank`` are there to be compared with."""


def scheme_for(decoder: Decoder, name: SchemeName = "auto") -> Scheme:
    """Return a scheme by name; ``"auto"``: ``bottleneck`` if any projection is a factor pair, else ``full_rank``."""
    if name != "auto":
        return SCHEMES[name]
    modules = [projection_of(layer, name) for layer in decoder.layers.values() for name in decoder.layout.projections()]
    return SCHEMES["bottleneck" if any(map(factor_names, modules)) else "full_rank"]
