"""A linear layer factorised at a narrow bottleneck."""

from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_boost.config import LlamaConfig
from lightning_boost.model.crossing import LayerLatents

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
}
"""What may stand between the factors. All are element-wise, so a group of pairs can share one call."""


class LowRankLinear(nn.Module):
    """Compute ``y = B σ(A x) + bias`` with a bottleneck of ``R`` features between the factors.

    ``factor_a.weight`` is ``[R, in]``, ``factor_b.weight`` is ``[out, R]``. The bias belongs to ``factor_b``, as in
    CoLA: nothing is added at the bottleneck.

    Args:
        in_features: Features of ``x``.
        out_features: Features of ``y``.
        bottleneck_size: Width ``R`` between the factors, at least 1 and at most ``min(in, out)``.
        activation: Name of σ, one of ``silu``, ``gelu``, ``relu``, ``tanh``; ``None`` for none.
        bias: Whether ``y`` has a bias.

    Raises:
        ValueError: If the bottleneck size is outside its range or the activation is unknown.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bottleneck_size: int,
        *,
        activation: str | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        widest = min(in_features, out_features)
        if not isinstance(bottleneck_size, int) or not 1 <= bottleneck_size <= widest:
            raise ValueError(
                f"bottleneck_size ({bottleneck_size!r}) must be a whole number from 1 to {widest},"
                f" the smaller of in_features ({in_features}) and out_features ({out_features})."
            )
        if activation is not None and activation not in ACTIVATIONS:
            raise ValueError(f"activation ({activation!r}) must be None or one of {', '.join(ACTIVATIONS)}.")
        self.in_features = in_features
        self.out_features = out_features
        self.bottleneck_size = bottleneck_size
        self.factor_a = nn.Linear(in_features, bottleneck_size, bias=False)
        self.activation = nn.Identity() if activation is None else ACTIVATIONS[activation]()
        self.factor_b = nn.Linear(bottleneck_size, out_features, bias=bias)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map ``[…, in]`` to ``[…, out]``."""
        output: Tensor = self.factor_b(self.activation(self.factor_a(x)))
        return output


class CrossingLinear(LowRankLinear):
    """A low-rank linear whose latent crosses: it receives the layer before's, and is given on to the next layer.

    Args:
        name: By which latents of neighbouring layers find one another.
        receives: Whether this one's does receive one, and is normalised then.
        others: As for ``LowRankLinear``.
    """

    takes_latents = True

    def __init__(self, name: str, *others: Any, receives: bool, **options: Any) -> None:
        super().__init__(*others, **options)
        self.name = name
        self.receives = receives

    @override
    def forward(self, x: Tensor, latents: LayerLatents | None = None) -> Tensor:
        """Map ``[…, in]`` to ``[…, out]``; without ``latents`` nothing crosses."""
        if latents is None:
            return super().forward(x)
        z = self.activation(latents.receive(self.name, self.factor_a(x)))
        latents.give(self.name, z)
        output: Tensor = self.factor_b(z)
        return output


def make_projection(config: LlamaConfig, layer: int, name: str) -> LowRankLinear | nn.Linear:
    """Return a layer's projection as the configuration has it: a factor pair or a dense linear.

    Args:
        config: The model's.
        layer: Index of the decoder layer.
        name: ``q_proj``, …, ``down_proj``.
    """
    in_features, out_features = config.projection_shapes()[name]
    bias = config.mlp_bias if name in ("gate_proj", "up_proj", "down_proj") else config.attention_bias
    size = config.bottleneck_size_of(layer, name)
    if size is None:
        return nn.Linear(in_features, out_features, bias=bias)
    activation = config.low_rank.latent_activation
    if config.low_rank.kind == "lax" and name in config.low_rank.crossing_projections:
        receives = name in config.crossing_sizes(layer)
        return CrossingLinear(
            name, in_features, out_features, size, receives=receives, activation=activation, bias=bias
        )
    return LowRankLinear(in_features, out_features, size, activation=activation, bias=bias)
