"""Sizes and kinds of the models this package builds.

Names of sizes follow Hugging Face. The only new word is ``bottleneck_size``, the narrow width ``R`` of a factor pair.
"""

from dataclasses import dataclass, field
from typing import Literal

IGNORED_LABEL = -100
"""Label of a position that no loss is taken at, as in torch and Hugging Face."""

LowRankKind = Literal["svd", "cola"]


@dataclass(frozen=True, kw_only=True)
class LowRankConfig:
    """How every linear of the decoder is factorised into ``y = B σ(A x)``.

    Raises:
        ValueError: If a value is outside its range.
    """

    kind: LowRankKind = "cola"
    """``svd``: nothing between the factors; ``cola``: SiLU on the latent."""

    bottleneck_size: int | None = None
    """Width ``R`` of every pair; ``None`` takes a quarter of ``hidden_size``, CoLA's usual choice."""

    keep_outer_activation: bool | None = None
    """Whether the MLP keeps LLaMA's ``SiLU(gate) * up``. ``None``: kept by ``svd``, dropped by ``cola``. Of CoLA's
    published models those of 60M and 130M keep it, larger ones do not."""

    def __post_init__(self) -> None:
        if self.kind not in ("svd", "cola"):
            raise ValueError(f"low_rank.kind ({self.kind!r}) must be one of 'svd', 'cola'.")
        if self.bottleneck_size is not None and self.bottleneck_size < 1:
            raise ValueError(
                f"low_rank.bottleneck_size ({self.bottleneck_size}) must be at least 1;"
                " leave it out to take a quarter of hidden_size."
            )

    @property
    def latent_activation(self) -> str | None:
        """Name of σ, or ``None`` where nothing stands between the factors."""
        return "silu" if self.kind == "cola" else None

    @property
    def has_outer_activation(self) -> bool:
        """Whether the MLP applies SiLU to the gate projection's output."""
        return self.kind == "svd" if self.keep_outer_activation is None else self.keep_outer_activation


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of a LLaMA decoder whose linears are low-rank.

    Raises:
        ValueError: If sizes do not fit one another.
    """

    vocab_size: int = 32000
    """``V``."""

    hidden_size: int = 512
    """``D``."""

    intermediate_size: int = 1376
    """``F``, width of the MLP."""

    num_hidden_layers: int = 8
    """``L``."""

    num_attention_heads: int = 8
    """``H``; must divide ``hidden_size``."""

    num_key_value_heads: int | None = None
    """``K``; ``None``: as many as attention heads."""

    rms_norm_eps: float = 1e-6
    """Added to the mean square inside every RMSNorm."""

    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""

    initializer_range: float = 0.02
    """Standard deviation of the embedding and the head."""

    attention_bias: bool = False
    """Whether q, k, v and o add a bias, after ``factor_b``."""

    mlp_bias: bool = False
    """Whether gate, up and down add a bias, after ``factor_b``."""

    low_rank: LowRankConfig = field(default_factory=LowRankConfig)
    """How the linears are factorised."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1.")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must divide hidden_size ({self.hidden_size});"
                f" nearby sizes that do: {_nearby_divisors(self.hidden_size, self.num_attention_heads)}."
            )
        if self.head_size % 2:
            raise ValueError(
                f"hidden_size / num_attention_heads ({self.head_size}) must be even: rotary embedding turns pairs."
            )
        if self.key_value_heads < 1 or self.num_attention_heads % self.key_value_heads:
            raise ValueError(
                f"num_key_value_heads ({self.num_key_value_heads}) must divide"
                f" num_attention_heads ({self.num_attention_heads})."
            )
        self._check_bottleneck_size()

    def _check_bottleneck_size(self) -> None:
        narrowest = min(self.hidden_size, self.intermediate_size, self.key_value_heads * self.head_size)
        if self.bottleneck_size > narrowest:
            raise ValueError(
                f"low_rank.bottleneck_size ({self.bottleneck_size}) must not be above the narrowest projection's width"
                f" ({narrowest} of hidden_size {self.hidden_size}, intermediate_size {self.intermediate_size},"
                f" num_key_value_heads * head size {self.key_value_heads * self.head_size}):"
                " a wider pair has more parameters than the dense matrix."
            )

    @property
    def bottleneck_size(self) -> int:
        """``R`` of every factor pair."""
        return self.low_rank.bottleneck_size or max(1, self.hidden_size // 4)

    @property
    def key_value_heads(self) -> int:
        """``K``."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """``E``, features of one head."""
        return self.hidden_size // self.num_attention_heads


def _nearby_divisors(number: int, near: int) -> list[int]:
    """Return up to five divisors of ``number``, those nearest to ``near``."""
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    return sorted(sorted(divisors, key=lambda divisor: abs(divisor - near))[:5])
