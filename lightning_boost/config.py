"""Sizes and kinds of the models this package builds.

Names of sizes follow Hugging Face. The only new word is ``bottleneck_size``, the narrow width ``R`` of a factor pair.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

IGNORED_LABEL = -100
"""Label of a position that no loss is taken at, as in torch and Hugging Face."""

LowRankKind = Literal["full_rank", "svd", "cola", "lax"]
KINDS = ("full_rank", "svd", "cola", "lax")
PairKind = Literal["svd", "cola"]
PAIR_KINDS = ("svd", "cola")
GateKind = Literal["identity", "linear", "tensor"]
GATES = ("identity", "linear", "tensor")

DENSE: Literal["dense"] = "dense"
"""In the place of a bottleneck size: the projection is one matrix."""

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_log = logging.getLogger(__name__)
_PLACE = re.compile(rf"(layers\.\d+)|((layers\.\d+\.)?({'|'.join(PROJECTIONS)}))")


@dataclass(frozen=True, kw_only=True)
class LowRankConfig:
    """How every linear of the decoder is factorised into ``y = B σ(A x)``.

    Raises:
        ValueError: If a value is outside its range.
    """

    kind: LowRankKind = "cola"
    """``full_rank``: dense matrices; ``svd``: nothing between the factors; ``cola``: SiLU on the latent;
    ``lax``: either of the last two, with latents that receive those of the layer before."""

    bottleneck_size: int | None = None
    """Width ``R`` of every pair; ``None`` takes a quarter of ``hidden_size``, CoLA's usual choice."""

    attention_bottleneck_size: int | None = None
    """``R`` of q, k, v and o where it differs."""

    mlp_bottleneck_size: int | None = None
    """``R`` of gate, up and down where it differs."""

    other_bottleneck_sizes: dict[str, int | Literal["dense"]] = field(default_factory=dict)
    """``R``, or ``dense``, of single places: ``q_proj`` in all layers, ``layers.3``, or ``layers.3.up_proj``. The most
    precise name wins."""

    keep_outer_activation: bool | None = None
    """Whether the MLP keeps LLaMA's ``SiLU(gate) * up``. ``None``: kept, but dropped by ``cola``. Of CoLA's published
    models those of 60M and 130M keep it, larger ones do not."""

    crossing_base: PairKind = "cola"
    """``lax``: whether SiLU stands on the latent, as in ``cola``, or nothing, as in ``svd``."""

    crossing_gate: GateKind = "tensor"
    """``lax``: what the latent of the layer before goes through: nothing, a linear, or two small matrices."""

    crossing_projections: list[str] = field(default_factory=lambda: list(PROJECTIONS))
    """``lax``: which projections' latents cross from layer to layer."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"low_rank.kind ({self.kind!r}) must be one of {', '.join(map(repr, KINDS))}.")
        self._check_crossing()
        named = {name: getattr(self, f"{name}bottleneck_size") for name in ("", "attention_", "mlp_")}
        sizes = {f"{name}bottleneck_size": size for name, size in named.items() if size is not None}
        for place, size in self.other_bottleneck_sizes.items():
            if not _PLACE.fullmatch(place):
                raise ValueError(
                    f"low_rank.other_bottleneck_sizes names {place!r}; a place is a projection"
                    f" ({', '.join(PROJECTIONS)}), a layer (layers.3) or a projection of a layer (layers.3.up_proj)."
                )
            if size != DENSE:
                sizes[f"other_bottleneck_sizes[{place!r}]"] = size
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(
                    f"low_rank.{name} ({size}) must be at least 1; leave it out to take a quarter of hidden_size."
                )

    def _check_crossing(self) -> None:
        for name, known in (("crossing_base", PAIR_KINDS), ("crossing_gate", GATES)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"low_rank.{name} ({getattr(self, name)!r}) must be one of {', '.join(map(repr, known))}."
                )
        unknown = [name for name in self.crossing_projections if name not in PROJECTIONS]
        if unknown or not self.crossing_projections:
            raise ValueError(
                f"low_rank.crossing_projections ({self.crossing_projections}) must name at least one of"
                f" {', '.join(PROJECTIONS)}, and nothing else; leave it out to let all of them cross."
            )
        defaults = {"crossing_base": "cola", "crossing_gate": "tensor", "crossing_projections": list(PROJECTIONS)}
        for name, default in defaults.items():
            if self.kind != "lax" and getattr(self, name) != default:
                raise ValueError(
                    f"low_rank.{name} ({getattr(self, name)!r}) means nothing with kind {self.kind!r}, whose latents do"
                    " not cross. Leave it out, or set kind to 'lax'."
                )

    @property
    def pair_kind(self) -> LowRankKind:
        """The kind without what crosses."""
        return self.crossing_base if self.kind == "lax" else self.kind

    @property
    def latent_activation(self) -> str | None:
        """Name of σ, or ``None`` where nothing stands between the factors."""
        return "silu" if self.pair_kind == "cola" else None

    @property
    def has_outer_activation(self) -> bool:
        """Whether the MLP applies SiLU to the gate projection's output."""
        return self.pair_kind != "cola" if self.keep_outer_activation is None else self.keep_outer_activation

    def given_size(self, layer: int, projection: str) -> int | Literal["dense"] | None:
        """Return what is said of a projection, the most precise word of all; ``None`` if nothing is."""
        attention = projection in PROJECTIONS[:4]
        words = (
            self.other_bottleneck_sizes.get(f"layers.{layer}.{projection}"),
            self.other_bottleneck_sizes.get(f"layers.{layer}"),
            self.other_bottleneck_sizes.get(projection),
            self.attention_bottleneck_size if attention else self.mlp_bottleneck_size,
            self.bottleneck_size,
        )
        return next((word for word in words if word is not None), None)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are changed for contexts longer than the model was trained on, as Hugging Face does.

    Raises:
        ValueError: If a value is outside its range.
    """

    rope_type: Literal["linear", "dynamic", "llama3"]
    """``linear``: all frequencies divided by ``factor``; ``dynamic``: the base grows once a sequence is longer than
    ``original_max_position_embeddings``; ``llama3``: low frequencies divided, high ones kept, those between blended."""

    factor: float
    """At least 1."""

    original_max_position_embeddings: int = 8192
    """Context of the training; unused by ``linear``."""

    low_freq_factor: float = 1.0
    """``llama3``: wavelengths above the context divided by this are divided by ``factor``."""

    high_freq_factor: float = 4.0
    """``llama3``: wavelengths below the context divided by this are kept."""

    def __post_init__(self) -> None:
        if self.rope_type not in ("linear", "dynamic", "llama3"):
            raise ValueError(f"rope_scaling.rope_type ({self.rope_type!r}) must be 'linear', 'dynamic' or 'llama3'.")
        if self.factor < 1.0:
            raise ValueError(f"rope_scaling.factor ({self.factor}) must be at least 1.")
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"rope_scaling.low_freq_factor ({self.low_freq_factor}) must be below"
                f" high_freq_factor ({self.high_freq_factor})."
            )


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
    """``H``."""

    num_key_value_heads: int | None = None
    """``K``; ``None``: as many as attention heads."""

    head_dim: int | None = None
    """``E``, features of one head; ``None``: ``hidden_size / num_attention_heads``."""

    rms_norm_eps: float = 1e-6
    """Added to the mean square inside every RMSNorm."""

    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""

    rope_scaling: RopeScaling | None = None
    """How they are changed for long contexts."""

    initializer_range: float = 0.02
    """Standard deviation of the embedding, the head and dense projections."""

    attention_bias: bool = False
    """Whether q, k, v and o add a bias, after ``factor_b``."""

    mlp_bias: bool = False
    """Whether gate, up and down add a bias, after ``factor_b``."""

    tie_word_embeddings: bool = False
    """Whether the head's weight is the embedding's."""

    label_smoothing: float = 0.0
    """Share of each target's probability that is spread over the whole vocabulary."""

    attention_dropout: float = 0.0
    """Probability that training drops an attention weight."""

    hidden_dropout: float = 0.0
    """Probability that training drops a feature of what attention and MLP add to the residual stream."""

    low_rank: LowRankConfig = field(default_factory=LowRankConfig)
    """How the linears are factorised."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1.")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must divide hidden_size ({self.hidden_size});"
                f" nearby sizes that do: {_nearby_divisors(self.hidden_size, self.num_attention_heads)}."
                " Or give head_dim."
            )
        if self.head_size < 2 or self.head_size % 2:
            raise ValueError(f"head size ({self.head_size}) must be even: rotary embedding turns pairs.")
        if self.key_value_heads < 1 or self.num_attention_heads % self.key_value_heads:
            raise ValueError(
                f"num_key_value_heads ({self.num_key_value_heads}) must divide"
                f" num_attention_heads ({self.num_attention_heads})."
            )
        for name in ("label_smoothing", "attention_dropout", "hidden_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 0 and below 1.")
        self._check_bottleneck_sizes()

    def _check_bottleneck_sizes(self) -> None:
        cut = {}
        for layer in range(self.num_hidden_layers):
            for projection, shape in self.projection_shapes().items():
                given, widest = self.low_rank.given_size(layer, projection), min(shape)
                if self.low_rank.kind == "full_rank":
                    continue
                if isinstance(given, int) and given > widest:
                    raise ValueError(
                        f"low_rank.bottleneck_size ({given}) of layers.{layer}.{projection} must not be above the"
                        f" narrower of its widths ({shape[0]} in, {shape[1]} out)."
                        " Give the projection a size of its own in low_rank.other_bottleneck_sizes."
                    )
                if given is None and self._default_size > widest:
                    cut[projection] = widest
        if cut:
            _log.warning(
                "The default bottleneck size, a quarter of hidden_size (%d), is cut to narrower projections' width: %s",
                self._default_size,
                ", ".join(f"{name} {size}" for name, size in cut.items()),
            )
        for place in self.low_rank.other_bottleneck_sizes:
            layer_of = re.match(r"layers\.(\d+)", place)
            if layer_of and int(layer_of[1]) >= self.num_hidden_layers:
                raise ValueError(
                    f"low_rank.other_bottleneck_sizes names {place!r}, and the last layer is"
                    f" layers.{self.num_hidden_layers - 1}."
                )
        self._check_crossing_sizes()

    def _check_crossing_sizes(self) -> None:
        sizes = [self.crossing_sizes(layer) for layer in range(self.num_hidden_layers)]
        if self.low_rank.kind == "lax" and len(sizes) > 1 and not any(sizes):
            raise ValueError(
                f"low_rank.crossing_projections ({', '.join(self.low_rank.crossing_projections)}) must be factor pairs"
                " in two layers that follow one another; no latent crosses here. Make them pairs, or change the kind."
            )
        for layer, crossing in enumerate(sizes):
            for projection, (before, here) in crossing.items():
                if before != here and self.low_rank.crossing_gate != "linear":
                    raise ValueError(
                        f"low_rank.bottleneck_size ({here}) of layers.{layer}.{projection} must be that of layer"
                        f" {layer - 1} ({before}) with crossing_gate {self.low_rank.crossing_gate!r}, which keeps a"
                        " latent's width. Give both one size, set crossing_gate to 'linear', which changes it, or leave"
                        " the projection out of crossing_projections."
                    )

    def projection_shapes(self) -> dict[str, tuple[int, int]]:
        """Return the input and output features of each projection of a layer."""
        hidden, features = self.hidden_size, self.intermediate_size
        heads, key_value = self.num_attention_heads * self.head_size, self.key_value_heads * self.head_size
        return {
            "q_proj": (hidden, heads),
            "k_proj": (hidden, key_value),
            "v_proj": (hidden, key_value),
            "o_proj": (heads, hidden),
            "gate_proj": (hidden, features),
            "up_proj": (hidden, features),
            "down_proj": (features, hidden),
        }

    def bottleneck_size_of(self, layer: int, projection: str) -> int | None:
        """Return ``R`` of a projection, or ``None`` where it is dense."""
        given = self.low_rank.given_size(layer, projection)
        if self.low_rank.kind == "full_rank" or given == DENSE:
            return None
        return given if isinstance(given, int) else min(self._default_size, *self.projection_shapes()[projection])

    def crossing_sizes(self, layer: int) -> dict[str, tuple[int, int]]:
        """Return of each projection whose latent receives that of the layer before the width of both, in order.

        There is none in the first layer, and none where the projection is dense here or in the layer before.
        """
        names = self.low_rank.crossing_projections if self.low_rank.kind == "lax" and layer > 0 else []
        sizes = {}
        for name in filter(names.__contains__, PROJECTIONS):
            before, here = (self.bottleneck_size_of(index, name) for index in (layer - 1, layer))
            if before is not None and here is not None:
                sizes[name] = before, here
        return sizes

    @property
    def _default_size(self) -> int:
        return max(1, self.hidden_size // 4)

    @property
    def key_value_heads(self) -> int:
        """``K``."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """``E``, features of one head."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim


TRAINING_OPTIONS = ("initializer_range", "label_smoothing", "attention_dropout", "hidden_dropout")
"""Options of ``LlamaConfig`` that do not change what a trained model computes."""


def structure(config: LlamaConfig) -> dict[str, Any]:
    """Return what a model computes by the names of its options: equal wherever two configurations mean the same."""
    low_rank = config.low_rank
    said = {entry.name: getattr(config, entry.name) for entry in fields(config)}
    scaling = None if config.rope_scaling is None else asdict(config.rope_scaling)
    resolved = {
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_size,
        "rope_scaling": scaling,
    }
    found = {name: value for name, value in {**said, **resolved}.items() if name not in (*TRAINING_OPTIONS, "low_rank")}
    found["low_rank.latent_activation"] = low_rank.latent_activation
    found["low_rank.keep_outer_activation"] = low_rank.has_outer_activation
    crosses = [bool(config.crossing_sizes(layer)) for layer in range(config.num_hidden_layers)]
    found["low_rank.crossing_gate"] = low_rank.crossing_gate if any(crosses) else None
    for layer in range(config.num_hidden_layers):
        for name in PROJECTIONS:
            found[f"low_rank.bottleneck_size of layers.{layer}.{name}"] = (
                config.bottleneck_size_of(layer, name) or DENSE
            )
            found[f"low_rank.crossing of layers.{layer}.{name}"] = name in config.crossing_sizes(layer)
    return found


def llama_config(options: Mapping[str, Any]) -> LlamaConfig:
    """Make a configuration of plain types, as JSON and hyper-parameters have it.

    Raises:
        ValueError: If an option is not known, or a value is outside its range.
    """
    scaling = options.get("rope_scaling")
    try:
        low_rank = LowRankConfig(**options.get("low_rank", {}))
        rope_scaling = None if scaling is None else RopeScaling(**scaling)
        return LlamaConfig(**{**options, "low_rank": low_rank, "rope_scaling": rope_scaling})
    except TypeError as error:
        raise ValueError(f"the model's configuration is not that of this release: {error}") from None


def _nearby_divisors(number: int, near: int) -> list[int]:
    """Return up to five divisors of ``number``, those nearest to ``near``."""
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    return sorted(sorted(divisors, key=lambda divisor: abs(divisor - near))[:5])
