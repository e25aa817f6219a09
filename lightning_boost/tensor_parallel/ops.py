"""The two halves of a chunk: into the bottleneck with one all-reduce, out of it with one in backward.

Letters: ``N`` rows (micro-batch × tokens), ``D`` hidden, ``d = D/tp`` this process's share of a sharded feature dim,
``R`` the sum of a group's bottleneck sizes, ``w`` this process's output features of the group.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_boost.collectives import Label, all_reduce, group_index, group_size, start_all_reduce
from lightning_boost.kernels import operators
from lightning_boost.kernels.library import Operator
from lightning_boost.kernels.statistic import statistic_columns
from lightning_boost.tensor_parallel.library import gemm_flops, operator, wide_dtype

_NORM_PROJECT_REDUCE = "Tensor x, Tensor gamma, Tensor[] factors_a, float eps, int hidden_size, str group, str chunk"


def _norm_project_reduce_fake(
    x: Tensor,
    _: Tensor,
    factors_a: Sequence[Tensor],
    *__: Any,
) -> tuple[Tensor, Tensor]:
    z = factors_a[0].new_empty(x.shape[0], sum(factor.shape[0] for factor in factors_a))
    return z, z.new_empty(x.shape[0], 1, dtype=wide_dtype(z.dtype))


def _norm_project_reduce_activate_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    z, rho = _norm_project_reduce_fake(*args)
    return z, rho, torch.empty_like(z)


def _norm_project_reduce_flops(x: Sequence[int], _: Any, factors_a: Sequence[Sequence[int]], *__: Any) -> int:
    return gemm_flops(x[0], *factors_a)


@operator(
    f"norm_project_reduce({_NORM_PROJECT_REDUCE}) -> (Tensor, Tensor)",
    fake=_norm_project_reduce_fake,
    flops=_norm_project_reduce_flops,
    is_replicated=True,
)
def _norm_project_reduce(*args: Any) -> tuple[Tensor, Tensor]:
    z, rho, _ = _project(*args)
    return z, rho


def _norm_project_reduce_apart(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *others, activation = args
    z, rho = _norm_project_reduce(*others)
    return z, rho, operators.activate(z, activation)


@operator(
    f"norm_project_reduce_activate({_NORM_PROJECT_REDUCE}, str activation) -> (Tensor, Tensor, Tensor)",
    fake=_norm_project_reduce_activate_fake,
    flops=_norm_project_reduce_flops,
    apart=_norm_project_reduce_apart,
)
def _norm_project_reduce_activate(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _project(*args)


def _project(
    x: Tensor,
    gamma: Tensor,
    factors_a: Sequence[Tensor],
    eps: float,
    hidden_size: int,
    group: str,
    chunk: str,
    activation: str = "none",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``z``, ``ρ`` and ``σ(z)``, which is empty where σ is ``none``."""
    factor_a = torch.cat(list(factors_a))
    num_processes, width = group_size(group), factor_a.shape[0]
    # the GEMM writes into the buffer that is reduced: no copy between them
    buffer = factor_a.new_empty(x.shape[0], width + statistic_columns(factor_a.dtype, num_processes))
    scaled = operators.norm_input(x, gamma, buffer[:, width:], group_index(group))
    torch.mm(scaled, factor_a.t(), out=buffer[:, :width])
    all_reduce(buffer, group, Label(chunk, "forward"))
    results: tuple[Tensor, Tensor, Tensor] = operators.norm_latent(
        buffer, width, num_processes, hidden_size, eps, activation
    )
    return results


@operator(
    "project_back(Tensor u, Tensor[] factors_a) -> Tensor",
    fake=lambda u, factors_a: u.new_empty(u.shape[0], factors_a[0].shape[1]),
    flops=lambda u, factors_a: gemm_flops(u[0], *factors_a),
)
def _project_back(u: Tensor, factors_a: Sequence[Tensor]) -> Tensor:
    return torch.mm(u, torch.cat(list(factors_a)))


