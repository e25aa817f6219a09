"""Scheme ``vanilla_sharded``: vanilla whose processes each have their own heads and features between projections.

What a group's bottlenecks give is scattered instead of summed whole, and gathered in front of ``o`` and ``down``:

====================  =================================================================================
in the place of       stands
====================  =================================================================================
a norm                ``ShardedVanillaNorm``: the norm of the whole hidden state, every ``A`` that reads it,
                      σ, every ``B``, and one reduce-scatter of all of them
such a projection     ``LowRankMember``: takes its own part
o, down               ``ShardedVanillaLinear``: one all-gather, ``A``, σ, ``B``, and one all-reduce
====================  =================================================================================

Per block 6 launches forward and 6 backward. Full-width tensors are sent as GEMMs write them and read as they come:
features of one process side by side, ``[S, N, …]`` for ``S`` processes.

Letters: ``N`` rows (micro-batch × tokens), ``r`` this process's part of a bottleneck, ``w`` a process's features of all
projections of a group, ``d = ⌈in/tp⌉``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from typing_extensions import override

from lightning_boost.collectives import (
    Label,
    all_gather,
    group_index,
    group_size,
    reduce_scatter,
    start_reduce_scatter,
)
from lightning_boost.mesh import shard_bounds
from lightning_boost.model.crossing import LayerLatents
from lightning_boost.tensor_parallel.bottleneck import CommunicatingPair, LowRankMember, add_bias
from lightning_boost.tensor_parallel.handing_out import GroupMember, hand_out
from lightning_boost.tensor_parallel.library import apply, gemm_dtype, gemm_flops, operator
from lightning_boost.tensor_parallel.local_parameter import local
from lightning_boost.tensor_parallel.vanilla import VanillaNorm, activate_part, expand_reduce

Places = list[tuple[slice, slice]]
"""Of each projection of a group: its rows of ``B`` on a process, and their columns in what is scattered to it."""


def _places(factors_b: Sequence[Tensor], num_shares: Sequence[int], size: int, index: int) -> Places:
    """Return the places on process ``index`` of ``size``; neighbours have the same share where there are fewer."""
    places: Places = []
    end = 0
    for factor, shares in zip(factors_b, num_shares, strict=True):
        start, stop = shard_bounds(factor.shape[0], shares, index * shares // size)
        places.append((slice(start, stop), slice(end, end + stop - start)))
        end += stop - start
    return places


def _widest(factors_b: Sequence[Tensor], num_shares: Sequence[int], size: int) -> int:
    """Return the features of process 0, which has the most; what is behind those of another is sent and not read."""
    width: int = _places(factors_b, num_shares, size, 0)[-1][1].stop
    return width


def _scattered_flops(rows: int, factors_b: Sequence[Sequence[int]], num_shares: Sequence[int], size: int) -> int:
    """Return the FLOPs of what every process gets; a share that several get is multiplied for each."""
    products = zip(factors_b, num_shares, strict=True)
    return sum(gemm_flops(rows, factor) * size // shares for factor, shares in products)


@operator(
    "expand_scatter(Tensor[] latents, Tensor[] factors_b, int[] num_shares, str group, str chunk) -> Tensor",
    fake=lambda latents, factors_b, num_shares, group, _: latents[0].new_empty(
        latents[0].shape[0], _widest(factors_b, num_shares, group_size(group))
    ),
    flops=lambda latents, factors_b, num_shares, group, _: _scattered_flops(
        latents[0][0], factors_b, num_shares, group_size(group)
    ),
)
def _expand_scatter(
    latents: Sequence[Tensor], factors_b: Sequence[Tensor], num_shares: Sequence[int], group: str, chunk: str
) -> Tensor:
    size = group_size(group)
    width = _widest(factors_b, num_shares, size)
    buffer = latents[0].new_empty(size, latents[0].shape[0], width)
    for index, part in enumerate(buffer):
        places = _places(factors_b, num_shares, size, index)
        for z, factor, (rows, columns) in zip(latents, factors_b, places, strict=True):
            torch.mm(z, factor[rows].t(), out=part[:, columns])
    return reduce_scatter(buffer, group, Label(chunk, "forward"))


@operator(
    "expand_scatter_backward(Tensor grad_y, Tensor[] latents, Tensor[] factors_b, int[] num_shares, bool[] needed,"
    " str group, str chunk) -> (Tensor[], Tensor[])",
    fake=lambda _, latents, factors_b, *__: (
        [torch.empty_like(z) for z in latents],
        [torch.empty_like(factor) for factor in factors_b],
    ),
    flops=lambda _, latents, factors_b, num_shares, needed, group, __: (
        sum(needed) * _scattered_flops(latents[0][0], factors_b, num_shares, group_size(group))
    ),
)
def _expand_scatter_backward(
    grad_y: Tensor,
    latents: Sequence[Tensor],
    factors_b: Sequence[Tensor],
    num_shares: Sequence[int],
    needed: Sequence[bool],
    group: str,
    chunk: str,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of the latents and of the factors; zeros where ``needed`` says so."""
    are_latents_needed, are_factors_needed = needed
    gathered = all_gather(grad_y.contiguous(), group, Label(chunk, "backward"))
    # what several processes read has a gradient of each: all are added
    grads_z = [torch.zeros_like(z) for z in latents]
    grads_b = [torch.zeros_like(factor) for factor in factors_b]
    for index, part in enumerate(gathered):
        places = _places(factors_b, num_shares, len(gathered), index)
        for z, factor, grad_z, grad_b, (rows, columns) in zip(
            latents, factors_b, grads_z, grads_b, places, strict=True
        ):
            if are_latents_needed:
                grad_z.addmm_(part[:, columns], factor[rows])
            if are_factors_needed:
                grad_b[rows].addmm_(part[:, columns].t(), z)
    return grads_z, grads_b


