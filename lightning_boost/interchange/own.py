"""This package's own format: the names of its model, and its configuration whole."""

import re
from collections.abc import Mapping
from typing import Any

from lightning_boost.config import LlamaConfig, llama_config
from lightning_boost.interchange.keys import Format, Stated, Tensors
from lightning_boost.model.factor_pair import FactorNames
from lightning_boost.options import plain

VERSION_KEY = "lightning_boost"
"""In ``config.json``; its value is the version of the format."""

_VERSION = 1


def _factors(layer: int, num_layers: int, projection: str) -> FactorNames:
    place = f"model.layers.{layer}.{projection}"
    return FactorNames(f"{place}.factor_a.weight", f"{place}.factor_b.weight", f"{place}.factor_b.bias")


def _read(stated: Stated, tensors: Tensors) -> LlamaConfig:
    if VERSION_KEY not in stated:
        raise ValueError(
            "the tensors have this package's names, and no config.json of this package states the model's"
            " configuration. convert and checkpoint export write one beside them."
        )
    if stated[VERSION_KEY] != _VERSION:
        raise ValueError(
            f"config.json has version {stated[VERSION_KEY]!r} of this package's format, and this release reads"
            f" {_VERSION}. Take the release that wrote it."
        )
    return llama_config(stated["config"])


def state_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` of a model's options in plain types."""
    return {VERSION_KEY: _VERSION, "config": dict(options)}


def _write(config: LlamaConfig) -> dict[str, Any]:
    return state_options(plain(config))


BOOST = Format(
    name="boost",
    mark=re.compile(r"model\.layers\.\d+\.\w+\.\w+_proj\.factor_[ab]\.weight"),
    factors=_factors,
    read_config=_read,
    write_config=_write,
)
