"""Scheme ``vanilla``: every pair of factors by itself in Megatron's form, the baseline of the BOOST paper.

``A`` is split over the bottleneck, column-parallel, and ``B`` with it, row-parallel: what a pair gives is summed over
processes at full width. These are the halves of scheme ``bottleneck`` changed round: the sum comes behind ``B``, its
mirror in backward behind ``A``.

====================  =================================================================================
in the place of       stands
====================  =================================================================================
a norm                ``VanillaNorm``: the norm of the whole hidden state and every ``A`` that reads it
such a projection     ``VanillaMember``: takes its latents; σ, ``B``, and one all-reduce
o, down               ``VanillaLinear``: ``A``, σ, ``B``, and one all-reduce
the ends              as in scheme ``full_rank``
====================  =================================================================================

Between projections everything is whole on every process: attention and the gate are computed by each of them. Scheme
``vanilla_sharded`` (``vanilla_sharded.py``) gives each process its own heads and features there.

Where latents cross from layer to layer, each is gathered to do so: 7 all-gathers of ``R/tp`` more in each pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from typing_extensions import override

from lightning_boost.collectives import Label, Pass, all_gather, group_index, group_size, start_all_reduce
from lightning_boost.mesh import shard_bounds
from lightning_boost.model.crossing import LayerLatents
from lightning_boost.tensor_parallel.bottleneck import CommunicatingPair, FactorPair, activate
from lightning_boost.tensor_parallel.handing_out import GroupedNorm, GroupMember, hand_out
from lightning_boost.tensor_parallel.library import apply, gemm_dtype, gemm_flops, operator
from lightning_boost.tensor_parallel.local_parameter import local, local_size
from lightning_boost.tensor_parallel.ops import ProjectReduce
from lightning_boost.tensor_parallel.whole_norm import whole_norm


@operator(
    "project_whole(Tensor x, Tensor[] factors_a) -> Tensor",
    fake=lambda x, factors_a: x.new_empty(x.shape[0], sum(factor.shape[0] for factor in factors_a)),
    flops=lambda x, factors_a: gemm_flops(x[0], *factors_a),
)
def _project_whole(x: Tensor, factors_a: Sequence[Tensor]) -> Tensor:
    return torch.mm(x, torch.cat(list(factors_a)).t())


def _project_whole_backward_fake(
    grad_z: Tensor, x: Tensor, _: Sequence[Tensor], needed: Sequence[bool], *__: Any
) -> tuple[Tensor, Tensor]:
    is_x_needed, are_factors_needed = needed
    return (
        x.new_empty(x.shape if is_x_needed else 0),
        x.new_empty((grad_z.shape[1], x.shape[1]) if are_factors_needed else 0),
    )


@operator(
    "project_whole_backward(Tensor grad_z, Tensor x, Tensor[] factors_a, bool[] needed, str group, str chunk)"
    " -> (Tensor, Tensor)",
    fake=_project_whole_backward_fake,
    flops=lambda grad_z, _, factors_a, needed, *__: sum(needed) * gemm_flops(grad_z[0], *factors_a),
)
def _project_whole_backward(
    grad_z: Tensor, x: Tensor, factors_a: Sequence[Tensor], needed: Sequence[bool], group: str, chunk: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``x`` and of all factors; empty ones where ``needed`` says so."""
    is_x_needed, are_factors_needed = needed
    grad_x, grad_a, in_flight = x.new_empty(0), x.new_empty(0), None
    if is_x_needed:
        grad_x = torch.mm(grad_z, torch.cat(list(factors_a)))
        in_flight = start_all_reduce(grad_x, group, Label(chunk, "backward"))
    # the factors' gradients do not wait for the sum: they are computed while it travels
    if are_factors_needed:
        grad_a = torch.mm(grad_z.t(), x)
    if in_flight is not None:
        in_flight.wait()
    return grad_x, grad_a


class ProjectWhole(torch.autograd.Function):
    """Compute ``A x`` of every projection that reads a whole ``x``, each process a part of each bottleneck.

    ``x`` is ``[N, in]``, ``factors_a`` ``[R_i/tp, in]`` each, ``z`` ``[N, ΣR_i/tp]``.

    Communication: forward none; backward one all-reduce of ``N in`` values, in flight while the gradients of the
    factors are computed.
    Saved for backward: ``x`` (and the parameters).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, chunk: str, *factors_a: Tensor) -> Tensor:
        """Return ``z``."""
        ctx.save_for_backward(x, *factors_a)
        ctx.group, ctx.chunk = group, chunk
        z: Tensor = _project_whole(x, factors_a)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_z: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``x``, whole, and of the factors."""
        x, *factors_a = ctx.saved_tensors
        is_x_needed, are_factors_needed = ctx.needs_input_grad[0], any(ctx.needs_input_grad[3:])
        needed = [is_x_needed, are_factors_needed]
        grad_x, grad_a = _project_whole_backward(grad_z, x, factors_a, needed, ctx.group, ctx.chunk)
        grads_a: Sequence[Tensor | None] = [None] * len(factors_a)
        if are_factors_needed:
            grads_a = grad_a.split([factor.shape[0] for factor in factors_a])
        return grad_x if is_x_needed else None, None, None, *grads_a