class ExpandScatter(torch.autograd.Function):
    """Compute ``Σ B z`` of every projection of a group, each process its own output features of the sum.

    ================  ===============  ==========================================
    tensor            this process     note
    ================  ===============  ==========================================
    latents           ``[N, r_i]``     parts, σ applied
    ``factors_b``     ``[out_i, r_i]`` row-parallel
    ``num_shares``                     into how many parts outputs are split: as
                                       many as processes, or as there are heads
    ``y``             ``[N, w]``       side by side, as many as process 0 has
    ================  ===============  ==========================================

    Communication: forward one reduce-scatter of ``N S w`` values, backward one all-gather of ``N w``.
    Saved for backward: the latents (and the parameters).
    """

    @staticmethod
    def forward(ctx: Any, num_shares: Sequence[int], group: str, chunk: str, *operands: Tensor) -> Tensor:
        """Return ``y``; ``operands`` are the latents and then the factors."""
        ctx.save_for_backward(*operands)
        ctx.num_shares, ctx.group, ctx.chunk = num_shares, group, chunk
        count = len(num_shares)
        y: Tensor = _expand_scatter(operands[:count], operands[count:], num_shares, group, chunk)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the latents and of the factors."""
        count, operands, wanted = len(ctx.num_shares), ctx.saved_tensors, ctx.needs_input_grad[3:]
        latents, factors_b = operands[:count], operands[count:]
        needed = [any(wanted[:count]), any(wanted[count:])]
        found = _expand_scatter_backward(grad_y, latents, factors_b, ctx.num_shares, needed, ctx.group, ctx.chunk)
        gradients = zip((*found[0], *found[1]), wanted, strict=True)
        return None, None, None, *(gradient if is_needed else None for gradient, is_needed in gradients)


@operator(
    "gather_parts(Tensor x, str group, str chunk) -> Tensor",
    fake=lambda x, group, _: x.new_empty(group_size(group), *x.shape),
)
def _gather_parts(x: Tensor, group: str, chunk: str) -> Tensor:
    return all_gather(x.contiguous(), group, Label(chunk, "forward"))


@operator(
    "project_parts(Tensor parts, Tensor factor_a) -> Tensor",
    fake=lambda parts, factor_a: parts.new_empty(parts.shape[1], factor_a.shape[0]),
    flops=lambda parts, factor_a: gemm_flops(parts[1], factor_a),
)
def _project_parts(parts: Tensor, factor_a: Tensor) -> Tensor:
    z = parts.new_zeros(parts.shape[1], factor_a.shape[0])
    for part, share in zip(parts, _columns(factor_a, len(parts)), strict=True):
        z.addmm_(part[:, : share.shape[1]], share.t())
    return z


def _project_parts_backward_fake(
    grad_z: Tensor, parts: Tensor, factor_a: Tensor, needed: Sequence[bool], *_: Any
) -> tuple[Tensor, Tensor]:
    is_x_needed, is_factor_needed = needed
    return (
        parts.new_empty(parts.shape[1:]) if is_x_needed else grad_z.new_empty(0),
        factor_a.new_empty(factor_a.shape) if is_factor_needed else grad_z.new_empty(0),
    )


@operator(
    "project_parts_backward(Tensor grad_z, Tensor parts, Tensor factor_a, bool[] needed, str group, str chunk)"
    " -> (Tensor, Tensor)",
    fake=_project_parts_backward_fake,
    flops=lambda grad_z, _, factor_a, needed, *__: sum(needed) * gemm_flops(grad_z[0], factor_a),
)
def _project_parts_backward(
    grad_z: Tensor, parts: Tensor, factor_a: Tensor, needed: Sequence[bool], group: str, chunk: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of this process's features and of the factor; empty ones where ``needed`` says so."""
    is_x_needed, is_factor_needed = needed
    grad_x, grad_a, in_flight = grad_z.new_empty(0), grad_z.new_empty(0), None
    if is_x_needed:
        buffer = torch.empty_like(parts)
        for part, share in zip(buffer, _columns(factor_a, len(parts)), strict=True):
            torch.mm(grad_z, share, out=part[:, : share.shape[1]])
        grad_x, in_flight = start_reduce_scatter(buffer, group, Label(chunk, "backward"))
    # the factor's gradient does not wait for the sum: it is computed while it travels
    if is_factor_needed:
        grad_a = torch.empty_like(factor_a, memory_format=torch.contiguous_format)
        for part, share in zip(parts, _columns(grad_a, len(parts)), strict=True):
            torch.mm(grad_z.t(), part[:, : share.shape[1]], out=share)
    if in_flight is not None:
        in_flight.wait()
    return grad_x, grad_a


