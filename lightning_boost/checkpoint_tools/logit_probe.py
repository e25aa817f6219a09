"""What a model computes for some fixed tokens, one layer in memory at a time."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from lightning_boost.config import LlamaConfig
from lightning_boost.interchange.keys import EMBEDDING, HEAD
from lightning_boost.model.crossing import Latents
from lightning_boost.model.initialization import replace_parameters
from lightning_boost.model.llama import CrossingDecoderLayer, make_layer
from lightning_boost.model.loss import NextTokenLoss
from lightning_boost.model.norm import RMSNorm
from lightning_boost.model.rotary import rotary_tables

_ROWS, _TOKENS = 2, 32

_Module = TypeVar("_Module", bound=nn.Module)


class WholeValue(Protocol):
    """A parameter's value that may still be in its file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As the model has it."""

    @property
    def dtype(self) -> torch.dtype:
        """As it is kept."""

    def whole(self) -> Tensor:
        """Read it."""


Values = Mapping[str, WholeValue]


class Probe(NamedTuple):
    """What was computed."""

    logits: Tensor
    loss: float


@torch.no_grad()
def probe(config: LlamaConfig, values: Values) -> Probe:
    """Compute the logits and the loss of fixed tokens, in fp32 at least.

    Args:
        config: The model's.
        values: Of its parameters, by name; each is read once, a tied one twice.
    """
    tokens = torch.randint(config.vocab_size, (_ROWS, _TOKENS), generator=torch.Generator().manual_seed(0))
    hidden = embedding(tokens, read_wide(values, EMBEDDING))
    rotary = rotary_tables(torch.arange(_TOKENS), _TOKENS, config, like=hidden)
    latents: Latents = {}
    for index in range(config.num_hidden_layers):
        with torch.device("meta"):
            layer = make_layer(config, index).eval()
        filled(layer, f"model.layers.{index}.", values)
        if isinstance(layer, CrossingDecoderLayer):
            hidden, latents = layer(hidden, rotary, latents=latents)
        else:
            hidden = layer(hidden, rotary)
    with torch.device("meta"):
        norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
    hidden = filled(norm, "model.norm.", values)(hidden)
    head = read_wide(values, EMBEDDING if config.tie_word_embeddings else HEAD)
    return Probe(linear(hidden, head), NextTokenLoss()(hidden, head, tokens).item())


def read_wide(values: Values, name: str) -> Tensor:
    """Read a parameter, in fp32 at least."""
    return values[name].whole().to(torch.promote_types(values[name].dtype, torch.float32))


def filled(module: _Module, prefix: str, values: Values) -> _Module:
    """Give a module on the meta device its parameters, in fp32 at least; their names begin with ``prefix``."""
    replace_parameters(module, lambda name, _: nn.Parameter(read_wide(values, prefix + name), requires_grad=False))
    return module
