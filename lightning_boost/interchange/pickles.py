"""Tensors in torch's pickled files: plain ones are read without running code, others only if their file is trusted."""

import hashlib
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_boost.checkpoint_reader import without_advice
from lightning_boost.interchange.keys import RawTensor

_WRAPPERS = ("model", "state_dict", "module")
"""Keys under which a file may hold its tensors, or the model."""


@dataclass(frozen=True)
class PickledTensor:
    """A tensor of a file of plain tensors."""

    path: Path
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, dim: int, start: int, stop: int) -> Tensor:
        """Read a slice; the file is mapped into memory, so other tensors are not read."""
        return _tensors_in(_load_plain(self.path))[self.key].narrow(dim, start, stop - start)


@dataclass(frozen=True)
class HeldTensor:
    """A tensor in memory: one that was made, or that a file had to be unpickled whole for."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of its values."""
        return self.tensor.dtype

    def read(self, dim: int, start: int, stop: int) -> Tensor:
        """Return a slice."""
        return self.tensor.narrow(dim, start, stop - start)


def read_pickle(path: Path, on_pickle: Callable[[Path], None] | None) -> tuple[dict[str, RawTensor], dict[str, Any]]:
    """Return the tensors of a file by their keys, and what a model in it states of itself.

    Args:
        path: The file.
        on_pickle: That it may run code, and told so if it is about to; ``None`` refuses a file that would.

    Raises:
        ValueError: If it is damaged, would run code, or holds no tensors.
    """
    try:
        held = _tensors_in(_load_plain(path))
    except pickle.UnpicklingError as error:
        if on_pickle is None:
            raise ValueError(
                f"{path} holds more than plain tensors, and reading it would run code from it"
                f" ({without_advice(error)}). If you trust where it comes from: convert … --trust-pickle."
            ) from None
        return _read_trusted(path, on_pickle)
    except (RuntimeError, EOFError, OSError, KeyError) as error:
        raise ValueError(f"{path} is damaged or no file of torch's: {error}") from None
    _check_some(path, held)
    return {key: PickledTensor(path, key, tuple(each.shape), each.dtype) for key, each in held.items()}, {}


# so that the tensors of a model do not each open the file again
@lru_cache(maxsize=2)
def _load_plain(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        # files of torch before 1.6
        return torch.load(path, map_location="cpu", weights_only=True)


def _read_trusted(path: Path, on_pickle: Callable[[Path], None]) -> tuple[dict[str, RawTensor], dict[str, Any]]:
    on_pickle(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=False)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{path} names code that is not installed here: {error}. Put the project that wrote it on PYTHONPATH."
        ) from None
    held = _tensors_in(found)
    _check_some(path, held)
    model = next((each for each in _candidates(found) if isinstance(each, nn.Module)), None)
    config: Any = getattr(model, "config", None)
    stated = config.to_dict() if hasattr(config, "to_dict") else {}
    return {key: HeldTensor(each) for key, each in held.items()}, stated


def _candidates(found: Any) -> list[Any]:
    inner = [found[key] for key in _WRAPPERS if key in found] if isinstance(found, Mapping) else []
    return [found, *inner]


def _tensors_in(found: Any) -> dict[str, Tensor]:
    """Return the tensors of a state dict, of a model, or of either under one of the usual keys."""
    for each in _candidates(found):
        state = each.state_dict() if isinstance(each, nn.Module) else each
        if isinstance(state, Mapping):
            tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            if tensors:
                return tensors
    return {}


def _check_some(path: Path, held: Mapping[str, Tensor]) -> None:
    if not held:
        raise ValueError(f"{path} holds no tensors, neither by themselves nor under {', '.join(map(repr, _WRAPPERS))}.")
    for key, tensor in held.items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise ValueError(f"{path}: tensor {key} is {tensor.dtype}. Quantised models are not read.")


def sha256(path: Path) -> str:
    """Return a file's digest, for whoever has to decide whether it is the one they trust."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()
