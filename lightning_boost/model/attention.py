"""Causal self-attention with low-rank projections."""

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from lightning_boost.config import LlamaConfig
from lightning_boost.model.low_rank import LowRankLinear
from lightning_boost.model.rotary import rotate


class Attention(nn.Module):
    """Grouped-query causal attention; head ``h`` reads key/value head ``h // (H / K)``.

    The number of heads is read from the projections' width, so the module runs unchanged on a share of the heads.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        kv_features = config.key_value_heads * config.head_size

        def projection(in_features: int, out_features: int) -> LowRankLinear:
            return LowRankLinear(
                in_features,
                out_features,
                config.bottleneck_size,
                activation=config.low_rank.latent_activation,
                bias=config.attention_bias,
            )

        self.q_proj = projection(config.hidden_size, config.hidden_size)
        self.k_proj = projection(config.hidden_size, kv_features)
        self.v_proj = projection(config.hidden_size, kv_features)
        self.o_proj = projection(config.hidden_size, config.hidden_size)

    @override
    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Attend within ``hidden`` of shape ``[B, T, D]``; ``rotary`` holds cosines and sines ``[T, E]``."""
        query = rotate(self._split_heads(self.q_proj(hidden)), *rotary)
        key = rotate(self._split_heads(self.k_proj(hidden)), *rotary)
        value = self._split_heads(self.v_proj(hidden))
        grouped = query.shape[1] != key.shape[1]
        attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output

    def _split_heads(self, features: Tensor) -> Tensor:
        """Turn ``[B, T, H·E]`` into ``[B, H, T, E]``."""
        heads: Tensor = features.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        return heads
