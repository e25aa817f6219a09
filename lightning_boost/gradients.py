"""Norm and clipping of gradients that are spread over processes."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from lightning_boost.collectives import Label, all_reduce, register_group

_IS_PART = "_is_part_of_model"

_EPS = 1e-6
"""Added to the norm before it divides, as ``torch.nn.utils.clip_grad_norm_`` does."""


def mark_as_parts(parameters: Iterable[Parameter]) -> None:
    """Note on plain parameters that other processes hold the rest of the model."""
    for parameter in parameters:
        setattr(parameter, _IS_PART, True)


@torch.no_grad()
def global_gradient_norm(parameters: Iterable[Parameter]) -> Tensor:
    """Return the 2-norm of all gradients of the model, the same on every process, as a scalar in fp32 at least.

    Communication: one all-reduce of one value where processes hold parts of the model.
    """
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squares = [_local_square(gradient) for gradient in gradients if not _is_counted_elsewhere(gradient)]
    device = parameters[0].device if parameters else None
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float32, device=device)
    if any(isinstance(parameter, DTensor) or getattr(parameter, _IS_PART, False) for parameter in parameters):
        assert dist.group.WORLD is not None
        all_reduce(total, register_group(dist.group.WORLD), Label("gradient_norm", "step"))
    return total.sqrt()


@torch.no_grad()
def clip_gradients_by_norm(parameters: Iterable[Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``; return the norm before.

    The scale is the same on every process, and that of ``torch.nn.utils.clip_grad_norm_`` on one.
    """
    parameters = list(parameters)
    norm = global_gradient_norm(parameters)
    scale_gradients(parameters, (max_norm / (norm + _EPS)).clamp(max=1.0))
    return norm


@torch.no_grad()
def scale_gradients(parameters: Iterable[Parameter], factor: Tensor | float) -> None:
    """Multiply all gradients, in place, by a factor that is the same on every process."""
    gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_square(gradient: Tensor) -> Tensor:
    share = _local(gradient)
    return share.to(torch.promote_types(share.dtype, torch.float32)).square().sum()


def _is_counted_elsewhere(gradient: Tensor) -> bool:
    """Tell whether another process holds the same values and counts them: a replica counts on the axis' process 0."""
    if not isinstance(gradient, DTensor):
        return False
    coordinate = gradient.device_mesh.get_coordinate()
    assert coordinate is not None
    return any(
        placement.is_replicate() and position != 0
        for placement, position in zip(gradient.placements, coordinate, strict=True)
    )
