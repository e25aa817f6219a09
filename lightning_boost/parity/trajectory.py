"""What a run leaves behind, and how far one run is from another."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

SMALLEST_CHANGE = 0.01
"""Share of a weight below which fp32 does not know a change to 1e-5."""


@dataclass
class Trajectory:
    """What one run of a few steps leaves behind."""

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step, whole, before clipping."""

    changes: dict[str, Tensor] = field(default_factory=dict)
    """Of every weight since the start, whole."""

    weight_norms: dict[str, float] = field(default_factory=dict)
    """Of every weight at the start."""


@dataclass(frozen=True)
class Errors:
    """The worst relative errors of one run against the oracle, and where they are."""

    loss: float
    gradient_norm: float
    gradient: float
    weight: float
    worst_gradient: str
    worst_weight: str


def compare(found: Trajectory, expected: Trajectory) -> Errors:
    """Return the relative errors of one run against another.

    Of a gradient: ``‖a - b‖ / max(‖b‖, 1e-6 · norm of all)``, so that rounding noise is not held against its own size.
    Of a weight: the same on its change since the start, which counts as a hundredth of the weight at least: fp32 holds
    a weight to 6e-8 of itself, and so a smaller change not to 1e-5. Of a number: ``|a - b| / |b|``.

    Raises:
        ValueError: If the runs do not hold the same parameters.
    """
    if found.gradients.keys() != expected.gradients.keys() or not expected.gradients:
        different = sorted(found.gradients.keys() ^ expected.gradients.keys())
        raise ValueError(f"the two runs do not have gradients of the same parameters: {different[:5]}.")
    gradients = _relative_errors(found.gradients, expected.gradients, floors={})
    floors = {name: SMALLEST_CHANGE * norm for name, norm in expected.weight_norms.items()}
    changes = _relative_errors(found.changes, expected.changes, floors=floors)
    return Errors(
        loss=_worst_relative(found.losses, expected.losses),
        gradient_norm=_worst_relative(found.gradient_norms, expected.gradient_norms),
        gradient=max(gradients.values()),
        weight=max(changes.values()),
        worst_gradient=max(gradients, key=lambda name: gradients[name]),
        worst_weight=max(changes, key=lambda name: changes[name]),
    )


def _relative_errors(
    found: dict[str, Tensor], expected: dict[str, Tensor], floors: dict[str, float]
) -> dict[str, float]:
    total = torch.stack([tensor.double().norm() for tensor in expected.values()]).norm().item()
    errors = {}
    for name, tensor in expected.items():
        scale = max(tensor.double().norm().item(), 1e-6 * total, floors.get(name, 0.0))
        error = ((found[name].double() - tensor.double()).norm() / scale).item()
        # a number that is none must not pass as small
        errors[name] = error if error == error else float("inf")
    return errors


def _worst_relative(found: list[float], expected: list[float]) -> float:
    pairs = zip(found, expected, strict=True)
    errors = [abs(mine - right) / abs(right) for mine, right in pairs]
    return max(error if error == error else float("inf") for error in errors)
