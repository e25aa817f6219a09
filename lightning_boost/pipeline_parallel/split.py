"""Which layers stand on which pipeline stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch.distributed.device_mesh import DeviceMesh

from lightning_boost.pipeline_parallel.options import PipelineOptions
from lightning_boost.tensor_parallel.layout import Decoder


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


def plan_stages(decoder: Decoder, axis: DeviceMesh, options: PipelineOptions) -> StagePlan:
    """Cut a model for the pipeline axis; stage ``s`` stands on process ``s % size`` of it."""
    size, num_stages = axis.size(), axis.size() * options.virtual_stages
    if options.layers_per_stage is None:
        stages = split_layers(layer_costs(decoder), num_stages)
    else:
        stages = given_layers(options.layers_per_stage, len(decoder.layers), num_stages)
    return StagePlan(stages, list(range(axis.get_local_rank(), num_stages, size)))


def layer_costs(decoder: Decoder) -> list[float]:
    """Return what each layer costs, as the multiplications that a token makes in it; the head counts with the last.

    Attention's products of tokens with tokens are left out: they are the same in every layer. The embedding is a
    look-up.
    """
    costs = [float(sum(parameter.numel() for parameter in layer.parameters())) for layer in decoder.layers.values()]
    costs[-1] += decoder.part(decoder.layout.head).weight.numel()  # type: ignore[operator,union-attr]
    return costs


def split_layers(costs: Sequence[float], num_stages: int) -> list[range]:
    """Cut a list of layers into stages, in order, so that the dearest stage is as cheap as can be.

    Of the cuts that reach this the one whose earlier stages are fuller is taken: later stages keep fewer micro-batches'
    activations, but the last one has the loss to compute.

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
    # cheapest[n]: the dearest stage's cost when the first n layers are cut into the stages so far
    cheapest, cuts = list(sums), []
    for stage in range(1, num_stages):
        previous, cheapest = cheapest, [float("inf")] * len(sums)
        cuts.append([0] * len(sums))
        for end in range(stage + 1, len(sums)):
            options = range(stage, end)
            best = min(options, key=lambda start, end=end: (max(previous[start], sums[end] - sums[start]), -start))
            cheapest[end], cuts[-1][end] = max(previous[best], sums[end] - sums[best]), best
    borders = [len(costs)]
    for cut in reversed(cuts):
        borders.append(cut[borders[-1]])
    borders = [0, *reversed(borders)]
    return [range(start, stop) for start, stop in zip(borders[:-1], borders[1:], strict=True)]


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
    return [range(start, stop) for start, stop in zip(borders[:-1], borders[1:], strict=True)]
