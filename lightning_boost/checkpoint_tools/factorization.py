"""A dense model made low-rank, one layer in memory at a time."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from lightning_boost.checkpoint_tools.logit_probe import filled, read_wide
from lightning_boost.checkpoint_tools.svd import BottleneckRule, Factors, factorize
from lightning_boost.config import PROJECTIONS, LlamaConfig, LowRankConfig
from lightning_boost.interchange.keys import EMBEDDING, owner
from lightning_boost.interchange.own import BOOST
from lightning_boost.interchange.pickles import HeldTensor
from lightning_boost.interchange.source import SourceModel, SourceValue
from lightning_boost.model.llama import DecoderLayer
from lightning_boost.model.rotary import rotary_tables

_SAME_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Projections that read what another one reads."""

_ROWS_AT_ONCE = 8


class FactorizedProjection(NamedTuple):
    """What became of one projection."""

    layer: int
    projection: str
    bottleneck_size: int
    error: float
    output_error: float | None


def factorize_model(
    source: SourceModel,
    rule: BottleneckRule,
    *,
    tokens: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[SourceModel, list[FactorizedProjection]]:
    """Factorise every dense projection of a model's layers; pairs that are there already stay.

    Args:
        source: The model. Its kind must have nothing between factors.
        rule: How wide bottlenecks are.
        tokens: Text ``[N, T]`` for whose activations the factors are to be good; ``None``: for any.
        dtype: To compute in; values are kept in the dtype of the files.
        on_layer: Told how many layers are done, of how many.

    Raises:
        ValueError: If there is nothing to factorise, a matrix cannot be, or tokens are not of the vocabulary.
    """
    config = source.config
    if config.low_rank.latent_activation is not None:
        raise ValueError(f"checkpoint {source.path} is low-rank with an activation between its factors already.")
    if config.low_rank.kind == "lax":
        raise ValueError(f"checkpoint {source.path} is low-rank with latents that cross from layer to layer already.")
    values, report = dict(source.values), []
    calibration = None if tokens is None else _Calibration(source, tokens)
    for layer in range(config.num_hidden_layers):
        moments = {} if calibration is None else calibration.run_layer(layer)
        for projection in _dense_projections(config, layer):
            name = f"model.layers.{layer}.{owner(projection)}"
            factors = _replace_by_factors(values, name, rule, moments.get(projection), dtype)
            size = factors.factor_a.shape[0]
            report.append(FactorizedProjection(layer, projection, size, factors.error, factors.output_error))
        on_layer(layer + 1, config.num_hidden_layers)
    if not report:
        raise ValueError(f"checkpoint {source.path} has no dense projection to factorize.")
    sizes: dict[str, int | Literal["dense"]] = {
        f"layers.{each.layer}.{each.projection}": each.bottleneck_size for each in report
    }
    return replace(source, config=_low_rank(config, sizes), values=values, format=BOOST), report


def _dense_projections(config: LlamaConfig, layer: int) -> list[str]:
    return [projection for projection in PROJECTIONS if config.bottleneck_size_of(layer, projection) is None]


def _low_rank(config: LlamaConfig, sizes: dict[str, int | Literal["dense"]]) -> LlamaConfig:
    """Return the configuration with these sizes, and those that pairs have already."""
    for layer in range(config.num_hidden_layers):
        for projection in PROJECTIONS:
            there = config.bottleneck_size_of(layer, projection)
            if there is not None:
                sizes[f"layers.{layer}.{projection}"] = there
    keeps = config.low_rank.has_outer_activation
    low_rank = LowRankConfig(kind="svd", other_bottleneck_sizes=sizes, keep_outer_activation=keeps)
    return replace(config, low_rank=low_rank)


def _replace_by_factors(
    values: dict[str, SourceValue],
    name: str,
    rule: BottleneckRule,
    moment: Tensor | None,
    dtype: torch.dtype,
) -> Factors:
    dense = values.pop(f"{name}.weight")
    try:
        factors = factorize(dense.whole().to(dtype), rule, moment)
    except ValueError as error:
        raise ValueError(f"{name}.weight cannot be factorized: {error}") from None
    for key, factor in (("factor_a", factors.factor_a), ("factor_b", factors.factor_b)):
        held = HeldTensor(factor.to(dense.dtype))
        values[f"{name}.{key}.weight"] = SourceValue(dense.path, dense.key, held, is_transposed=False)
    if f"{name}.bias" in values:
        values[f"{name}.factor_b.bias"] = values.pop(f"{name}.bias")
    return factors


class _Calibration:
    """The hidden state of some text on its way through a dense model, and moments of what projections read."""

    def __init__(self, source: SourceModel, tokens: Tensor) -> None:
        config = source.config
        if tokens.max() >= config.vocab_size:
            raise ValueError(
                f"calibration text holds token {int(tokens.max())}, and the model's vocab_size is {config.vocab_size}:"
                " give the model's own tokenizer."
            )
        self._source = source
        self._hidden = embedding(tokens, read_wide(source.values, EMBEDDING))
        self._rotary = rotary_tables(torch.arange(tokens.shape[1]), tokens.shape[1], config, like=self._hidden)

    @torch.no_grad()
    def run_layer(self, index: int) -> dict[str, Tensor]:
        """Go through a layer; return for its projections the moment ``[in, in]`` of what each reads, in fp64."""
        with torch.device("meta"):
            layer = DecoderLayer(self._source.config, index).eval()
        filled(layer, f"model.layers.{index}.", self._source.values)
        sums: dict[str, Tensor] = {}

        def add(name: str, inputs: Tensor) -> None:
            rows = inputs.flatten(0, -2).double()
            sums[name] = sums.get(name, 0.0) + rows.t() @ rows

        for name, module in layer.named_modules():
            projection = name.rpartition(".")[2]
            if projection in PROJECTIONS and projection not in _SAME_INPUT:
                module.register_forward_pre_hook(lambda _, inputs, projection=projection: add(projection, inputs[0]))
        parts = [layer(part, self._rotary) for part in self._hidden.split(_ROWS_AT_ONCE)]
        num_tokens = self._hidden.shape[0] * self._hidden.shape[1]
        self._hidden = torch.cat(parts)
        means = {name: total / num_tokens for name, total in sums.items()}
        return {projection: means[_SAME_INPUT.get(projection, projection)] for projection in PROJECTIONS}