@operator(
    "gather_bottleneck(Tensor part, int width, str group, str chunk, str pass_) -> Tensor",
    fake=lambda part, width, *_: part.new_empty(part.shape[0], width),
    is_replicated=True,
)
def _gather_bottleneck(part: Tensor, width: int, group: str, chunk: str, pass_: Pass) -> Tensor:
    share = -(-width // group_size(group))
    parts = all_gather(pad(part, (0, share - part.shape[-1])).contiguous(), group, Label(chunk, pass_))
    return parts.transpose(0, 1).flatten(1)[:, :width].contiguous()


class WholeBottleneck(torch.autograd.Function):
    """Gather parts ``[N, R/tp]`` of latents to ``[N, R]``, whose gradient every process has whole: backward cuts it.

    Communication: forward one all-gather of ``N ⌈R/tp⌉`` values.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, width: int, group: str, chunk: str) -> Tensor:
        """Return the whole latents."""
        ctx.width, ctx.group = width, group
        whole: Tensor = _gather_bottleneck(part, width, group, chunk, "forward")
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of this process's part."""
        return _own_part(grad, ctx.width, ctx.group), None, None, None


class OwnBottleneck(torch.autograd.Function):
    """Cut latents ``[N, R]``, whole on every process, to parts ``[N, R/tp]``; backward gathers their gradients.

    Communication: backward one all-gather of ``N ⌈R/tp⌉`` values.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: str, chunk: str) -> Tensor:
        """Return this process's part."""
        ctx.width, ctx.group, ctx.chunk = whole.shape[1], group, chunk
        return _own_part(whole, ctx.width, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the whole gradient."""
        return _gather_bottleneck(grad, ctx.width, ctx.group, ctx.chunk, "backward"), None, None


def _own_part(whole: Tensor, width: int, group: str) -> Tensor:
    start, stop = shard_bounds(width, group_size(group), group_index(group))
    return whole[:, start:stop].contiguous()


class VanillaMember(GroupMember, CommunicatingPair):
    """In the place of a projection behind a norm.

    Communication: forward one all-reduce of ``N out`` values, backward none.
    """

    @override
    def forward(self, outputs: Tensor, latents: LayerLatents | None = None) -> Tensor:
        """Map this projection's latents of the group's, ``[…, R/tp]``, to ``[…, out]``.

        ``latents`` of the layer, where latents cross.
        """
        return expand_reduce(activate_part(super().forward(outputs), self, latents, self.group, self.chunk), self)


class VanillaNorm(GroupedNorm):
    """In a norm's place: RMSNorm of the whole hidden state, and this process's latents of all projections behind it.

    ``weight`` is replicated.
    Communication: forward none, backward one all-reduce of ``N D`` values, in flight while the factors' gradients are
    computed.
    """

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map ``[…, D]`` to what projections take their latents ``[…, R_i/tp]`` from, before σ."""
        return hand_out(self.latents(x), x.shape[:-1], self.members)

    def latents(self, x: Tensor) -> Sequence[Tensor]:
        """Return this process's latents of every projection, ``[N, R_i/tp]``, before σ."""
        pairs: list[FactorPair] = self.members
        hidden = whole_norm(x, local(self.weight), self.eps)
        side_by_side = into_bottleneck(hidden, [pair.local_a() for pair in pairs], self.group, self.chunk)
        parts: Sequence[Tensor] = side_by_side.split([own_bottleneck(pair) for pair in pairs], -1)
        return parts


class VanillaLinear(CommunicatingPair):
    """In the place of a projection without a norm in front of it.

    Communication: forward one all-reduce of ``N out`` values, backward one of ``N in``.
    """

    @override
    def forward(self, x: Tensor, latents: LayerLatents | None = None) -> Tensor:
        """Map ``[…, in]`` to ``[…, out]``; ``latents`` of the layer, where latents cross."""
        z = into_bottleneck(x, [self.local_a()], self.group, self.chunk)
        z = z.view(*x.shape[:-1], z.shape[-1])
        return expand_reduce(activate_part(z, self, latents, self.group, self.chunk), self)


def activate_part(a: Tensor, pair: FactorPair, latents: LayerLatents | None, group: str, chunk: str) -> Tensor:
    """Apply a pair's σ to this process's part of its latent, ``[…, R/tp]``.

    Where latents cross, a gate and a norm need the latent whole: it is gathered, all of it is activated and given on,
    and this process goes on with its part.

    Communication: where latents cross one all-gather of ``N ⌈R/tp⌉`` values forward and one backward.
    """
    if latents is None:
        return activate(a, [pair])
    whole: Tensor = WholeBottleneck.apply(a.flatten(0, -2), pair.bottleneck_size, group, chunk)
    mine: Tensor = OwnBottleneck.apply(activate(whole, [pair], latents), group, chunk)
    return mine.view(*a.shape[:-1], mine.shape[-1])


def own_bottleneck(pair: FactorPair) -> int:
    """Return this process's part of a pair's bottleneck."""
    return local_size(pair.factor(pair.names.factor_a), 1 - pair.names.in_dim)


def into_bottleneck(x: Tensor, factors_a: Sequence[Tensor], group: str, chunk: str) -> Tensor:
    """Map a whole ``[…, in]`` to this process's latents of every projection, side by side: ``[N, ΣR_i/tp]``."""
    dtype = gemm_dtype(factors_a[0])
    z: Tensor = apply(ProjectWhole, x.flatten(0, -2).to(dtype), group, chunk, *(each.to(dtype) for each in factors_a))
    return z


def expand_reduce(z: Tensor, pair: CommunicatingPair) -> Tensor:
    """Map this process's latents ``[…, R/tp]`` to a pair's whole output ``[…, out]``, the bias added once."""
    factor_b, bias = pair.local_b(pair.group, pair.chunk), pair.output_bias()
    y: Tensor = ProjectReduce.apply(z.flatten(0, -2), factor_b.to(z.dtype), pair.group, pair.chunk)
    y = y.view(*z.shape[:-1], y.shape[-1])
    return y if bias is None else y + local(bias).to(y.dtype)
