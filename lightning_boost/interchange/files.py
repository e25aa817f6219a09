"""Tensors in files, read a slice at a time."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_boost.interchange.keys import RawTensor
from lightning_boost.interchange.pickles import read_pickle

CONFIG_FILE = "config.json"

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
"""Of Hugging Face's directories, the first that is there; else a single file of any name."""

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")

OnPickle = Callable[[Path], None]
"""Told of a file whose code is about to be run."""


@dataclass(frozen=True)
class SafetensorsTensor:
    """A tensor of a safetensors file."""

    path: Path
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, dim: int, start: int, stop: int) -> Tensor:
        """Read a slice, and no more of the file."""
        if start >= stop:
            return torch.empty([*self.shape[:dim], 0, *self.shape[dim + 1 :]], dtype=self.dtype)
        with _open(self.path) as file:
            values: Tensor = file.get_slice(self.key)[(slice(None),) * dim + (slice(start, stop),)]
        return values


def find_weights(path: Path) -> Path:
    """Return the file, or the index of files, that holds a checkpoint's tensors.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it cannot be told which it is, or it is another kind of file.
    """
    if path.is_file():
        if path.suffix not in (*_SUFFIXES, ".json"):
            raise ValueError(f"checkpoint {path} must be a directory, or a file named {', '.join(_SUFFIXES)}.")
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"checkpoint {path} does not exist.")
    named = next((path / name for name in _NAMES if (path / name).is_file()), None)
    if named is not None:
        return named
    files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
    if len(files) != 1:
        found = f"it holds {', '.join(file.name for file in files)}; name one of them" if files else "it has none of"
        raise ValueError(f"checkpoint {path}: which file holds the tensors? {found} {', '.join(_NAMES)}.")
    return files[0]


def read_tensors(weights: Path, on_pickle: OnPickle | None = None) -> tuple[dict[str, RawTensor], dict[str, Any]]:
    """Return the tensors by their keys, and what a pickled model states of itself.

    Args:
        weights: From ``find_weights``.
        on_pickle: That files may run code; ``None`` refuses those that would.

    Raises:
        ValueError: If a file is missing, damaged, or would run code.
    """
    if weights.suffix != ".json":
        return _tensors_of(weights, on_pickle)
    places = read_json(weights).get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{weights} has no weight_map, which tells the file of each tensor.")
    tensors: dict[str, RawTensor] = {}
    for name in sorted(set(places.values())):
        file = weights.with_name(name)
        if not file.is_file():
            raise ValueError(f"{weights} names the file {name}, which is missing.")
        found, _ = _tensors_of(file, on_pickle)
        absent = [key for key, place in places.items() if place == name and key not in found]
        if absent:
            raise ValueError(f"{weights} says that {name} holds {absent[0]}, and it does not.")
        tensors |= found
    return tensors, {}


def _tensors_of(file: Path, on_pickle: OnPickle | None) -> tuple[dict[str, RawTensor], dict[str, Any]]:
    if file.suffix != ".safetensors":
        return read_pickle(file, on_pickle)
    tensors: dict[str, RawTensor] = {}
    with _open(file) as opened:
        for key in opened.keys():  # noqa: SIM118, it is no dict
            entry = opened.get_slice(key)
            dtype = _DTYPES.get(entry.get_dtype())
            if dtype is None:
                raise ValueError(
                    f"{file}: tensor {key} is {entry.get_dtype()}, and weights must be {', '.join(_DTYPES)}."
                    " Quantised models are not read."
                )
            tensors[key] = SafetensorsTensor(file, key, tuple(entry.get_shape()), dtype)
    return tensors, {}


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is cut or no safetensors file: {error}") from None


def read_json(file: Path) -> dict[str, Any]:
    """Read an object from a JSON file.

    Raises:
        ValueError: If it holds none.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold a JSON object.")
    return found
