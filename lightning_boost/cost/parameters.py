"""How many parameters a model has."""

from lightning_boost.config import GateKind, LlamaConfig
from lightning_boost.divisors import balanced_divisors


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
        for before, here in ({} if full_rank else config.crossing_sizes(layer)).values():
            # the norm over a latent has a weight and a bias
            total += gate_parameters(before, here, config.low_rank.crossing_gate) + 2 * here
    return total


def gate_parameters(before: int, here: int, gate: GateKind) -> int:
    """Return how many parameters a gate between latents of two widths has."""
    if gate == "linear":
        return here * (before + 1)
    return sum(size**2 for size in balanced_divisors(here)) if gate == "tensor" else 0
