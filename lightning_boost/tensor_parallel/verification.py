"""Online RMSNorm beside the exact one, computed from the gathered input."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from lightning_boost.collectives import Label, all_gather
from lightning_boost.model.norm import normalize
from lightning_boost.tensor_parallel.bottleneck import NormalizedProjections
from lightning_boost.tensor_parallel.library import wide_dtype
from lightning_boost.torch_internals import private

_disable_current_modes = private("torch.utils._python_dispatch", "_disable_current_modes")

CHUNK = "verification"
"""Label of the collectives that a comparison adds, the norm's own again among them."""

Handle = torch.utils.hooks.RemovableHandle


@dataclass(frozen=True)
class NormDifference:
    """How far a norm's latents are from those of the exact norm, over one batch.

    The relative difference of a token is the length of its latents' difference over that of its exact latents. An error
    in the statistic is common to a token, so it shows there in full, whatever the size of its single latents.
    """

    name: str
    dtype: str
    """In which the latents are computed and travel, as torch names it."""

    max_absolute: float
    mean_absolute: float
    max_relative: float
    """Of the worst token."""

    mean_relative: float
    """Over tokens."""

    max_exact: float
    """Largest absolute value of the exact latents, to read the absolute differences against."""


@torch.no_grad()
def compare_with_exact(module: NormalizedProjections, x: Tensor, name: str) -> NormDifference:
    """Compare the latents of an online norm with ``A norm(x)`` on the gathered input, in fp32 at least.

    No dispatch mode sees it: recompute, which is one, tells what it has kept by the order of operators, and would take
    the latents that are computed here for those of a later norm.

    Communication: the norm's own all-reduce again, and all-gathers of ``x``, γ and ``A``; every process of the tensor
    axis must call this.

    Args:
        module: The online norm and its projections.
        x: Its input, ``[…, D/tp]``.
        name: For the report.
    """
    with _disable_current_modes():
        rows = x.flatten(0, -2)
        online = module.latents(rows, CHUNK)
        gathered = all_gather(rows.contiguous(), module.group, Label(CHUNK, "forward"))
        # autocast would round what is to be exact
        with torch.autocast(x.device.type, enabled=False):
            exact = _exact_latents(module, gathered.transpose(0, 1).flatten(1))
        return _difference(online, exact, name)


def _difference(online: Tensor, exact: Tensor, name: str) -> NormDifference:
    """Return the figures of latents ``[N, R]`` beside the exact ones."""
    difference = online.to(exact.dtype) - exact
    smallest = torch.finfo(exact.dtype).tiny
    relative = difference.norm(dim=-1) / exact.norm(dim=-1).clamp(min=smallest)
    absolute = difference.abs()
    figures = (absolute.max(), absolute.mean(), relative.max(), relative.mean(), exact.abs().max())
    dtype = str(online.dtype).removeprefix("torch.")
    return NormDifference(name, dtype, *torch.stack(figures).tolist())


def _exact_latents(module: NormalizedProjections, whole_input: Tensor) -> Tensor:
    """Map the whole input ``[N, D]`` to the latents ``[N, R]`` of the group's pairs."""
    factors = [
        member.upright(_whole(member.get_parameter(member.names.factor_a))) for member in module.low_rank_members
    ]
    wide = whole_input.to(wide_dtype(whole_input.dtype))
    return linear(_whole(module.weight) * normalize(wide, module.eps), torch.cat(factors))


def _whole(parameter: Tensor) -> Tensor:
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach().to(wide_dtype(whole.dtype))


def online_norms(model: nn.Module) -> dict[str, NormalizedProjections]:
    """Return the online norms of a model that stand in front of low-rank projections, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, NormalizedProjections) and module.low_rank_members
    }


@contextmanager
def verify_norms(model: nn.Module) -> Iterator[list[NormDifference]]:
    """Compare every online norm of ``model`` in its first forward before the context ends; yields the growing list.

    Later forwards, such as those of a pipeline's further micro-batches, run without a hook.
    """
    differences: list[NormDifference] = []
    handles: dict[str, Handle] = {}

    def hook_for(name: str) -> Any:
        def hook(module: NormalizedProjections, inputs: tuple[Tensor], _: Tensor) -> None:
            handles.pop(name).remove()
            differences.append(compare_with_exact(module, inputs[0], name))

        return hook

    for name, module in online_norms(model).items():
        handles[name] = module.register_forward_hook(hook_for(name))
    try:
        yield differences
    finally:
        for handle in handles.values():
            handle.remove()
