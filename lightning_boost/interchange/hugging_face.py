"""Hugging Face's dense LLaMA, and what its ``config.json`` says of every format that grew from it."""

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lightning_boost.config import LlamaConfig, LowRankConfig, RopeScaling
from lightning_boost.interchange.keys import Format, Stated, Tensors
from lightning_boost.interchange.shapes import read_biases

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_NUMBERS = ("num_key_value_heads", "head_dim", "rms_norm_eps", "initializer_range", "attention_dropout")
_FLAGS = ("attention_bias", "mlp_bias", "tie_word_embeddings")
_SAME = (*_SIZES, *_NUMBERS, *_FLAGS)
"""Options of the same name and meaning."""

_MUST_BE: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu", "swish"),
    "sliding_window": (None,),
    "partial_rotary_factor": (None, 1.0),
    "quantization_config": (None,),
    "clip_qkv": (None,),
    "logit_scale": (None, 1.0),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1.0),
    "scale_emb": (None, 1.0),
    "scale_depth": (None, 1.0),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
}
"""Options with which a model of LLaMA's names computes something else, and the values with which it does not."""

_OTHER_ROTARY = ("ernie4_5", "helium")
"""Models of LLaMA's names, shapes and options that turn neighbouring features by one angle; nothing but this tells."""

_ROPE_NAMES = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
"""What each kind of scaling takes; the dynamic one takes the training's context to be ``max_position_embeddings``."""

_NO_OPTION = {"label_smoothing": 0.0, "hidden_dropout": 0.0}


def read_options(stated: Stated) -> dict[str, Any]:
    """Return the options of ``LlamaConfig`` that a ``config.json`` states, all but ``low_rank``.

    Raises:
        ValueError: If a size is not stated, or something else than LLaMA is.
    """
    for size in _SIZES:
        if not isinstance(stated.get(size), int):
            raise ValueError(f"config.json must state {size} as a whole number; it has {stated.get(size)!r}.")
    for option, allowed in _MUST_BE.items():
        if option == "sliding_window" and stated.get("use_sliding_window") is False:
            continue
        if stated.get(option) not in allowed:
            raise ValueError(
                f"config.json states {option} {stated[option]!r}, with which the model computes what this package's"
                f" does not; it must be {' or '.join(map(repr, allowed))}."
            )
    _check_types(stated)
    rope: dict[str, Any] = stated.get("rope_parameters") or {}
    _check_rotary(stated, rope)
    options = {name: stated[name] for name in _SAME if stated.get(name) is not None}
    options["rope_theta"] = float(rope.get("rope_theta") or stated.get("rope_theta") or 10000.0)
    options["rope_scaling"] = _rope_scaling(stated.get("rope_scaling") or rope, stated)
    return options


def _check_types(stated: Stated) -> None:
    kinds: list[tuple[tuple[str, ...], Any, str]] = [
        ((*_NUMBERS, "rope_theta"), int | float, "a number"),
        (_FLAGS, bool, "true or false"),
        (("rope_scaling", "rope_parameters"), dict, "an object"),
    ]
    for names, kind, words in kinds:
        for name in names:
            value = stated.get(name)
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"config.json states {name} {value!r}, and it must be {words}.")


def _check_rotary(stated: Stated, rope: Mapping[str, Any]) -> None:
    """Check what tensors cannot tell: that each layer turns all features of a head, as LLaMA pairs them."""
    if stated.get("model_type") in _OTHER_ROTARY:
        raise ValueError(
            f"config.json states model_type {stated['model_type']!r}, whose rotary embedding pairs neighbouring"
            " features: with LLaMA's names another network."
        )
    if not all(stated.get("no_rope_layers") or ()):
        raise ValueError(
            "config.json states no_rope_layers with a 0: layers without a rotary embedding, which this package's model"
            " does not have."
        )
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError(
            f"config.json states partial_rotary_factor {rope['partial_rotary_factor']!r} in rope_parameters, with which"
            " the model computes what this package's does not; it must be None or 1.0."
        )


def _rope_scaling(scaling: Mapping[str, Any], stated: Stated) -> RopeScaling | None:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    names = _ROPE_NAMES.get(kind, ("factor",))
    given = {name: scaling[name] for name in names if scaling.get(name) is not None}
    if kind == "dynamic":
        given["original_max_position_embeddings"] = stated.get("max_position_embeddings") or 2048
    if "factor" not in given:
        raise ValueError(f"config.json states rope_scaling of type {kind!r} without a factor.")
    return RopeScaling(rope_type=kind, **given)


def write_options(config: LlamaConfig, model_type: str, architecture: str) -> dict[str, Any]:
    """Return a ``config.json`` of all but the low-rank options."""
    scaling = config.rope_scaling
    resolved = {"num_key_value_heads": config.key_value_heads, "head_dim": config.head_size}
    options = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        **{name: getattr(config, name) for name in _SAME},
        **resolved,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else _stated_scaling(scaling),
        "max_position_embeddings": 2048,
    }
    if scaling is not None and scaling.rope_type == "dynamic":
        options["max_position_embeddings"] = scaling.original_max_position_embeddings
    return options


def _stated_scaling(scaling: RopeScaling) -> dict[str, Any]:
    values = asdict(scaling)
    return {name: values[name] for name in ("rope_type", *_ROPE_NAMES[scaling.rope_type])}


def check_outer_activation(config: LlamaConfig, format_name: str) -> None:
    """Check that the MLP has LLaMA's activation, which formats of LLaMA's own code always apply.

    Raises:
        ValueError: If it drops it.
    """
    if not config.low_rank.has_outer_activation:
        raise ValueError(
            f"{format_name} cannot hold a model without the MLP's outer activation"
            " (low_rank.keep_outer_activation false): its code always applies SiLU to the gate."
        )


def check_no_crossing(config: LlamaConfig, format_name: str) -> None:
    """Check that latents do not cross from layer to layer, which formats of other code do not know.

    Raises:
        ValueError: If they do.
    """
    if config.low_rank.kind == "lax":
        raise ValueError(
            f"{format_name} cannot hold a model of kind 'lax', whose latents cross from layer to layer: no other code"
            " has these gates and norms. Take --to boost."
        )


def options_left_out(config: LlamaConfig) -> list[str]:
    """Return the options, of training alone, for which other formats have no place."""
    return [f"{name} {getattr(config, name)}" for name, off in _NO_OPTION.items() if getattr(config, name) != off]


def _read(stated: Stated, tensors: Tensors) -> LlamaConfig:
    options = read_options(stated)
    options |= read_biases(options, tensors, None)
    return LlamaConfig(**options, low_rank=LowRankConfig(kind="full_rank"))


def _write(config: LlamaConfig) -> dict[str, Any]:
    check_no_crossing(config, "hf_dense")
    if config.low_rank.latent_activation is not None:
        raise ValueError(
            f"hf_dense cannot hold a model of kind {config.low_rank.kind!r}: {config.low_rank.latent_activation} stands"
            " between its factors, so they do not multiply into one matrix. Take --to boost or cola."
        )
    check_outer_activation(config, "hf_dense")
    return write_options(config, "llama", "LlamaForCausalLM")


HF_DENSE = Format(
    name="hf_dense",
    mark=re.compile(r"model\.layers\.0\.self_attn\.q_proj\.weight"),
    factors=None,
    read_config=_read,
    write_config=_write,
)
"""One matrix for each projection, under Hugging Face's names."""
