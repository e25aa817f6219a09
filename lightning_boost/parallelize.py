"""What happens to a model, in order: tensor → recompute → pipeline → data; its layers may be compiled behind it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_boost.collectives import register_group
from lightning_boost.data_parallel import DataAxis, EqualCalls, TokenWeightedLoss, TokenWeights, apply_data_axis
from lightning_boost.gradients import mark_as_parts
from lightning_boost.layout import Decoder
from lightning_boost.mesh import DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS, shard_bounds
from lightning_boost.model.initialization import (
    Value,
    initial_values,
    make_scratch,
    replace_parameters,
    set_module,
)
from lightning_boost.pipeline_parallel.options import PipelineOptions
from lightning_boost.pipeline_parallel.schedule import Pipeline, install_pipeline
from lightning_boost.pipeline_parallel.split import plan_stages
from lightning_boost.pipeline_parallel.stage import Stage, cut_to_stages
from lightning_boost.random_streams import RandomStreams
from lightning_boost.recompute import RecomputeOptions, recompute_layers
from lightning_boost.tensor_parallel.library import COMMUNICATING, REPLICATED
from lightning_boost.tensor_parallel.scheme import SchemeName, scheme_for


def parallelize(
    decoder: Decoder,
    mesh: DeviceMesh,
    *,
    device: torch.device,
    seed: int,
    data_axis: DataAxis = "replicate",
    pipeline: PipelineOptions | None = None,
    recompute: RecomputeOptions | None = None,
    scheme: SchemeName = "auto",
) -> None:
    """Spread a one-process decoder over the mesh, in place; names and global shapes of its parameters stay.

    Parameters on the meta device are filled from ``seed`` and their names; others take process 0's values.

    Args:
        decoder: The model and where its parts are; checked already.
        mesh: All processes.
        device: Where this process computes.
        seed: The same on every process.
        data_axis: How the replicas of the data axis keep parameters.
        pipeline: How layers and batches are cut, where the pipeline axis has more than one process.
        recompute: Which activations are computed again in backward; ``None``: none.
        scheme: How the tensor axis splits layers.
    """
    table, root, options = scheme_for(decoder, scheme), decoder.root, pipeline or PipelineOptions()
    tensor_mesh, has_own_loss = mesh[TENSOR_AXIS], decoder.own_loss is not None
    is_split, is_piped = tensor_mesh.size() > 1, mesh[PIPELINE_AXIS].size() > 1
    is_shared_out = mesh[DATA_AXIS].size() > 1 and data_axis != "replicate"
    placements = table.placements(decoder, tensor_mesh.size()) if is_split else None
    width = table.hidden_width(decoder, tensor_mesh.size())
    plan = plan_stages(decoder, mesh[PIPELINE_AXIS].size(), mesh[PIPELINE_AXIS].get_local_rank(), options)
    materialize(root, tensor_mesh, placements, device=device, seed=seed, absent=plan.absent_parts(decoder))
    group = register_group(tensor_mesh.get_group()) if is_split else None
    if group is not None:
        table.swap(decoder, group)
    recompute_layers(decoder, recompute or RecomputeOptions(), COMMUNICATING, REPLICATED)
    stages = cut_to_stages(decoder, plan, width, group) if is_piped else []
    if is_piped:
        mark_as_parts(root.parameters())
    if mesh.size() > 1:
        begins, ends = table.split_region(decoder) if is_split else ([], [])
        RandomStreams(mesh, device).attach(decoder, begins, ends)
    if is_split or is_piped:
        refuse_inner_outputs(root)
    if mesh[DATA_AXIS].size() > 1:
        if not is_piped:
            weigh_by_tokens(decoder, TokenWeights(mesh[DATA_AXIS]), has_own_loss=has_own_loss)
        for unit, layers in _roots_and_layers(decoder, stages):
            apply_data_axis(unit, layers, mesh, data_axis)
    if is_shared_out:
        EqualCalls(root, mesh[DATA_AXIS], device)
    if is_piped:
        pipe = Pipeline(root, stages, mesh, device=device, options=options, width=width, is_shared_out=is_shared_out)
        install_pipeline(root, pipe)


def _roots_and_layers(decoder: Decoder, stages: Sequence[Stage]) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Return what becomes units on the data axis: each stage and its layers, or the whole model and its."""
    if stages:
        return [(stage, list(stage.own_layers)) for stage in stages]
    return [(decoder.root, list(decoder.layers.values()))]


