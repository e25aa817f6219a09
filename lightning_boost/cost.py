"""What a model costs by formula: parameters, and what its tensor axis moves."""

from lightning_boost.config import LlamaConfig

BlockTraffic = dict[tuple[str, str], int]
"""Values that one process hands to the all-reduce of a chunk in a pass, per token and block: (chunk, pass) → values."""


def count_parameters(config: LlamaConfig, *, full_rank: bool = False) -> int:
    """Return the parameters of the model, or of the one with dense matrices in the places of its factor pairs."""
    hidden, features = config.hidden_size, config.intermediate_size
    key_value = config.key_value_heads * config.head_size
    attention = [(hidden, hidden), (hidden, key_value), (hidden, key_value), (hidden, hidden)]
    mlp = [(hidden, features), (hidden, features), (features, hidden)]

    def weights(fan_in: int, fan_out: int) -> int:
        return fan_in * fan_out if full_rank else config.bottleneck_size * (fan_in + fan_out)

    block = sum(weights(*shape) for shape in attention + mlp) + 2 * hidden
    block += sum(fan_out for _, fan_out in attention) if config.attention_bias else 0
    block += sum(fan_out for _, fan_out in mlp) if config.mlp_bias else 0
    return config.num_hidden_layers * block + 2 * config.vocab_size * hidden + hidden


def block_traffic(bottleneck_size: int, statistic_columns: int) -> BlockTraffic:
    """Return what scheme ``bottleneck`` moves: one all-reduce for each chunk and pass.

    Forward ``7R`` and the statistic's columns of the two norms, backward ``7R``.

    Args:
        bottleneck_size: ``R``.
        statistic_columns: Columns that the sum of squares takes beside a norm's latents.
    """
    widths = {"qkv": 3, "o": 1, "gate_up": 2, "down": 1}
    traffic = {(chunk, "backward"): width * bottleneck_size for chunk, width in widths.items()}
    for chunk, width in widths.items():
        has_norm = width > 1
        traffic[chunk, "forward"] = width * bottleneck_size + has_norm * statistic_columns
    return traffic
