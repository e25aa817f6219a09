"""Two factors for one matrix: its best approximation with a narrow bottleneck, for any input or for those it will see.

Letters: ``W`` ``[out, in]`` the matrix, ``A`` ``[R, in]`` and ``B`` ``[out, R]`` its factors, ``C`` ``[in, in]`` the
mean of ``x xᵀ`` over inputs ``x``.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_DAMPING = 1e-6
"""Of the mean square of an input's features: what directions that no input has are taken to have."""

_ATTEMPTS = 4


@dataclass(frozen=True, kw_only=True)
class BottleneckRule:
    """How wide the bottleneck of a matrix is; one of the three.

    Raises:
        ValueError: If not exactly one is given, or it is out of range.
    """

    bottleneck_size: int | None = None
    """``R``, the same for all, or as much as a narrower matrix allows."""

    keep_ratio: float | None = None
    """Share of a matrix' parameters that its factors have at most: ``R (in + out) ≤ ratio · in · out``."""

    energy: float | None = None
    """Share of the sum of squared singular values that are kept at least."""

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            raise ValueError(
                f"exactly one of {', '.join(vars(self))} must be given to factorize;"
                f" given: {', '.join(given) or 'none'}."
            )
        if self.bottleneck_size is not None and (type(self.bottleneck_size) is not int or self.bottleneck_size < 1):
            raise ValueError(f"bottleneck_size ({self.bottleneck_size!r}) must be a whole number of at least 1.")
        for name in ("keep_ratio", "energy"):
            share = given.get(name)
            if share is not None and not 0.0 < share <= 1.0:
                raise ValueError(f"{name} ({share}) must be above 0 and at most 1.")

    def size_for(self, shape: tuple[int, int], singular_values: Tensor) -> int:
        """Return ``R`` for a matrix ``[out, in]`` with these singular values, in falling order."""
        if self.bottleneck_size is not None:
            return min(self.bottleneck_size, *shape)
        if self.keep_ratio is not None:
            return max(1, min(*shape, int(self.keep_ratio * shape[0] * shape[1] / sum(shape))))
        assert self.energy is not None
        energies = singular_values.double().square().cumsum(0)
        # where rounding keeps the last of them from reaching all
        reached = energies >= self.energy * energies[-1] * (1.0 - 1e-12)
        return int(reached.nonzero()[0]) + 1


class Factors(NamedTuple):
    """Two factors and how far they are from the matrix."""

    factor_a: Tensor
    factor_b: Tensor

    error: float
    """``‖W - BA‖ / ‖W‖``."""

    output_error: float | None
    """The same of the outputs of the inputs that were looked at; ``None`` without any."""


def factorize(weight: Tensor, rule: BottleneckRule, moment: Tensor | None = None) -> Factors:
    """Factorise a matrix.

    Without inputs ``BA`` is the nearest matrix to ``W``. With them it is the one whose outputs are nearest: with
    ``C = L Lᵀ`` the singular values of ``W L`` are cut off, and ``A`` gets ``L⁻¹``. Both factors get the square roots
    of the singular values.

    Args:
        weight: ``W``, in the dtype to compute in.
        rule: How wide the bottleneck is.
        moment: ``C``, in fp64.

    Raises:
        ValueError: If the singular values cannot be computed.

    Source: SVD-LLM's truncation-aware whitening for the form with inputs.
    """
    if moment is None:
        left, values, right = _svd(weight)
        size = rule.size_for((weight.shape[0], weight.shape[1]), values)
        whitened_error = None
        factor_a = values[:size].sqrt()[:, None] * right[:size]
    else:
        root = _cholesky(moment).to(weight.dtype)
        left, values, right = _svd(weight @ root)
        size = rule.size_for((weight.shape[0], weight.shape[1]), values)
        whitened_error = (values[size:].norm() / values.norm().clamp(min=1e-30)).item()
        cut = values[:size].sqrt()[:, None] * right[:size]
        factor_a = torch.linalg.solve_triangular(root, cut, upper=False, left=False)
    factor_b = left[:, :size] * values[:size].sqrt()
    error = ((weight - factor_b @ factor_a).norm() / weight.norm().clamp(min=1e-30)).item()
    return Factors(factor_a.contiguous(), factor_b.contiguous(), error, whitened_error)


def _cholesky(moment: Tensor) -> Tensor:
    """Return ``L``, lower triangular, of a moment to which as little is added as makes it definite."""
    mean = moment.diagonal().mean().clamp(min=1e-30)
    identity = torch.eye(len(moment), dtype=moment.dtype)
    for attempt in range(_ATTEMPTS):
        root: Tensor
        root, failed = torch.linalg.cholesky_ex(moment + _DAMPING * 100.0**attempt * mean * identity)
        if not failed:
            return root
    raise ValueError("the inputs that were looked at give no definite moment. Take more or other calibration text.")


def _svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    try:
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    except torch.linalg.LinAlgError:
        left, values, right = _svd_by_eigenvectors(matrix)
    if not all(part.isfinite().all() for part in (left, values, right)):
        raise ValueError("its singular values cannot be computed: look for extreme values in it.")
    return left, values, right


def _svd_by_eigenvectors(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the decomposition by another way, for the rare matrix that torch's does not converge on."""
    wide = matrix.double()
    if wide.shape[0] > wide.shape[1]:
        right, values, left = _svd_by_eigenvectors(matrix.t())
        return left.t(), values, right.t()
    squares, vectors = torch.linalg.eigh(wide @ wide.t())
    values, left = squares.flip(0).clamp(min=0.0).sqrt(), vectors.flip(1)
    right = left.t() @ wide / values.clamp(min=values[0] * 1e-12)[:, None]
    return left.to(matrix.dtype), values.to(matrix.dtype), right.to(matrix.dtype)