def refuse_inner_outputs(model: nn.Module) -> None:
    """Let a Hugging Face model that is asked for its layers' outputs raise a ``ValueError``: a process has a share."""

    def refuse(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name in ("output_hidden_states", "output_attentions"):
            asked = kwargs.get(name)
            if getattr(getattr(model, "config", None), name, None) if asked is None else asked:
                raise ValueError(
                    f"{name} must be False where layers are shared or stand on a pipeline: a process has its own"
                    " features, heads and layers only. Set tensor_parallel_size and pipeline_parallel_size to 1."
                )

    model.register_forward_pre_hook(refuse, with_kwargs=True)


def weigh_by_tokens(decoder: Decoder, weights: TokenWeights, *, has_own_loss: bool) -> None:
    """Weigh a model's loss by its replica's valid tokens, in this package's loss module or else as it comes out."""
    if has_own_loss and decoder.layout.loss is not None:
        loss = TokenWeightedLoss(decoder.part(decoder.layout.loss), weights)
        set_module(decoder.root, decoder.layout.loss, loss)
    else:
        weights.attach(decoder.root)


@torch.no_grad()
def materialize(
    model: nn.Module,
    mesh: DeviceMesh,
    placements: Mapping[str, Placement] | None,
    *,
    device: torch.device,
    seed: int,
    absent: Sequence[str] = (),
) -> None:
    """Replace every parameter by this process's share, one at a time.

    Args:
        model: A one-process model, its parameters on the meta device or not.
        mesh: The tensor axis.
        placements: How each parameter is split; one without an entry is replicated. ``None``: plain parameters.
        device: Where the shares go.
        seed: For parameters on the meta device.
        absent: Parts whose parameters this process does not hold; they end on the meta device.

    Raises:
        ValueError: If a buffer is on the meta device.
    """
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"buffer {name} is on the meta device, where it has no values to start from."
                " Build buffers on the CPU, or compute what they hold in forward."
            )
    values, scratch = _initial_values(model, seed), make_scratch()
    gone = tuple(f"{part}." for part in absent)

    def share_of(name: str, parameter: nn.Parameter) -> nn.Parameter:
        has_hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        if has_hooks and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"parameter {name} has hooks on its gradient, which would see a share of it. Register them after the"
                " Trainer has set up (on_fit_start), or set devices to 1."
            )
        is_absent = name.startswith(gone)
        # together, also where this process will not hold it
        given = None if parameter.is_meta else process_0s(parameter, device)
        if placements is None and given is not None and not is_absent:
            # kept as it is, with its hooks and attributes; it only moves
            parameter.data = given
            return parameter
        placement = Replicate() if placements is None else placements.get(name, Replicate())
        dim, start, stop = _bounds(parameter.shape, mesh, placement)
        if is_absent:
            share = parameter.detach().to("meta").narrow(dim, start, stop - start).clone()
        elif given is None:
            share = values[name].share(dim, start, stop, scratch).to(device, parameter.dtype)
        else:
            share = _cut(given, dim, start, stop)
        if placements is not None:
            share = DTensor.from_local(
                share, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
        replacement = nn.Parameter(share, requires_grad=parameter.requires_grad)
        replacement.__dict__.update(parameter.__dict__)
        return replacement

    replace_parameters(model, share_of)


def _bounds(shape: torch.Size, mesh: DeviceMesh, placement: Placement) -> tuple[int, int, int]:
    """Return the dim that is cut, and where this process's share starts and stops; all of it where none is cut."""
    if not isinstance(placement, Shard):
        return 0, 0, shape[0]
    return placement.dim, *shard_bounds(shape[placement.dim], mesh.size(), mesh.get_local_rank())


def _cut(value: Tensor, dim: int, start: int, stop: int) -> Tensor:
    # a copy: a view would keep the whole value alive
    return value.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def _initial_values(model: nn.Module, seed: int) -> Mapping[str, Value]:
    if not any(parameter.is_meta for parameter in model.parameters()):
        return {}
    std = getattr(getattr(model, "config", None), "initializer_range", 0.02)
    return initial_values(model, std=std, seed=seed)


def process_0s(tensor: Tensor, device: torch.device) -> Tensor:
    """Return process 0's values of a tensor, on the device on which the process group communicates."""
    # a copy without gaps: gloo would overwrite what lies between the elements of a view
    value = tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(value, src=0)
    return value