class NormProjectReduce(torch.autograd.Function):
    """Compute ``σ(z)``, ``z = ρ · Σ A(γ x)``, ``ρ = (Σ x²/D + eps)^-½``: online RMSNorm, grouped A, one all-reduce.

    ρ is common to a token, so it may be applied after the sum over processes; both sums then travel together.

    ================  ===============  ==========================================
    tensor            this process     note
    ================  ===============  ==========================================
    ``x``             ``[N, d]``       sharded over features
    ``gamma``         ``[d]``          sharded over features
    ``factors_a``     ``[R_i, d]``     row-parallel, in the dtype of the GEMM
    ``z``, ``σ(z)``   ``[N, R]``       whole, in that dtype
    ``ρ``             ``[N, 1]``       whole, fp32 at least; not differentiable
    ================  ===============  ==========================================

    Communication: forward one all-reduce of ``N (R + statistic columns)`` values; backward none, given that the
    gradient of ``σ(z)`` is already summed over the group. With ``g`` that of ``z``, ``u = ρ g``, ``t = Aᵀ u`` and
    ``c = ρ²/D ⟨g, z⟩``: ``dx = γ t - c x``, ``dγ = Σ_N x t``, ``dA = uᵀ (γ x)``. The inner product that RMSNorm's
    backward takes over ``D`` features is taken over the ``R`` whole ones instead, which every process has.

    Saved for backward: ``x``, ``z``, ``ρ`` (and the parameters).
    Source: the BOOST paper's online RMSNorm, in its deferred form (docs/how_it_works/online_rms_norm.md).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor,
        eps: float,
        hidden_size: int,
        group: str,
        chunk: str,
        activation: str,
        *factors_a: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return ``σ(z)`` and ``ρ``; ``activation`` is the name of σ, ``none`` where there is none."""
        given = x, gamma, factors_a, eps, hidden_size, group, chunk
        if activation == "none":
            z, rho = _norm_project_reduce(*given)
            activated = z
        elif torch.compiler.is_compiling():
            # recompute keeps the results of single operators
            z, rho, activated = _norm_project_reduce_apart(*given, activation)
        else:
            z, rho, activated = _norm_project_reduce_activate(*given, activation)
        ctx.save_for_backward(x, gamma, z, rho, *factors_a)
        ctx.mark_non_differentiable(rho)
        ctx.hidden_size, ctx.activation = hidden_size, activation
        return activated, rho

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``x``, ``gamma`` and the factors."""
        x, gamma, z, rho, *factors_a = ctx.saved_tensors
        is_factor_needed = any(ctx.needs_input_grad[-len(factors_a) :])
        u, c = operators.norm_latent_backward(grad, z, rho, ctx.hidden_size, ctx.activation)
        # a compiler would put the factors together in forward, and keep that
        t = _project_back(u, factors_a) if torch.compiler.is_compiling() else torch.mm(u, torch.cat(factors_a))
        grad_x, grad_gamma, scaled = operators.norm_input_backward(x, gamma, t, c, is_factor_needed)
        grads_a: Sequence[Tensor | None] = [None] * len(factors_a)
        if is_factor_needed:
            grads_a = torch.mm(u.t(), scaled).split([factor.shape[0] for factor in factors_a])
        return grad_x, grad_gamma, *[None] * 5, *grads_a


@operator(
    "project_reduce(Tensor x, Tensor factor_a, str group, str chunk) -> Tensor",
    fake=lambda x, factor_a, *_: factor_a.new_empty(x.shape[0], factor_a.shape[0]),
    flops=lambda x, factor_a, *_: gemm_flops(x[0], factor_a),
    is_replicated=True,
)
def _project_reduce(x: Tensor, factor_a: Tensor, group: str, chunk: str) -> Tensor:
    z = torch.mm(x.to(factor_a.dtype), factor_a.t())
    all_reduce(z, group, Label(chunk, "forward"))
    return z


class ProjectReduce(torch.autograd.Function):
    """Compute ``z = Σ A x`` for a projection that no norm stands in front of (o, down).

    ``x`` is ``[N, d]``, ``factor_a`` ``[R, d]``, ``z`` ``[N, R]`` whole.

    Communication: forward one all-reduce of ``N R`` values; backward none, the gradient of ``z`` being whole.
    Saved for backward: ``x`` (and the parameter).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor_a: Tensor, group: str, chunk: str) -> Tensor:
        """Return ``z``."""
        ctx.save_for_backward(x, factor_a)
        z: Tensor = _project_reduce(x, factor_a, group, chunk)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_z: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``x`` and the factor."""
        x, factor_a = ctx.saved_tensors
        is_x_needed, is_factor_needed, *_ = ctx.needs_input_grad
        grad_x = torch.mm(grad_z, factor_a).to(x.dtype) if is_x_needed else None
        grad_a = torch.mm(grad_z.t(), x.to(factor_a.dtype)) if is_factor_needed else None
        return grad_x, grad_a, None, None


@operator(
    "expand(Tensor z, Tensor[] factors_b) -> Tensor[]",
    fake=lambda z, factors_b: [z.new_empty(z.shape[0], factor.shape[0]) for factor in factors_b],
    flops=lambda z, factors_b: gemm_flops(z[0], *factors_b),
)
def _expand(z: Tensor, factors_b: Sequence[Tensor]) -> list[Tensor]:
    latents = z.split([factor.shape[1] for factor in factors_b], -1)
    return [torch.mm(latent, factor.t()) for latent, factor in zip(latents, factors_b, strict=True)]


def expand_backward_fake(
    _: Sequence[Tensor], z: Tensor, factors_b: Sequence[Tensor], needed: Sequence[bool], *__: Any
) -> tuple[Tensor, list[Tensor]]:
    """Return empty gradients of what projections read, and of their weights; none of those that are not needed."""
    is_z_needed, *are_factors_needed = needed
    grads_b = [
        z.new_empty(factor.shape) if is_needed else z.new_empty(0)
        for factor, is_needed in zip(factors_b, are_factors_needed, strict=True)
    ]
    return torch.empty_like(z) if is_z_needed else z.new_empty(0), grads_b


def expand_backward_flops(
    grads_y: Sequence[Sequence[int]], _: Any, factors_b: Sequence[Sequence[int]], needed: Sequence[bool], *__: Any
) -> int:
    """Return the FLOPs of the gradients of what projections read, and of those of their weights that are needed."""
    is_z_needed, *are_factors_needed = needed
    products = [*factors_b] * is_z_needed + [
        factor for factor, each in zip(factors_b, are_factors_needed, strict=True) if each
    ]
    return gemm_flops(grads_y[0][0], *products)


@operator(
    "expand_backward(Tensor[] grads_y, Tensor z, Tensor[] factors_b, bool[] needed, str group, str chunk)"
    " -> (Tensor, Tensor[])",
    fake=expand_backward_fake,
    flops=expand_backward_flops,
)
def _expand_backward(
    grads_y: Sequence[Tensor], z: Tensor, factors_b: Sequence[Tensor], needed: Sequence[bool], group: str, chunk: str
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of ``z`` and of the factors; empty ones where ``needed`` says so, ``z`` first."""
    is_z_needed, *are_factors_needed = needed
    sizes = [factor.shape[1] for factor in factors_b]
    grad_z, in_flight = z.new_empty(0), None
    if is_z_needed:
        # side by side, as they are reduced: no copy between them
        grad_z = torch.empty_like(z)
        for grad, factor, part in zip(grads_y, factors_b, grad_z.split(sizes, -1), strict=True):
            torch.mm(grad, factor, out=part)
        in_flight = start_all_reduce(grad_z, group, Label(chunk, "backward"))
    # the factors' gradients do not wait for the sum: they are computed while it travels
    grads_b = [
        torch.mm(grad.t(), latent) if is_needed else z.new_empty(0)
        for grad, latent, is_needed in zip(grads_y, z.split(sizes, -1), are_factors_needed, strict=True)
    ]
    if in_flight is not None:
        in_flight.wait()
    return grad_z, grads_b


