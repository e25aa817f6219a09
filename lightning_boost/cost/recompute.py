"""What recompute keeps of a layer, by formula."""

from dataclasses import dataclass

from lightning_boost.config import LlamaConfig
from lightning_boost.cost.traffic import CHUNKS


@dataclass(frozen=True)
class KeptValues:
    """What one process keeps of a recomputed layer for each token, from forward to backward."""

    values: float
    """In the dtype of the activations."""

    scales: float
    """In fp32: those of the norms, and attention's for each head where its output is kept."""


def kept_values(
    config: LlamaConfig,
    layer: int,
    *,
    recompute: str,
    store_latents: str = "whole",
    keep_attention: bool = False,
    tensor_parallel_size: int = 1,
) -> KeptValues:
    """Return what a decoder layer's recompute keeps: its input, and for ``low_rank`` what the collectives gave.

    Latents that cross are part of the input, and whole.

    Args:
        config: The model.
        layer: Index of the layer, one that is recomputed.
        recompute: ``low_rank`` or ``block``.
        store_latents: ``whole`` or ``sharded``.
        keep_attention: Whether attention's output is kept; it has no dropout then.
        tensor_parallel_size: Processes that share the layer.
    """
    size, share = tensor_parallel_size, config.hidden_size / tensor_parallel_size
    is_dense_model, is_split = config.low_rank.kind == "full_rank", size > 1
    values = (config.hidden_size if is_dense_model else share) + _received_latents(config, layer, is_split=is_split)
    if recompute == "block":
        return KeptValues(values, 0)
    scales = 0.0
    for chunk, projections in CHUNKS.items():
        sizes = [config.bottleneck_size_of(layer, projection) for projection in projections]
        if not is_split:
            values += sum(filter(None, sizes))
            continue
        values += _replicated_widths(config, layer)[chunk] / (size if store_latents == "sharded" else 1)
        if is_dense_model:
            continue
        if len(projections) > 1:
            scales += any(sizes) + (None in sizes)
        elif None in sizes:
            values += share
    if keep_attention:
        heads = config.num_attention_heads / size
        values, scales = values + heads * config.head_size, scales + heads
    return KeptValues(values, scales)


def _received_latents(config: LlamaConfig, layer: int, *, is_split: bool) -> int:
    """Return how many values of a token the layer before gives on; split, those of a chunk are one tensor."""
    total, crossing = 0, config.crossing_sizes(layer)
    for projections in CHUNKS.values():
        before = [config.bottleneck_size_of(layer - 1, name) for name in projections if is_split or name in crossing]
        total += sum(filter(None, before)) if crossing.keys() & set(projections) else 0
    return total


def _replicated_widths(config: LlamaConfig, layer: int) -> dict[str, int]:
    """Return of each chunk how many values of a token its collectives give to all processes alike in forward."""
    widths = {}
    for chunk, projections in CHUNKS.items():
        sizes = [config.bottleneck_size_of(layer, projection) for projection in projections]
        has_norm = len(projections) > 1
        is_whole = None in sizes and has_norm != (config.low_rank.kind == "full_rank")
        widths[chunk] = sum(filter(None, sizes)) + config.hidden_size * is_whole
    return widths