def _columns(factor_a: Tensor, size: int) -> list[Tensor]:
    """Return the columns of ``A``, ``[r, in]``, that read each process's features, even none of them."""
    return [factor_a[:, slice(*shard_bounds(factor_a.shape[1], size, index))] for index in range(size)]


class GatherProject(torch.autograd.Function):
    """Compute ``A x`` where every process has a part of ``x`` and goes on with a part of the bottleneck.

    ``x`` is ``[N, d]``, as wide as the widest part, ``factor_a`` ``[r, in]``, ``z`` ``[N, r]``.

    Communication: forward one all-gather of ``N d`` values; backward one reduce-scatter of ``N S d``, in flight while
    the gradient of the factor is computed.
    Saved for backward: every process's ``x`` (and the parameter).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor_a: Tensor, group: str, chunk: str) -> Tensor:
        """Return ``z``."""
        parts = _gather_parts(x, group, chunk)
        ctx.save_for_backward(parts, factor_a)
        ctx.group, ctx.chunk = group, chunk
        z: Tensor = _project_parts(parts, factor_a)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_z: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``x`` and of the factor."""
        parts, factor_a = ctx.saved_tensors
        is_x_needed, is_factor_needed, *_ = ctx.needs_input_grad
        needed = [is_x_needed, is_factor_needed]
        grad_x, grad_a = _project_parts_backward(grad_z, parts, factor_a, needed, ctx.group, ctx.chunk)
        return grad_x if is_x_needed else None, grad_a if is_factor_needed else None, None, None


