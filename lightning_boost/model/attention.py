"""Causal self-attention, its projections low-rank or dense."""

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from lightning_boost.config import LlamaConfig
from lightning_boost.kernels.functions import rotate
from lightning_boost.model.cache import LayerCache
from lightning_boost.model.crossing import LayerLatents, call
from lightning_boost.model.low_rank import make_projection


class Attention(nn.Module):
    """Grouped-query causal attention; head ``h`` reads key/value head ``h // (H / K)``.

    The number of heads is read from the projections' width, so the module runs unchanged on a share of the heads.
    """

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.dropout = config.attention_dropout
        self.q_proj = make_projection(config, layer, "q_proj")
        self.k_proj = make_projection(config, layer, "k_proj")
        self.v_proj = make_projection(config, layer, "v_proj")
        self.o_proj = make_projection(config, layer, "o_proj")

    @override
    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
        latents: LayerLatents | None = None,
    ) -> Tensor:
        """Attend within ``hidden``, and to what a cache holds.

        Args:
            hidden: ``[B, T, D]``.
            rotary: Cosines and sines, ``[T, E]`` or ``[B, 1, T, E]``.
            mask: Which tokens each one sees, ``[B, 1, T, T]``, with a cache ``[T, seen + T]``; ``None``: itself and all
                before it.
            cache: Of this layer, which is extended.
            latents: Of this layer, where latents cross.
        """
        query = rotate(self._split_heads(call(self.q_proj, hidden, latents)), *rotary)
        key = rotate(self._split_heads(call(self.k_proj, hidden, latents)), *rotary)
        value = self._split_heads(call(self.v_proj, hidden, latents))
        if cache is not None:
            key, value = cache.extend(key, value)
        grouped = query.shape[1] != key.shape[1]
        dropout = self.dropout if self.training else 0.0
        # a last token sees all there are
        is_causal = mask is None and (cache is None or query.shape[2] == key.shape[2])
        attended = scaled_dot_product_attention(
            query, key, value, mask, dropout_p=dropout, is_causal=is_causal, enable_gqa=grouped
        )
        return call(self.o_proj, attended.transpose(1, 2).flatten(2), latents)

    def _split_heads(self, features: Tensor) -> Tensor:
        """Turn ``[B, T, H·E]`` into ``[B, H, T, E]``."""
        heads: Tensor = features.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        return heads
