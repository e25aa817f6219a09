"""Latent crossing: a projection's latent receives that of the projection of the same name in the layer before.

With ``a = A x`` of layer ``l`` and ``z`` what layer ``l - 1`` gave on, a layer computes ``u = LN(a + gate(z))``, gives
``σ(u)`` on and goes on with ``B σ(u)``. Latents are of single positions, so nothing of this looks at other tokens.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from typing_extensions import override

from lightning_boost.config import GateKind
from lightning_boost.divisors import balanced_divisors

NORM_EPS = 1e-6
"""Added to the variance of a latent."""

Latents = dict[str, Tensor]
"""What one layer gives on to the next, ``[…, R]``, by the name of the projection."""


class LinearGate(nn.Linear):
    """Compute ``W z + b``; the only gate between latents of different widths."""


class TensorGate(nn.Module):
    """Compute ``Dᵀ Z E``, with the latent of ``R = p·q`` features as a matrix ``Z`` of ``[p, q]``.

    That is ``z (D ⊗ E)``, a matrix of ``R²`` values written with ``p² + q²`` of them; ``p`` and ``q`` are as near to
    one another as ``R`` can be divided.

    Args:
        bottleneck_size: ``R``.
    """

    def __init__(self, bottleneck_size: int) -> None:
        super().__init__()
        rows, columns = balanced_divisors(bottleneck_size)
        self.row_weight = nn.Parameter(torch.empty(rows, rows))
        """``D``."""
        self.column_weight = nn.Parameter(torch.empty(columns, columns))
        """``E``."""

    @override
    def forward(self, z: Tensor) -> Tensor:
        """Map ``[…, R]`` to ``[…, R]``."""
        matrix = z.unflatten(-1, (len(self.row_weight), len(self.column_weight)))
        # both weights stand on the right: two products over all tokens, instead of a small one for each of them
        rows = torch.matmul(matrix.transpose(-2, -1), self.row_weight)
        return torch.matmul(rows.transpose(-2, -1), self.column_weight).flatten(-2)


class LatentNorm(nn.Module):
    """Layer norm over a latent's ``R`` features, with weight and bias.

    Args:
        bottleneck_size: ``R``.
    """

    def __init__(self, bottleneck_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(bottleneck_size))
        self.bias = nn.Parameter(torch.zeros(bottleneck_size))

    @override
    def forward(self, u: Tensor) -> Tensor:
        """Normalise ``[…, R]``."""
        return layer_norm(u, self.weight.shape, self.weight, self.bias, NORM_EPS)


class Crossing(nn.Module):
    """Where a latent of the layer before comes in: ``LN(a + gate(z))``.

    Args:
        before: Width of the latent of the layer before.
        here: Width of this layer's, ``R``.
        gate: Which one.
    """

    def __init__(self, before: int, here: int, gate: GateKind) -> None:
        super().__init__()
        self.gate = _make_gate(before, here, gate)
        self.norm = LatentNorm(here)

    @override
    def forward(self, a: Tensor, z: Tensor) -> Tensor:
        """Map ``a`` ``[…, R]`` and the latent of the layer before to what σ is applied to, ``[…, R]``."""
        # in the dtype of the matrix products, which a layer norm leaves under autocast
        normalized: Tensor = self.norm(a + self.gate(z)).to(a.dtype)
        return normalized


class LayerLatents:
    """The latents of one run of one layer: those of the layer before, and those that this one gives on.

    It lives as long as the run: a layer that keeps latents would mix up the micro-batches of a pipeline, and the two
    runs of recompute.

    Args:
        crossings: The layer's, by the name of the projection.
        before: What the layer before gave on.
    """

    def __init__(self, crossings: nn.ModuleDict, before: Latents) -> None:
        self._crossings = crossings
        self._before = before
        self.given: Latents = {}
        """What this layer gives on."""

    def receive(self, name: str, a: Tensor) -> Tensor:
        """Let the latent of the layer before come in.

        Args:
            name: Of the projection.
            a: ``A x``, ``[…, R]``; whole, where processes share the projection.

        Returns:
            What σ is applied to: ``a`` itself in the first layer.
        """
        if name not in self._crossings:
            return a
        before = self._before[name]
        u: Tensor = self._crossings[name](a, before.view(*a.shape[:-1], before.shape[-1]))
        return u

    def give(self, name: str, z: Tensor) -> None:
        """Give a projection's latent, σ applied, on to the next layer."""
        self.given[name] = z


def call(module: nn.Module, x: Tensor, latents: LayerLatents | None) -> Tensor:
    """Call a projection or a norm of a layer, with the layer's latents if it crosses, or does in the place of one."""
    output: Tensor = (
        module(x, latents) if latents is not None and getattr(module, "takes_latents", False) else module(x)
    )
    return output


def gate_bound(gate: LinearGate | TensorGate, parameter: str) -> float:
    """Return the bound of the uniform values that a gate's parameter starts from."""
    if isinstance(gate, LinearGate):
        return float(gate.in_features**-0.5)
    return float((6 / len(gate.get_parameter(parameter))) ** 0.5)


def _make_gate(before: int, here: int, gate: GateKind) -> nn.Module:
    if gate == "linear":
        return LinearGate(before, here)
    return TensorGate(here) if gate == "tensor" else nn.Identity()
