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


@dataclass(frozen=True)
class NormDifference:
    """How far a norm's latents are from those of the exact norm, over one batch."""

    name: str
    max_absolute: float
    mean_absolute: float
    max_exact: float
    """Largest absolute value of the exact latents, to read the difference against."""


@torch.no_grad()
def compare_with_exact(module: NormalizedProjections, x: Tensor, name: str) -> NormDifference:
    """Compare the latents of an online norm with ``A norm(x)`` on the gathered input, in fp32 at least.

    Communication: the norm's own all-reduce again, and one all-gather of ``x``; every process must call this.

    Args:
        module: The online norm and its projections.
        x: Its input, ``[…, D/tp]``.
        name: For the report.
    """
    rows = x.flatten(0, -2)
    online = module.latents(rows)
    factors = [
        member.upright(_whole(member.get_parameter(member.names.factor_a))) for member in module.low_rank_members
    ]
    gathered = all_gather(rows.contiguous(), module.group, Label("verification", "forward"))
    whole = gathered.transpose(0, 1).flatten(1)
    wide = whole.to(wide_dtype(whole.dtype))
    exact = linear(_whole(module.weight) * normalize(wide, module.eps), torch.cat(factors))
    difference = (online - exact).abs()
    return NormDifference(name, difference.max().item(), difference.mean().item(), exact.abs().max().item())


@contextmanager
def verify_norms(model: nn.Module) -> Iterator[list[NormDifference]]:
    """Compare every online norm of ``model`` on each forward until the context ends; yields the growing list."""
    differences: list[NormDifference] = []

    def hook_for(name: str) -> Any:
        def hook(module: NormalizedProjections, inputs: tuple[Tensor], _: Tensor) -> None:
            differences.append(compare_with_exact(module, inputs[0], name))

        return hook

    handles = [
        module.register_forward_hook(hook_for(name))
        for name, module in model.named_modules()
        if isinstance(module, NormalizedProjections) and module.low_rank_members
    ]
    try:
        yield differences
    finally:
        for handle in handles:
            handle.remove()


def _whole(parameter: Tensor) -> Tensor:
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach().to(wide_dtype(whole.dtype))
