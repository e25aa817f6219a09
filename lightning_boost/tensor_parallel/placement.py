"""What schemes share of where parameters are split, and of what is checked before."""

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.nn import Linear, Module

from lightning_boost.layout import Decoder, projection_of
from lightning_boost.model.factor_pair import JOINED, factor_names, out_features
from lightning_boost.tensor_parallel.check import (
    check_ends,
    check_head_norm,
    check_projection,
    check_whole_model,
    norm_eps,
)

INPUT_FEATURES = Shard(1)
"""Row-parallel: a weight ``[out, in]`` is split over input features."""

OUTPUT_FEATURES = Shard(0)
"""Column-parallel: a weight ``[out, in]`` is split over output features."""

WHOLE = Replicate()
"""The same on every process."""

Placements = dict[str, Placement]


def check_parts(decoder: Decoder, placed: Placements) -> None:
    """Check that every part can be swapped.

    Args:
        decoder: The model.
        placed: What a scheme places on two processes.

    Raises:
        ValueError: If a part is not what its twin computes; it is named.
    """
    layout = decoder.layout
    for layer_name, layer in decoder.layers.items():
        for group in layout.groups:
            norm_eps(layer.get_submodule(group.norm), f"{layer_name}.{group.norm}")
        for name in layout.projections():
            check_projection(projection_of(layer, name), f"{layer_name}.{name}")
        for name, norm in present_head_norms(decoder, layer).items():
            check_head_norm(norm, f"{layer_name}.{name}", _head_size(decoder, layer))
    norm_eps(decoder.part(layout.final_norm), layout.final_norm)
    check_ends(decoder)
    check_whole_model(decoder, set(placed))


def check_kind(decoder: Decoder, scheme: str, *, needs_pairs: bool) -> None:
    """Check that projections are all factor pairs, or all dense.

    Raises:
        ValueError: If one is the other.
    """
    for layer_name, layer in decoder.layers.items():
        for name in decoder.layout.projections():
            module = projection_of(layer, name)
            if isinstance(module, Linear) if needs_pairs else factor_names(module) is not None:
                found, wanted = ("dense", "a pair of factors") if needs_pairs else ("a pair of factors", "dense")
                raise ValueError(
                    f"{layer_name}.{name} is {found} and must be {wanted} with scheme {scheme!r}, as all projections"
                    " must; leave scheme at 'auto', which takes what a model has."
                )


def ends(decoder: Decoder, *, norm: Placement) -> Placements:
    """Return the placements outside the layers; a weight that embedding and head share is split as the head's."""
    layout = decoder.layout
    return {
        f"{layout.embedding}.weight": OUTPUT_FEATURES if decoder.is_tied else INPUT_FEATURES,
        f"{layout.final_norm}.weight": norm,
        f"{layout.head}.weight": OUTPUT_FEATURES,
    }


def dense(decoder: Decoder, path: str, name: str, size: int, *, lone_bias: Placement) -> Placements:
    """Return the placements of a dense projection: row-parallel where no norm is in front, else column-parallel."""
    if name in [lone.projection for lone in decoder.layout.lone_projections]:
        return {f"{path}weight": INPUT_FEATURES, f"{path}bias": lone_bias}
    placement = WHOLE if is_replicated(decoder, name, size) else OUTPUT_FEATURES
    return {f"{path}weight": placement, f"{path}bias": placement}


def present_head_norms(decoder: Decoder, layer: Module) -> dict[str, Module]:
    """Return the norms of heads that a layer has, by name."""
    inside = dict(layer.named_modules())
    return {name: inside[name] for name in decoder.layout.head_norms if name in inside}


def head_norms(decoder: Decoder, layer_name: str, layer: Module) -> Placements:
    """Return the placements of a layer's norms of heads."""
    return {f"{layer_name}.{name}.weight": WHOLE for name in present_head_norms(decoder, layer)}


def crossings(decoder: Decoder, layer_name: str, layer: Module) -> Placements:
    """Return the placements of what latents go through on their way into a layer: whole, as latents are."""
    found = decoder.crossings(layer).items()
    return {f"{layer_name}.{name}.{leaf}": WHOLE for name, module in found for leaf, _ in module.named_parameters()}


def _head_size(decoder: Decoder, layer: Module) -> int:
    return out_features(projection_of(layer, decoder.layout.groups[0].projections[0])) // decoder.attention_heads[0]


def split_projections(decoder: Decoder) -> tuple[list[str], list[str]]:
    """Return the projections into heads and the MLP's features, and those out of them, by name in the decoder.

    Of two modules that are one projection it is the second.
    """
    layout = decoder.layout
    lone = [projection.projection for projection in layout.lone_projections]
    into = [name for name in layout.projections() if name not in lone]
    begins, ends_ = (
        [f"{layer}.{name.rpartition(JOINED)[2]}" for layer in decoder.layers for name in names]
        for names in (into, lone)
    )
    return begins, ends_


def is_replicated(decoder: Decoder, name: str, size: int) -> bool:
    """Tell whether a projection has fewer heads than there are processes, which then all keep it whole."""
    _, key_value_heads = decoder.attention_heads
    return name in decoder.layout.key_value_projections and key_value_heads < size
