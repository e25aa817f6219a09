"""How many floating-point operations a model takes for each token of a sequence of ``T``.

A product of ``[N, in]`` and ``[in, out]`` is ``2 N in out`` operations; what is no matrix product counts nothing, and
looking a token up in the embedding is none. Attention is causal, so half of its ``T × T`` scores count. Backward takes
twice forward: each product has the gradients of both its factors.
"""

from collections.abc import Iterable

from lightning_boost.config import LlamaConfig
from lightning_boost.divisors import balanced_divisors

_LAST = "down_proj"
"""The projection that a layer ends with."""


def forward_flops(config: LlamaConfig, sequence_length: int) -> int:
    """Return the operations of the whole model for one token, forward."""
    head = 2 * config.hidden_size * config.vocab_size
    return head + sum(_layer_flops(config, layer, sequence_length) for layer in range(config.num_hidden_layers))


def training_flops(config: LlamaConfig, sequence_length: int) -> int:
    """Return the operations of the whole model for one token, forward and backward, nothing computed twice.

    All parameters count as trained.
    """
    return 3 * forward_flops(config, sequence_length)


def recompute_flops(
    config: LlamaConfig, sequence_length: int, *, kind: str, layers: Iterable[int], keep_attention: bool = False
) -> int:
    """Return the operations for one token that backward runs a second time.

    The last product of a layer is not among them: backward does not ask for what it gives. Latents that are kept are
    those in front of what crosses, so gates run again.

    Args:
        config: The model.
        sequence_length: ``T``.
        kind: ``"none"``, ``"block"``: all of a layer again, or ``"low_rank"``: all but the factors into bottlenecks,
            whose latents are kept.
        layers: Indices of those that are run again.
        keep_attention: Whether attention's output is kept too.
    """
    if kind == "none":
        return 0
    total = 0
    for layer in layers:
        total += 0 if keep_attention else _attention_flops(config, sequence_length)
        total += _crossing_flops(config, layer)
        for projection in config.projection_shapes():
            into, out_of = _projection_flops(config, layer, projection)
            total += (into if kind == "block" else 0) + (out_of if projection != _LAST else 0)
    return total


def _layer_flops(config: LlamaConfig, layer: int, sequence_length: int) -> int:
    projections = (sum(_projection_flops(config, layer, projection)) for projection in config.projection_shapes())
    return sum(projections) + _attention_flops(config, sequence_length) + _crossing_flops(config, layer)


def _projection_flops(config: LlamaConfig, layer: int, projection: str) -> tuple[int, int]:
    """Return the operations into a projection's bottleneck and out of it; a dense one has no first part."""
    fan_in, fan_out = config.projection_shapes()[projection]
    size = config.bottleneck_size_of(layer, projection)
    return (0, 2 * fan_in * fan_out) if size is None else (2 * fan_in * size, 2 * size * fan_out)


def _crossing_flops(config: LlamaConfig, layer: int) -> int:
    """Return the operations of the gates that latents of the layer before go through."""
    gate, sizes = config.low_rank.crossing_gate, config.crossing_sizes(layer).values()
    if gate == "linear":
        return sum(2 * before * here for before, here in sizes)
    return sum(2 * here * sum(balanced_divisors(here)) for _, here in sizes) if gate == "tensor" else 0


def _attention_flops(config: LlamaConfig, sequence_length: int) -> int:
    """Return the operations of scores and of their product with the values, over half of the tokens."""
    return 2 * config.num_attention_heads * config.head_size * sequence_length
