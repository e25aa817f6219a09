"""Models whose matrices were cut by a singular value decomposition: SVD-LLM and ASVD."""

import re
from functools import partial
from typing import Any

from lightning_boost.config import PROJECTIONS, LlamaConfig, LowRankConfig
from lightning_boost.interchange.hugging_face import (
    check_no_crossing,
    check_outer_activation,
    read_options,
    write_options,
)
from lightning_boost.interchange.keys import FactorKeys, Format, Stated, Tensors, owner
from lightning_boost.interchange.shapes import read_biases, read_sizes, size_options
from lightning_boost.model.factor_pair import FactorNames


def _svd_llm_factors(layer: int, num_layers: int, projection: str) -> FactorNames:
    place = f"model.layers.{layer}.{projection.removesuffix('_proj')}"
    return FactorNames(f"{place}_v_proj.weight", f"{place}_u_proj.weight", f"{place}_u_proj.bias")


def _asvd_factors(layer: int, num_layers: int, projection: str) -> FactorNames:
    place = f"model.layers.{layer}.{projection}"
    # its BLinear is the one into the bottleneck
    return FactorNames(f"{place}.BLinear.weight", f"{place}.ALinear.weight", f"{place}.ALinear.bias")


def _read(stated: Stated, tensors: Tensors, *, factors: FactorKeys) -> LlamaConfig:
    options = read_options(stated)
    low_rank = LowRankConfig(kind="svd", **size_options(read_sizes(options, tensors, factors)))
    return LlamaConfig(**{**options, **read_biases(options, tensors, factors)}, low_rank=low_rank)


def _read_asvd(stated: Stated, tensors: Tensors) -> LlamaConfig:
    config = _read(stated, tensors, factors=_asvd_factors)
    found = _truncated(config)
    for name, size in stated.get("truncation_ranks", {}).items():
        if found.get(name) != size:
            raise ValueError(
                f"config.json states {size} in truncation_ranks for {name}, whose bottleneck size is"
                f" {found.get(name, 'none: it is dense')}. Correct config.json."
            )
    return config


def _truncated(config: LlamaConfig) -> dict[str, int]:
    return {
        f"model.layers.{layer}.{owner(projection)}": size
        for layer in range(config.num_hidden_layers)
        for projection in PROJECTIONS
        if (size := config.bottleneck_size_of(layer, projection)) is not None
    }


def _check(config: LlamaConfig, format_name: str) -> None:
    check_no_crossing(config, format_name)
    if config.low_rank.latent_activation is not None:
        raise ValueError(
            f"{format_name} cannot hold a model of kind {config.low_rank.kind!r}: {config.low_rank.latent_activation}"
            " stands between its factors, and in this format nothing does. Take --to boost or cola."
        )
    check_outer_activation(config, format_name)


def _write_svd_llm(config: LlamaConfig) -> dict[str, Any]:
    _check(config, "svd_llm")
    num_dense = config.num_hidden_layers * len(PROJECTIONS) - len(_truncated(config))
    if num_dense:
        raise ValueError(
            f"svd_llm cannot hold dense projections, of which this model has {num_dense}: there each is a pair of"
            " factors. Take --to asvd or boost."
        )
    # not LLaMA's own class, which would load it with random projections and no error
    return write_options(config, "svd_llm_llama", "SVDLlamaForCausalLM")


def _write_asvd(config: LlamaConfig) -> dict[str, Any]:
    _check(config, "asvd")
    return {**write_options(config, "asvd_llama", "ASVDLlamaForCausalLM"), "truncation_ranks": _truncated(config)}


SVD_LLM = Format(
    name="svd_llm",
    mark=re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_[uv]_proj\.weight"),
    factors=_svd_llm_factors,
    read_config=partial(_read, factors=_svd_llm_factors),
    write_config=_write_svd_llm,
)

ASVD = Format(
    name="asvd",
    mark=re.compile(r"model\.layers\.\d+\..*\.[AB]Linear\.weight"),
    factors=_asvd_factors,
    read_config=_read_asvd,
    write_config=_write_asvd,
)
