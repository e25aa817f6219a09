"""Which layers stand on which pipeline stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from torch import nn

from lightning_boost.layout import Decoder
from lightning_boost.pipeline_parallel.options import PipelineOptions


@dataclass(frozen=True)
class StagePlan:
    """The layers of every stage, and which stages are this process's."""

    stages: list[range]
    own: list[int]
    """Indices of this process's stages, in order."""

    def absent_parts(self, decoder: Decoder) -> list[str]:
        """Return the names of the parts of the whole model that none of this process's stages holds."""
        layout = decoder.layout
        here = {layer for stage in self.own for layer in self.stages[stage]}
        absent = [name for index, name in enumerate(decoder.layers) if index not in here]
        absent += [layout.embedding] if 0 not in self.own else []
        absent += [layout.final_norm, layout.head] if len(self.stages) - 1 not in self.own else []
        return absent


def plan_stages(decoder: Decoder, size: int, index: int, options: PipelineOptions) -> StagePlan:
    """Cut a model for a pipeline; stage ``s`` stands on process ``s % size``.

    Args:
        decoder: The whole model.
        size: Processes of the pipeline axis.
        index: Of this process on it.
        options: Virtual stages, and layers if given.
    """
    num_stages = size * options.virtual_stages
    if options.layers_per_stage is None:
        stages = split_layers(layer_costs(decoder), num_stages)
    else:
        stages = given_layers(options.layers_per_stage, len(decoder.layers), num_stages)
    return StagePlan(stages, list(range(index, num_stages, size)))


def check_pipeline(decoder: Decoder, size: int, options: PipelineOptions) -> None:
    """Check that a model can be cut for a pipeline.

    Args:
        decoder: The model.
        size: Processes of the pipeline axis.
        options: How it is cut.

    Raises:
        ValueError: If there are too few layers, two parts share a parameter, or the model has parameters that no stage
            would hold.
    """
    plan_stages(decoder, size, 0, options)
    layout = decoder.layout
    if decoder.is_tied:
        raise ValueError(
            f"{layout.embedding} and {layout.head} share one weight, and would stand on the first and the last pipeline"
            " stage. Set tie_word_embeddings to False, or pipeline_parallel_size to 1."
        )
    parts = tuple(f"{name}." for name in (*decoder.layers, layout.embedding, layout.final_norm, layout.head))
    _check_none_shared(decoder, parts)
    others = [name for name, _ in decoder.root.named_parameters() if not name.startswith(parts)]
    if others:
        raise ValueError(
            f"parameters {', '.join(others[:5])} of {type(decoder.root).__name__} belong to no part that a pipeline"
            " stage holds. Remove them, or set pipeline_parallel_size to 1."
        )


def _check_none_shared(decoder: Decoder, parts: tuple[str, ...]) -> None:
    """Check that no parameter is in two of the parts that stages hold: each stage would train a copy of its own."""
    seen: dict[nn.Parameter, tuple[str, str | None]] = {}
    for name, parameter in decoder.root.named_parameters(remove_duplicate=False):
        part = next((part for part in parts if name.startswith(part)), None)
        first, first_part = seen.setdefault(parameter, (name, part))
        if part != first_part:
            raise ValueError(
                f"{first} and {name} are one parameter, in two parts of {type(decoder.root).__name__} that may stand on"
                " different pipeline stages. Give each its own, or set pipeline_parallel_size to 1."
            )


def layer_costs(decoder: Decoder) -> list[float]:
    """Return what each layer costs, as the multiplications that a token makes in it; the head counts with the last.

    Attention's products of tokens with tokens are left out: they are the same in every layer. The embedding is a
    look-up.
    """
    costs = [float(sum(parameter.numel() for parameter in layer.parameters())) for layer in decoder.layers.values()]
    costs[-1] += decoder.root.get_parameter(f"{decoder.layout.head}.weight").numel()
    return costs


def split_layers(costs: Sequence[float], num_stages: int) -> list[range]:
    """Cut a list of layers into stages, in order, so that the dearest stage is as cheap as can be, and the rest even.

    Args:
        costs: Of each layer.
        num_stages: At least 1 and no more than there are layers.

    Raises:
        ValueError: If there are fewer layers than stages.
    """
    if num_stages > len(costs):
        raise ValueError(
            f"pipeline stages ({num_stages}) must be no more than the layers ({len(costs)}): each stage holds one at"
            " least."
        )
    sums = [0.0, *accumulate(costs)]

    @cache
    def best(stop: int, stages: int) -> _Cut:
        """Return the best cut of the first ``stop`` layers."""
        if stages == 1:
            return _Cut(sums[stop], sums[stop] ** 2, (0, stop))
        return min(
            best(start, stages - 1).followed_by(sums[stop] - sums[start], stop) for start in range(stages - 1, stop)
        )

    borders = best(len(costs), num_stages).borders
    return [range(start, stop) for start, stop in pairwise(borders)]


class _Cut(NamedTuple):
    """Cuts compare by their dearest stage, then by the squares, which are least where stages are even."""

    dearest: float
    squares: float
    borders: tuple[int, ...]

    def followed_by(self, cost: float, stop: int) -> "_Cut":
        return _Cut(max(self.dearest, cost), self.squares + cost**2, (*self.borders, stop))


def given_layers(layers_per_stage: Sequence[int], num_layers: int, num_stages: int) -> list[range]:
    """Return the stages that a list of layer counts makes.

    Raises:
        ValueError: If the counts are not one for each stage, one is below 1, or they do not add up to all layers.
    """
    if len(layers_per_stage) != num_stages or min(layers_per_stage) < 1 or sum(layers_per_stage) != num_layers:
        raise ValueError(
            f"layers_per_stage ({list(layers_per_stage)}) must hold a number of at least 1 for each of {num_stages}"
            f" stages, and they must add up to the model's {num_layers} layers. Leave it out to have them balanced."
        )
    borders = [0, *accumulate(layers_per_stage)]
    return [range(start, stop) for start, stop in pairwise(borders)]
