"""What is trained, and at which rate: parameters chosen by patterns of their names, and the schedule."""

import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

Group = dict[str, Any]


def choose_trained(model: nn.Module, trained: Sequence[str], frozen: Sequence[str]) -> None:
    """Freeze every parameter that is not to be trained, in place.

    Args:
        model: The whole model.
        trained: Patterns of names, with ``*`` for anything; what matches none is frozen.
        frozen: Patterns of names that are frozen all the same.

    Raises:
        ValueError: If a pattern matches no parameter, or nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    check_patterns("trained_parameters", trained, names)
    check_patterns("frozen_parameters", frozen, names)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_matches(name, trained) and not _matches(name, frozen))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"trained_parameters ({', '.join(trained)}) and frozen_parameters ({', '.join(frozen)}) leave nothing to"
            " train."
        )


def check_patterns(option: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Check that every pattern of an option matches a parameter.

    Raises:
        ValueError: If one does not; the message has the nearest names there are.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            nearest = get_close_matches(pattern, names, n=2, cutoff=0.0)
            raise ValueError(
                f"{option} ({pattern!r}) must match a parameter's name, with * for anything; the nearest are"
                f" {' and '.join(nearest)}."
            )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class GroupPlan:
    """The groups of an optimizer, by names: what decays apart from what does not, and each rate apart.

    They are planned on the whole model. A stage of a pipeline holds some of the parameters and has all groups, empty
    ones too: schedulers keep a rate for each, and one process's are saved.

    Args:
        model: The whole model.
        decay_all: Whether norms and biases decay too, or matrices alone.
        factors: By pattern of names, what the rate is multiplied by; the first that matches counts.
    """

    def __init__(self, model: nn.Module, *, decay_all: bool = False, factors: Mapping[str, float]) -> None:
        self._names: dict[tuple[float, bool], list[str]] = {}
        for name, parameter in model.named_parameters():
            factor = next((factor for pattern, factor in factors.items() if fnmatchcase(name, pattern)), 1.0)
            self._names.setdefault((factor, decay_all or parameter.dim() > 1), []).append(name)

    def groups(self, model: nn.Module, *, learning_rate: float, weight_decay: float) -> list[Group]:
        """Return the groups for an optimizer on what is trained of the parameters of the moment.

        Args:
            model: The model, or what a stage holds of it.
            learning_rate: Of parameters that no pattern matches.
            weight_decay: Of those that decay.
        """
        present = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        return [
            {
                "params": [present[name] for name in names if name in present],
                "lr": factor * learning_rate,
                "weight_decay": weight_decay if decays else 0.0,
            }
            for (factor, decays), names in self._names.items()
        ]


def warmup_then_cosine(step: int, warmup_steps: int, total_steps: float, *, floor: float = 0.1) -> float:
    """Return the share of the peak rate at ``step``: linear up to the peak, then half a cosine down to ``floor``."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1.0, total_steps - warmup_steps))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
