"""Figures of the BOOST paper (MLSys 2026, project page) that benchmarks print beside their own.

Times are of A100-80GB GPUs in one node, 7B model, sequences of 4096 tokens, bf16, tensor size 4.
"""

from lightning_boost.config import LlamaConfig, LowRankConfig

BOOST_7B = LlamaConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    tie_word_embeddings=True,
    low_rank=LowRankConfig(kind="cola", bottleneck_size=1024),
)
"""The 7B model of the paper's tables."""

ITERATION_SECONDS = {"full_rank": 1.06, "vanilla": 1.64, "bottleneck": 0.72}
"""Of a training iteration of the 7B model, micro-batch 4."""

ITERATION_SECONDS_BY_MICRO_BATCH = {
    1: {"full_rank": 0.36, "vanilla": 0.46, "bottleneck": 0.27},
    2: {"full_rank": 0.60, "vanilla": 0.80, "bottleneck": 0.42},
    4: ITERATION_SECONDS,
}
"""Of the 7B model; at micro-batch 8 only the bottleneck fitted into memory, in 1.32 s."""

ITERATION_SECONDS_BY_KIND = {
    "svd": {"vanilla": 1.57, "bottleneck": 0.70},
    "cola": {"vanilla": 1.64, "bottleneck": 0.72},
    "lax": {"vanilla": 1.72, "bottleneck": 0.75},
}
"""Of the 7B model, micro-batch 4."""

BLOCK_FORWARD_MICROSECONDS = {1: (2773, 2395), 4: (7577, 7266)}
"""Of a 7B block, without and with grouping, by micro-batch."""

ALL_REDUCE_MILLISECONDS = {
    "3B": {"full_rank": 1.57, "vanilla": 7.61, "bottleneck": 1.47},
    "7B": {"full_rank": 2.01, "vanilla": 9.87, "bottleneck": 1.86},
    "13B": {"full_rank": 2.47, "vanilla": 12.09, "bottleneck": 2.27},
}
"""Of a block and pass, micro-batch 4."""

MEMORY_GIB = {
    "vanilla": {"weights": 1.25, "gradients": 1.25, "optimizer": 2.5, "activations": 30.73},
    "bottleneck": {"weights": 1.25, "gradients": 1.25, "optimizer": 2.5, "activations": 22.14},
}
"""Of a GPU, 7B model, micro-batch 4; activations with buffers."""

RECOMPUTE_MIB_PER_MILLISECOND = {
    4: {"vanilla": 113.7, "bottleneck": 193.5},
    8: {"vanilla": 113.6, "bottleneck": 177.0},
}
"""Memory saved over time added, 7B model, by micro-batch."""

VOLUME_RATIO = {"full_rank": 1.0, "vanilla": 5.19, "bottleneck": 0.88}
"""Values that a 7B block hands to collectives in forward, over full rank's."""

FLOPS_RATIO = 2.53
"""FLOPs of a full-rank block over those of a low-rank one, at a bottleneck of a quarter of the hidden size."""

GRADIENT_RATIO = 2.5
"""Gradient bytes that replicas reduce, full rank over low rank."""

INTENSITY_RATIO = {"vanilla over full_rank": 0.2, "bottleneck over vanilla": 2.5}
"""FLOPs per byte of the 7B MLP's GEMMs on one GPU of four, 4,096 tokens."""


def over_bottleneck(seconds: dict[str, float]) -> dict[tuple[str, str], float]:
    """Return times as multiples of the bottleneck's, by the pair of names."""
    return {
        (name, "bottleneck"): value / seconds["bottleneck"] for name, value in seconds.items() if name != "bottleneck"
    }
