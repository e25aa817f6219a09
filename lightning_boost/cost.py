"""What a model costs by formula: parameters, what its tensor axis moves, and what recompute keeps and moves again."""

from collections import Counter
from dataclasses import dataclass

from lightning_boost.config import LlamaConfig

CHUNKS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Projections of each chunk."""


def count_parameters(config: LlamaConfig, *, full_rank: bool = False) -> int:
    """Return the parameters of the model, or of the one with dense matrices in the places of its factor pairs."""
    total = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2) + config.hidden_size
    for layer in range(config.num_hidden_layers):
        total += 2 * config.hidden_size
        for projection, (fan_in, fan_out) in config.projection_shapes().items():
            size = None if full_rank else config.bottleneck_size_of(layer, projection)
            total += fan_in * fan_out if size is None else size * (fan_in + fan_out)
            is_attention = projection in ("q_proj", "k_proj", "v_proj", "o_proj")
            total += fan_out if (config.attention_bias if is_attention else config.mlp_bias) else 0
    return total


def layer_traffic(
    config: LlamaConfig, layer: int, *, tensor_parallel_size: int, statistic_columns: int
) -> Counter[tuple[str, str, str]]:
    """Return the values per token that one process hands to the tensor axis's collectives in a decoder layer.

    Keys are (operation, chunk, pass), as in a ``CollectiveLog``. Left out is what does not grow with tokens: the row of
    γ in a gather, the gradients of replicated key/value projections.

    Args:
        config: The model; scheme ``bottleneck`` unless its kind is ``full_rank``.
        layer: Index of the layer.
        tensor_parallel_size: Above 1.
        statistic_columns: Columns that the sum of squares takes beside what it travels with.
    """
    hidden, share = config.hidden_size, config.hidden_size // tensor_parallel_size
    traffic: Counter[tuple[str, str, str]] = Counter()
    for chunk, projections in CHUNKS.items():
        sizes = [config.bottleneck_size_of(layer, projection) for projection in projections]
        width, has_norm = sum(size for size in sizes if size is not None), len(projections) > 1
        if config.low_rank.kind == "full_rank":
            traffic["all_reduce", chunk, "backward" if has_norm else "forward"] += hidden
            continue
        if width:
            traffic["all_reduce", chunk, "forward"] += width + has_norm * statistic_columns
            traffic["all_reduce", chunk, "backward"] += width
        if None in sizes and has_norm:
            traffic["all_gather", chunk, "forward"] += share
            traffic["reduce_scatter", chunk, "backward"] += hidden + tensor_parallel_size * statistic_columns
        elif None in sizes:
            traffic["reduce_scatter", chunk, "forward"] += hidden
            traffic["all_gather", chunk, "backward"] += share
    return traffic


def second_run_traffic(
    config: LlamaConfig,
    layer: int,
    *,
    recompute: str,
    store_latents: str,
    tensor_parallel_size: int,
    statistic_columns: int,
) -> dict[tuple[str, str, str], float]:
    """Return the values per token that a decoder layer's second run hands to the tensor axis's collectives.

    Keys, and what is left out, are as in ``layer_traffic``, to which this is to be added.

    Args:
        config: The model.
        layer: Index of the layer, one that is recomputed.
        recompute: ``none``, ``low_rank`` or ``block``.
        store_latents: ``whole`` or ``sharded``.
        tensor_parallel_size: Above 1.
        statistic_columns: As in ``layer_traffic``.
    """
    traffic = layer_traffic(
        config, layer, tensor_parallel_size=tensor_parallel_size, statistic_columns=statistic_columns
    )
    again = {key: float(values) for key, values in traffic.items() if key[2] == "forward"}
    if recompute != "block":
        shared_out = _replicated_widths(config, layer) if (recompute, store_latents) == ("low_rank", "sharded") else {}
        again = {
            ("all_gather", chunk, "backward"): width / tensor_parallel_size
            for chunk, width in shared_out.items()
            if width
        }
    is_last_scattered = config.low_rank.kind != "full_rank" and config.bottleneck_size_of(layer, "down_proj") is None
    if is_last_scattered and not config.hidden_dropout:
        # only added to the residual, which nothing in the layer reads: the second run ends before it
        again = {key: values for key, values in again.items() if key[1] != "down"}
    return again


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
    values = config.hidden_size if is_dense_model else share
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


def _replicated_widths(config: LlamaConfig, layer: int) -> dict[str, int]:
    """Return of each chunk how many values of a token its collectives give to all processes alike in forward."""
    widths = {}
    for chunk, projections in CHUNKS.items():
        sizes = [config.bottleneck_size_of(layer, projection) for projection in projections]
        has_norm = len(projections) > 1
        is_whole = None in sizes and has_norm != (config.low_rank.kind == "full_rank")
        widths[chunk] = sum(filter(None, sizes)) + config.hidden_size * is_whole
    return widths