class ShardedVanillaNorm(VanillaNorm):
    """In a norm's place: RMSNorm of the whole hidden state, and this process's features of all projections behind it.

    Communication: forward one reduce-scatter of ``N Σout`` values; backward one all-gather of ``N Σout/tp``, and one
    all-reduce of ``N D`` in flight while the gradients of the factors into bottlenecks are computed.

    Args:
        norm: The norm that is replaced; its weight is replicated.
        eps: Its eps.
        members: What stands in its projections' places, in order; the very list that they joined.
        group: Name of the tensor axis's group.
        chunk: Label of the collectives.
    """

    def __init__(self, norm: nn.Module, eps: float, members: list[GroupMember], group: str, chunk: str) -> None:
        super().__init__(norm, eps, members, group, chunk)
        self.takes_latents = any(isinstance(member, LowRankMember) and member.latent_name for member in members)

    @override
    def forward(self, x: Tensor, latents: LayerLatents | None = None) -> Tensor:
        """Map ``[…, D]`` to what projections take their ``[…, out/tp]`` from; ``latents`` where they cross."""
        members: list[LowRankMember] = self.members
        parts = [
            activate_part(z, member, latents, self.group, self.chunk)
            for z, member in zip(self.latents(x), members, strict=True)
        ]
        factors_b = [member.upright(local(member.factor(member.names.factor_b))) for member in members]
        num_shares = [self._num_shares(member, len(factor)) for member, factor in zip(members, factors_b, strict=True)]
        y = apply(
            ExpandScatter,
            num_shares,
            self.group,
            self.chunk,
            *parts,
            *(factor.to(parts[0].dtype) for factor in factors_b),
        )
        places = _places(factors_b, num_shares, group_size(self.group), group_index(self.group))
        widths = [columns.stop - columns.start for _, columns in places]
        mine = y.split([*widths, y.shape[1] - sum(widths)], -1)[:-1]
        outputs = [
            # in memory of its own: of a view that backward keeps, all projections' outputs would be kept
            add_bias(part, member.output_bias(), member.rows, self.group, self.chunk).contiguous()
            for part, member in zip(mine, members, strict=True)
        ]
        return hand_out(outputs, x.shape[:-1], self.members)

    def _num_shares(self, member: LowRankMember, width: int) -> int:
        """Return into how many parts a projection's output is split."""
        return group_size(self.group) if member.rows is None else width // (member.rows[1] - member.rows[0])


class ShardedVanillaLinear(CommunicatingPair):
    """In the place of a projection without a norm in front of it.

    Communication: forward one all-gather of ``N d`` values and one all-reduce of ``N out``; backward one reduce-scatter
    of ``N S d``, in flight while the gradient of the factor into the bottleneck is computed.
    """

    @override
    def forward(self, x: Tensor, latents: LayerLatents | None = None) -> Tensor:
        """Map ``[…, in/tp]`` to ``[…, out]``; ``latents`` of the layer, where latents cross."""
        factor_a = self.local_a()
        dtype, share = gemm_dtype(factor_a), -(-factor_a.shape[1] // group_size(self.group))
        rows = x.flatten(0, -2).to(dtype)
        if rows.shape[1] < share:
            rows = pad(rows, (0, share - rows.shape[1]))
        z = GatherProject.apply(rows, factor_a.to(dtype), self.group, self.chunk)
        y = expand_reduce(activate_part(z, self, latents, self.group, self.chunk), self)
        return y.view(*x.shape[:-1], y.shape[-1])
