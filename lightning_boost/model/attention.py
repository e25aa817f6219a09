"""Causal self-attention with low-rank projections."""

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from lightning_boost.config import LlamaConfig
from lightning_boost.model.low_rank import make_projection
from lightning_boost.model.rotary import rotate


class Attention(nn.Module):
    """Grouped-query causal attention; head ``h`` reads key/value head ``h // (H / K)``.

    The number of heads is read from the projections' width, so the module runs unchanged on a share of the heads.
    """

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.q_proj = make_projection(config, layer, "q_proj")
        self.k_proj = make_projection(config, layer, "k_proj")
        self.v_proj = make_projection(config, layer, "v_proj")
        self.o_proj = make_projection(config, layer, "o_proj")

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
