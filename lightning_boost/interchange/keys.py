"""What a format calls the tensors of a model, and which way round it keeps them.

A format is one table, read in both directions: from a name of this package's model to the key in the files.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_boost.config import PROJECTIONS, LlamaConfig
from lightning_boost.model.factor_pair import FactorNames


class RawTensor(Protocol):
    """A tensor that may still be in its file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As it is kept."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its values."""

    def read(self, dim: int, start: int, stop: int) -> Tensor:
        """Read a slice of it, and no more."""


Tensors = Mapping[str, RawTensor]

Stated = Mapping[str, Any]
"""What a ``config.json`` holds."""

FactorKeys = Callable[[int, int, str], FactorNames]
"""Give the keys of a pair for a layer's index, the number of layers, and ``self_attn.q_proj`` or another."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_FACTOR = re.compile(r"model\.layers\.(\d+)\.((?:self_attn|mlp)\.\w+_proj)\.(factor_a\.weight|factor_b\.\w+)")
_COMPUTED = re.compile(r"\brotary_emb\.")


class Key(NamedTuple):
    """A tensor in the files."""

    name: str
    is_transposed: bool


@dataclass(frozen=True, kw_only=True)
class Format:
    """A family of checkpoints."""

    name: str
    """As ``--to`` and ``--from`` take it."""

    mark: re.Pattern[str]
    """Matches keys that only this format has."""

    factors: FactorKeys | None
    """Where it keeps pairs; ``None``: it has none."""

    read_config: Callable[[Stated, Tensors], LlamaConfig]
    """Make the configuration of what ``config.json`` states and shapes tell; refuses what ours cannot express."""

    write_config: Callable[[LlamaConfig], dict[str, Any]]
    """Make a ``config.json``; refuses what the format cannot hold."""

    def key_of(self, name: str, num_layers: int) -> Key:
        """Return where the parameter ``name`` of this package's model is kept."""
        found = _FACTOR.fullmatch(name)
        if self.factors is None or not found:
            return Key(name, False)
        names = self.factors(int(found[1]), num_layers, found[2])
        if found[3] == "factor_b.bias":
            return Key(names.bias, False)
        return Key(names.factor_a if found[3] == "factor_a.weight" else names.factor_b, names.is_transposed)


def owner(projection: str) -> str:
    """Return a projection's name within its layer."""
    return f"{'self_attn' if projection in PROJECTIONS[:4] else 'mlp'}.{projection}"


def own_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return a model's own name of each key: without what a wrapper has put in front of all of them.

    Rotary tables, which old files hold, are left out: they are computed.
    """
    kept = [key for key in keys if not _COMPUTED.search(key)]
    prefix = next((key.removesuffix(EMBEDDING) for key in kept if key.endswith(EMBEDDING)), "")
    if all(key.startswith(prefix) for key in kept):
        return {key: key.removeprefix(prefix) for key in kept}
    return {key: key for key in kept}