class Expand(torch.autograd.Function):
    """Compute every projection's ``B z`` of a group.

    Each has an output of its own: laid side by side they would have to be cut, and their gradients put together again.

    ================  ===============  ==========================================
    tensor            this process     note
    ================  ===============  ==========================================
    ``z``             ``[N, R]``       whole latents, σ applied
    ``factors_b``     ``[w_i, R_i]``   column-parallel
    ``y_i``           ``[N, w_i]``     this process's features of each projection
    ================  ===============  ==========================================

    Communication: forward none; backward one all-reduce of ``N R`` values, in flight while the gradients of the
    factors are computed; none where nothing below is trained.
    Saved for backward: ``z`` (and the parameters).
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, group: str, chunk: str, *factors_b: Tensor) -> tuple[Tensor, ...]:
        """Return every ``y_i``."""
        ctx.save_for_backward(z, *factors_b)
        ctx.group, ctx.chunk = group, chunk
        return tuple(_expand(z, factors_b))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_y: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``z``, whole, and of the factors."""
        return group_gradients(ctx, grads_y, _expand_backward)


def group_gradients(ctx: Any, grads_y: Sequence[Tensor], backward: Operator) -> tuple[Tensor | None, ...]:
    """Return the gradients of an autograd function of ``(x, group, chunk, *weights)`` with an output for each weight.

    Args:
        ctx: Of the function, which has saved ``x`` and the weights.
        grads_y: Of the outputs.
        backward: Computes those that are needed.
    """
    x, *weights = ctx.saved_tensors
    is_x_needed, _, _, *are_weights_needed = ctx.needs_input_grad
    needed = [is_x_needed, *are_weights_needed]
    grad_x, grads_w = backward(grads_y, x, weights, needed, ctx.group, ctx.chunk)
    gradients = [grad if is_needed else None for grad, is_needed in zip((grad_x, *grads_w), needed, strict=True)]
    return gradients[0], None, None, *gradients[1:]
