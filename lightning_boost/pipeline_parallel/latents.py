"""What crosses a border between stages beside the hidden state, where latents cross from layer to layer.

Letters: ``N`` tokens of a micro-batch, ``R`` the sum of the bottleneck sizes that cross, ``tp`` the tensor axis.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_boost.collectives import Label, all_gather, group_index, group_size
from lightning_boost.model.crossing import Latents

_CHUNK = "latents"


@dataclass(frozen=True)
class LatentBorder:
    """The latents that the first layer behind a border receives.

    Every process of the tensor axis has them whole, so each sends a share of the tokens to its neighbour across the
    border, which gathers the rest from its own axis.

    Communication: over the border ``⌈N/tp⌉ R`` values in each direction; on the tensor axis one all-gather of as many
    forward, behind the border, and one backward, in front of it. None where the axis has one process.
    """

    sizes: dict[str, int]
    """Bottleneck sizes in front of the border, by the name of the projection."""

    group: str | None
    """Name of the tensor axis's group; ``None`` where it has one process."""

    @property
    def width(self) -> int:
        """``R``."""
        return sum(self.sizes.values())

    def num_rows(self, num_tokens: int) -> int:
        """Return ``⌈N/tp⌉``."""
        return -(-num_tokens // (1 if self.group is None else group_size(self.group)))

    def pack(self, latents: Latents) -> Tensor:
        """Return this process's share of the latents ``[…, R_i]``, side by side: ``[⌈N/tp⌉, R]``."""
        share: Tensor = _TakeShare.apply(self.group, *(latents[name].flatten(0, -2) for name in self.sizes))
        return share

    def unpack(self, share: Tensor, shape: torch.Size) -> Latents:
        """Return the latents of all tokens, each ``[*shape, R_i]``."""
        whole: Tensor = share if self.group is None else _GatherShares.apply(share, self.group, shape.numel())
        parts = whole.split(list(self.sizes.values()), -1)
        return {name: part.unflatten(0, shape) for name, part in zip(self.sizes, parts, strict=True)}


def border_before(layer: nn.Module, group: str | None) -> LatentBorder | None:
    """Return the border in front of a layer, here or on another stage; ``None`` if no latent crosses into it."""
    sizes: dict[str, tuple[int, int]] = getattr(layer, "crossing_sizes", {})
    return LatentBorder({name: before for name, (before, _) in sizes.items()}, group) if sizes else None


class _TakeShare(torch.autograd.Function):
    """Cut the latents ``[N, R_i]``, whole on every process, to a share ``[⌈N/tp⌉, R]``; backward gathers its gradient.

    The last share is filled up with zeros.
    """

    @staticmethod
    def forward(ctx: Any, group: str | None, *latents: Tensor) -> Tensor:
        ctx.group, ctx.sizes, ctx.num_tokens = group, [each.shape[1] for each in latents], len(latents[0])
        return _own_rows(torch.cat([_rows(each, group) for each in latents], -1), ctx.num_tokens, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        whole = grad if ctx.group is None else _gather(grad, ctx.group, ctx.num_tokens, "backward")
        return None, *whole.split(ctx.sizes, -1)


class _GatherShares(torch.autograd.Function):
    """Gather shares ``[⌈N/tp⌉, R]`` to ``[N, R]``; backward cuts, since every process has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: str, num_tokens: int) -> Tensor:
        ctx.group, ctx.num_tokens = group, num_tokens
        return _gather(share, group, num_tokens, "forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _own_rows(_rows(grad, ctx.group), ctx.num_tokens, ctx.group), None, None


def _rows(whole: Tensor, group: str | None) -> Tensor:
    """Return this process's rows of ``[N, …]``; fewer on the last processes, or none."""
    if group is None:
        return whole
    length = -(-len(whole) // group_size(group))
    return whole[group_index(group) * length :][:length]


def _own_rows(rows: Tensor, num_tokens: int, group: str | None) -> Tensor:
    """Return this process's rows, filled up to as many as every process has."""
    missing = 0 if group is None else -(-num_tokens // group_size(group)) - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows.contiguous()


def _gather(share: Tensor, group: str, num_tokens: int, pass_: Literal["forward", "backward"]) -> Tensor:
    return all_gather(share.contiguous(), group, Label(_CHUNK, pass_)).flatten(0, 1)[:num_tokens]
