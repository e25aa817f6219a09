"""CoLA, and CoLA-M, which keeps the same tensors under other keys."""

import re
from functools import partial
from typing import Any

from lightning_boost.config import LlamaConfig, LowRankConfig
from lightning_boost.interchange.hugging_face import check_no_crossing, read_options, write_options
from lightning_boost.interchange.keys import FactorKeys, Format, Stated, Tensors
from lightning_boost.interchange.shapes import read_biases, read_sizes, size_options
from lightning_boost.model.factor_pair import FactorNames


def _factors(layer: int, num_layers: int, projection: str) -> FactorNames:
    place = f"model.layers.{layer}.{projection}"
    return FactorNames(f"{place}.cola_a", f"{place}.cola_b", f"{place}.bias", is_transposed=True)


def _memory_saving_factors(layer: int, num_layers: int, projection: str) -> FactorNames:
    """Return CoLA-M's keys: a factor is kept in the segment that computes it, the last one in the next layer's."""
    name = projection.partition(".")[2]
    here = f"model.layers.{layer}"
    into, out_of = {
        "o_proj": (f"{here}.self_attn", f"{here}.post_attn"),
        "gate_proj": (f"{here}.pre_mlp", f"{here}.self_mlp"),
        "up_proj": (f"{here}.pre_mlp", f"{here}.self_mlp"),
        "down_proj": (f"{here}.self_mlp", _behind(layer, num_layers)),
    }.get(name, (f"{here}.pre_attn", f"{here}.self_attn"))
    place = f"{out_of}.post_{name}"
    return FactorNames(f"{into}.pre_{name}.cola_a", f"{place}.cola_b", f"{place}.bias", is_transposed=True)


def _behind(layer: int, num_layers: int) -> str:
    is_last = layer == num_layers - 1
    return f"model.layers.{layer}.post_mlp" if is_last else f"model.layers.{layer + 1}.last_layer_post_mlp"


def _read(stated: Stated, tensors: Tensors, *, factors: FactorKeys) -> LlamaConfig:
    options = read_options(stated)
    sizes = read_sizes(options, tensors, factors)
    for (layer, projection), size in sizes.items():
        if size != stated.get("rank", size):
            raise ValueError(
                f"config.json states rank {stated['rank']}, and {projection} of layer {layer} has a bottleneck size of"
                f" {size}. Correct config.json."
            )
    options |= read_biases(options, tensors, factors)
    keeps = not stated.get("only_lr_act", True)
    return LlamaConfig(
        **options, low_rank=LowRankConfig(kind="cola", keep_outer_activation=keeps, **size_options(sizes))
    )


def _write(config: LlamaConfig, *, model_type: str, architecture: str) -> dict[str, Any]:
    check_no_crossing(config, model_type)
    if config.low_rank.kind != "cola":
        raise ValueError(
            f"{model_type} cannot hold a model of kind {config.low_rank.kind!r}: CoLA has SiLU between all factors."
            " Take --to boost, svd_llm, asvd or hf_dense."
        )
    projections = [(layer, name) for layer in range(config.num_hidden_layers) for name in config.projection_shapes()]
    sizes = {config.bottleneck_size_of(layer, name) for layer, name in projections}
    if len(sizes) > 1:
        words = ", ".join("dense" if size is None else str(size) for size in sorted(sizes, key=str))
        raise ValueError(f"{model_type} cannot hold mixed bottleneck sizes ({words}): it has one. Take --to boost.")
    if config.key_value_heads != config.num_attention_heads:
        raise ValueError(
            f"{model_type} cannot hold {config.key_value_heads} key/value heads for {config.num_attention_heads}"
            " attention heads: CoLA's code needs as many. Take --to boost."
        )
    return {
        **write_options(config, model_type, architecture),
        "rank": sizes.pop(),
        "lr_act_type": "silu",
        "only_lr_act": not config.low_rank.has_outer_activation,
    }


COLA = Format(
    name="cola",
    mark=re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj\.cola_[ab]"),
    factors=_factors,
    read_config=partial(_read, factors=_factors),
    write_config=partial(_write, model_type="cola", architecture="ColaForCausalLM"),
)

COLA_M = Format(
    name="cola_m",
    mark=re.compile(r"model\.layers\.\d+\.\w+\.(pre|post)_\w+_proj\.cola_[ab]"),
    factors=_memory_saving_factors,
    read_config=partial(_read, factors=_memory_saving_factors),
    write_config=partial(_write, model_type="cola_m", architecture="ColaMForCausalLM"),
)
