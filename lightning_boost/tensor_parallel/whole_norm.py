"""RMSNorm of a hidden state that is whole on every process, as ``full_rank`` and vanilla have it.

Letters: ``N`` rows (micro-batch × tokens), ``D`` hidden.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_boost.model.norm import normalize
from lightning_boost.tensor_parallel.library import wide_dtype


class WholeNorm(torch.autograd.Function):
    """Compute ``y = γ x ρ`` with ``ρ = (mean(x²) + eps)^-½``, with the gradients in closed form.

    ``x`` is ``[N, D]``, ``gamma`` ``[D]``, ``y`` ``[N, D]``; all are the same on every process. With ``p = g x`` of the
    gradient ``g``: ``dγ = pᵀ ρ`` and ``dx = ρ γ g - ρ³/D (p γ) x``.

    Communication: none.
    Saved for backward: ``x`` (and the parameter); those of the same operations in torch are ``x`` in fp32 and the
    normalised values too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, eps: float) -> Tensor:
        """Return ``y``."""
        ctx.save_for_backward(x, gamma)
        ctx.eps = eps
        return gamma * normalize(x, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``x`` and ``gamma``."""
        x, gamma = ctx.saved_tensors
        wide_x, wide_grad, wide_gamma = (each.to(wide_dtype(x.dtype)) for each in (x, grad_y, gamma))
        rho = torch.rsqrt(wide_x.square().mean(-1) + ctx.eps)
        product = wide_grad * wide_x
        grad_gamma = torch.mv(product.t(), rho).to(gamma.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_gamma, None
        c = torch.mv(product, wide_gamma) * rho.pow(3) / x.shape[1]
        grad_x = (wide_grad * wide_gamma).mul_(rho[:, None]).addcmul_(wide_x, c[:, None], value=-1)
        return grad_x.to(x.dtype), grad_gamma, None


def whole_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Normalise a whole ``[…, D]`` and give it as rows, ``[N, D]``."""
    y: Tensor = WholeNorm.apply(x.flatten(0, -2), gamma, eps)
    return y
