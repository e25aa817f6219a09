"""The one door to underscored and undocumented names of torch 2.13, for what watches a run or tells a compiler.

Whoever takes a name takes it when its own module is imported: a torch without it is told of as soon as what needs it
is imported, and not in the middle of a step.
"""

from importlib import import_module
from operator import attrgetter
from typing import Any

import torch

__all__ = ["OpOverload", "TorchDispatchMode", "private"]

WORKS_WITH = "torch>=2.13,<2.14"


def private(module: str, name: str) -> Any:
    """Return ``module.name``, where ``name`` may be an attribute of a class: ``"Work.unbox"``.

    Raises:
        ImportError: If this torch has no such name.
    """
    try:
        return attrgetter(name)(import_module(module))
    except (AttributeError, ImportError) as error:
        raise ImportError(
            f"torch {torch.__version__} has no {module}.{name}, which this package calls and torch does not promise:"
            f" install {WORKS_WITH}."
        ) from error


try:
    # not by private(), which would leave type checkers without the classes
    from torch._ops import OpOverload
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError:
    private("torch._ops", "OpOverload")
    private("torch.utils._python_dispatch", "TorchDispatchMode")
    raise
