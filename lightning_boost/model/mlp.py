"""The gated MLP with low-rank projections."""

from torch import Tensor, nn
from typing_extensions import override

from lightning_boost.config import LlamaConfig
from lightning_boost.kernels.functions import gated_activation
from lightning_boost.model.crossing import LayerLatents, call
from lightning_boost.model.low_rank import make_projection


class MLP(nn.Module):
    """Compute ``down(φ(gate(x)) · up(x))``, with φ SiLU where the configuration keeps it and nothing where not."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.has_outer_activation = config.low_rank.has_outer_activation
        self.gate_proj = make_projection(config, layer, "gate_proj")
        self.up_proj = make_projection(config, layer, "up_proj")
        self.down_proj = make_projection(config, layer, "down_proj")

    @override
    def forward(self, hidden: Tensor, latents: LayerLatents | None = None) -> Tensor:
        """Map ``[B, T, D]`` to ``[B, T, D]``; ``latents`` of this layer, where latents cross."""
        gate, up = call(self.gate_proj, hidden, latents), call(self.up_proj, hidden, latents)
        product = gated_activation(gate, up, "silu" if self.has_outer_activation else "none")
        return call(self.down_proj, product, latents)
