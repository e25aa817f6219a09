"""The gated MLP with low-rank projections."""

from torch import Tensor, nn
from torch.nn.functional import silu
from typing_extensions import override

from lightning_boost.config import LlamaConfig
from lightning_boost.model.low_rank import LowRankLinear


class MLP(nn.Module):
    """Compute ``down(φ(gate(x)) · up(x))``, with φ SiLU where the configuration keeps it and nothing where not."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.has_outer_activation = config.low_rank.has_outer_activation

        def projection(in_features: int, out_features: int) -> LowRankLinear:
            return LowRankLinear(
                in_features,
                out_features,
                config.bottleneck_size,
                activation=config.low_rank.latent_activation,
                bias=config.mlp_bias,
            )

        self.gate_proj = projection(config.hidden_size, config.intermediate_size)
        self.up_proj = projection(config.hidden_size, config.intermediate_size)
        self.down_proj = projection(config.intermediate_size, config.hidden_size)

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[B, T, D]`` to ``[B, T, D]``."""
        gate = self.gate_proj(hidden)
        if self.has_outer_activation:
            gate = silu(gate)
        output: Tensor = self.down_proj(gate * self.up_proj(hidden))
        return output
