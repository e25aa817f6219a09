"""Every kernel in plain torch, with the signature of its Triton twin: what the CPU runs, and what tests compare with.

Letters: ``N`` rows (micro-batch × tokens), ``d`` this process's share of the hidden features, ``R`` latents, ``C``
columns of the statistic. Arithmetic is in fp32 at least, and results are rounded once where the twin rounds.
"""

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from lightning_boost.kernels.statistic import read_statistic, write_statistic


def norm_input(x: Tensor, gamma: Tensor, columns: Tensor, index: int) -> Tensor:
    """Return ``γ x``, ``[N, d]`` in the dtype of ``columns``, and write ``Σ x²`` into them.

    Args:
        x: ``[N, d]``.
        gamma: ``[d]``.
        columns: Of the statistic, ``[N, C]``; overwritten.
        index: This process's position in the group.
    """
    wide = _widen(x)
    write_statistic(columns, wide.square().sum(-1), index)
    return (wide * gamma).to(columns.dtype)


def norm_input_backward(
    x: Tensor, gamma: Tensor, t: Tensor, c: Tensor, is_scaled_needed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``dx = γ t - c x``, ``dγ = Σ_N x t`` and, if needed, ``γ x`` once more, in the dtype of ``t``.

    Args:
        x: ``[N, d]``.
        gamma: ``[d]``.
        t: ``Aᵀ u``, ``[N, d]``.
        c: ``[N, 1]``.
        is_scaled_needed: Whether the factors are trained; if not, the last result is empty.
    """
    wide, wide_t = _widen(x), t.to(c.dtype)
    # one temporary after another in the same memory: new pages cost as much as the arithmetic
    work = wide * wide_t
    grad_gamma = work.sum(0).to(gamma.dtype)
    grad_x = torch.mul(gamma, wide_t, out=work).addcmul_(c, wide, value=-1).to(x.dtype)
    scaled = (wide * gamma).to(t.dtype) if is_scaled_needed else t.new_empty(0)
    return grad_x, grad_gamma, scaled


def norm_latent(
    buffer: Tensor, width: int, num_processes: int, hidden_size: int, eps: float, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``z = ρ u``, ``ρ = (Σ x²/D + eps)^-½`` and ``σ(z)``.

    Args:
        buffer: ``u`` and the statistic's columns, ``[N, R + C]``, summed over the group.
        width: ``R``.
        num_processes: Size of the group.
        hidden_size: ``D``.
        eps: Added to the mean square.
        activation: Name of σ; where ``none``, the last result is empty.

    Returns:
        ``z`` ``[N, R]`` and ``σ(z)`` in the dtype of ``buffer``; ``ρ`` ``[N, 1]``, fp32 at least.
    """
    latents, columns = buffer[:, :width], buffer[:, width:]
    rho = torch.rsqrt(read_statistic(columns, num_processes) / hidden_size + eps)
    z = (latents * rho).to(buffer.dtype)
    return z, rho, z.new_empty(0) if activation == "none" else activate(z, activation)


def norm_latent_backward(
    grad: Tensor, z: Tensor, rho: Tensor, hidden_size: int, activation: str
) -> tuple[Tensor, Tensor]:
    """Return ``u' = ρ g`` and ``c = ρ²/D ⟨g, z⟩`` with ``g = σ'(z) grad``.

    Args:
        grad: Of ``σ(z)``, ``[N, R]``, summed over the group.
        z: ``[N, R]``.
        rho: ``[N, 1]``.
        hidden_size: ``D``.
        activation: Name of σ.

    Returns:
        ``u'`` ``[N, R]`` in the dtype of ``z``, ``c`` ``[N, 1]`` in that of ``ρ``.
    """
    wide = activate_backward(grad, z, activation).to(rho.dtype)
    work = wide * z
    c = work.sum(-1, keepdim=True) * rho.square() / hidden_size
    return torch.mul(wide, rho, out=work).to(z.dtype), c


def gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return ``φ(gate) · up``, all of one shape; ``activation`` is the name of φ."""
    return activate(gate, activation) * up


def gated_activation_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``gate`` and ``up``."""
    return activate_backward(grad * up, gate, activation), grad * activate(gate, activation)


def rotary(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn heads by their positions' angles.

    Args:
        heads: ``[B, H, T, E]``.
        cosines: ``[T, E]`` or ``[B, 1, T, E]``.
        sines: As ``cosines``.
    """
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat([-second, first], dim=-1) * sines


def rotary_backward(grad: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn the gradient of turned heads back; shapes as ``rotary``."""
    first, second = (grad * sines).chunk(2, dim=-1)
    return grad * cosines + torch.cat([second, -first], dim=-1)


def cross_entropy_parts(logits: Tensor, targets: Tensor, smoothing: float, spread: float) -> Tensor:
    """Return what this process adds to each row's loss.

    Args:
        logits: Of this process's share of the vocabulary, ``[N, v]``, fp32 at least; what ``cross_entropy_gradient``
            makes the gradient from is written over them.
        targets: Counted from the share's first token, ``[N]``; those outside of it are other processes'.
        smoothing: ``ε``.
        spread: ``ε/V``.

    Returns:
        A row's maximum, its sum of exponentials below that and its part of what is subtracted, ``[3, N]``, fp32 at
        least.
    """
    num_rows, width = logits.shape
    if width:
        maximum = logits.amax(-1)
        chosen = logits.gather(-1, targets.clamp(0, width - 1)[:, None])[:, 0]
        subtracted = (1.0 - smoothing) * chosen.masked_fill(~_is_mine(targets, width), 0.0)
    else:
        maximum, subtracted = logits.new_full((num_rows,), -torch.inf), logits.new_zeros(num_rows)
    if spread:
        subtracted = subtracted + spread * logits.sum(-1)
    exponentials = logits.sub_(maximum[:, None]).exp_()
    return torch.stack([maximum, exponentials.sum(-1), subtracted])


def cross_entropy_gradient(
    work: Tensor,
    targets: Tensor,
    parts: Tensor,
    maxima: Tensor,
    sums: Tensor,
    scale: Tensor,
    smoothing: float,
    spread: float,
) -> None:
    """Write the gradient of the logits over what ``cross_entropy_parts`` has left in their place, ``[N, v]``.

    Args:
        work: What was left there; overwritten.
        targets: As there.
        parts: From there, ``[3, N]``.
        maxima: Of whole rows, ``[N]``.
        sums: Of whole rows' exponentials below their maxima, ``[N]``.
        scale: That each row's gradient is multiplied with, ``[N]``.
        smoothing: As there.
        spread: As there.
    """
    width = work.shape[1]
    gradient = work.mul_(((parts[0] - maxima).exp() / sums)[:, None])
    if width:
        chosen = -(1.0 - smoothing) * _is_mine(targets, width).to(work.dtype)
        gradient.scatter_add_(-1, targets.clamp(0, width - 1)[:, None], chosen[:, None])
    if spread:
        gradient.sub_(spread)
    gradient.mul_(scale[:, None])


def activate(z: Tensor, activation: str) -> Tensor:
    """Return ``σ(z)`` by the name of σ."""
    if activation == "none":
        return z
    if activation.startswith("gelu"):
        return gelu(z, approximate="tanh" if activation == "gelu_tanh" else "none")
    activated: Tensor = {"silu": silu, "relu": torch.relu, "tanh": torch.tanh}[activation](z)
    return activated


def activate_backward(grad: Tensor, z: Tensor, activation: str) -> Tensor:
    """Return ``σ'(z) grad``, as torch's own backward of σ does."""
    aten = torch.ops.aten
    if activation == "none":
        return grad
    if activation == "silu":
        result = aten.silu_backward(grad, z)
    elif activation == "relu":
        result = aten.threshold_backward(grad, z, 0)
    elif activation == "tanh":
        result = aten.tanh_backward(grad, torch.tanh(z))
    else:
        result = aten.gelu_backward(grad, z, approximate="tanh" if activation == "gelu_tanh" else "none")
    gradient: Tensor = result
    return gradient


def _is_mine(targets: Tensor, width: int) -> Tensor:
    return (targets >= 0) & (targets < width)


def _widen(tensor: Tensor) -> Tensor:
    """Return a tensor in fp32, or in fp64 if it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
