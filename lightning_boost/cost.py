"""What a model costs by formula: parameters, and what its tensor axis moves."""

from collections import Counter

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
