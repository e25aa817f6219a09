"""A checkpoint on disk: what it describes, and its values one at a time."""

import io
import math
import pickle
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from lightning_boost.checkpoint import TRAINER_STATE_FILE, existing_checkpoint, read_trainer_state
from lightning_boost.checkpoint_reader import PlainReader, without_advice

MODEL_PREFIX = "state_dict."
"""In front of the names of the model's tensors; whatever else there is belongs to optimizers."""


@dataclass(frozen=True)
class StoredTensor:
    """What a checkpoint says of a tensor.

    Args:
        key: Its name there, with what it belongs to in front.
        shape: That of one process.
        dtype: Of its values.
        chunks: Parts that processes have written.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[ChunkStorageMetadata, ...]

    @property
    def name(self) -> str:
        """The model's tensors under the names of its ``state_dict``, others with what they belong to."""
        return self.key.removeprefix(MODEL_PREFIX)

    @property
    def num_values(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """What they take."""
        return self.num_values * self.dtype.itemsize


class StoredCheckpoint:
    """A checkpoint that is looked at, not loaded.

    Args:
        path: A directory that the strategy saved.
        check_sums: Whether to compare what is read with the sums that were saved with it.

    Raises:
        FileNotFoundError: If it is none.
        ValueError: If its description cannot be read.
    """

    def __init__(self, path: str | Path, *, check_sums: bool = False) -> None:
        self._check_sums = check_sums
        self.path = existing_checkpoint(Path(path))
        self._reader = PlainReader(self.path)
        self._metadata: Metadata = self._reader.read_description()

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor by its key, of the model and of optimizers."""
        return {
            key: StoredTensor(key, tuple(entry.size), entry.properties.dtype, tuple(entry.chunks))
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    @cached_property
    def model_tensors(self) -> dict[str, StoredTensor]:
        """The model's tensors by the names of its ``state_dict``."""
        return {tensor.name: tensor for key, tensor in self.tensors.items() if key.startswith(MODEL_PREFIX)}

    @cached_property
    def other_values(self) -> list[str]:
        """Keys of what is saved beside the tensors, such as an optimizer's options."""
        entries = self._metadata.state_dict_metadata.items()
        return [key for key, entry in entries if isinstance(entry, BytesStorageMetadata)]

    @cached_property
    def trainer_state(self) -> dict[str, Any]:
        """What is no tensor of the model or an optimizer.

        Raises:
            ValueError: If it cannot be read.
        """
        file = self.path / TRAINER_STATE_FILE
        if self._check_sums:
            try:
                _check_sums(io.BytesIO(file.read_bytes()))
            except ValueError as error:
                raise ValueError(f"{file} {error}") from None
        return read_trainer_state(file)

    @property
    def files(self) -> list[str]:
        """Names of the files that hold the tensors."""
        return sorted({place.relative_path for place in self._metadata.storage_data.values()})

    def damaged_files(self) -> dict[str, str]:
        """Return the files that are missing or too short, and which of the two it is."""
        return dict(self._reader.damaged_files(self._metadata))

    def check_files(self) -> None:
        """Check that every file is there and long enough.

        Raises:
            ValueError: If one is not.
        """
        for name, fault in self.damaged_files().items():
            raise ValueError(f"checkpoint {self.path} is damaged: its file {name} {fault}. Take another one.")

    def files_of(self, key: str) -> set[str]:
        """Return the names of the files that hold a tensor's chunks or another value."""
        tensor = self.tensors.get(key)
        places = [self._place(key, chunk) for chunk in tensor.chunks] if tensor else [self._place(key)]
        return {place.relative_path for place in places}

    def read_tensor(self, tensor: StoredTensor) -> Tensor:
        """Read a tensor whole.

        Raises:
            ValueError: If a chunk of it cannot be read, is something else than was described, or is not there.
        """
        fault = uncovered(tensor)
        if fault is not None:
            raise ValueError(fault)
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for chunk in tensor.chunks:
            part = self._read(self._place(tensor.key, chunk))
            if not isinstance(part, Tensor) or part.shape != chunk.sizes or part.dtype != tensor.dtype:
                found = f"{tuple(part.shape)} {part.dtype}" if isinstance(part, Tensor) else type(part).__name__
                raise ValueError(f"a chunk is {found} and must be {tuple(chunk.sizes)} {tensor.dtype}")
            if part.shape == whole.shape:
                return part
            whole[_slices(chunk)] = part
        return whole

    def read_other(self, key: str) -> Any:
        """Read what is no tensor."""
        return self._read(self._place(key))

    def _place(self, key: str, chunk: ChunkStorageMetadata | None = None) -> Any:
        index = MetadataIndex(key, chunk.offsets if chunk else None)
        place = self._metadata.storage_data.get(index)
        if place is None:
            raise ValueError(f"no file is said to hold its part at {tuple(chunk.offsets) if chunk else ()}")
        return place

    def _read(self, place: Any) -> Any:
        with (self.path / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            content = io.BytesIO(file.read(place.length))
        if self._check_sums:
            _check_sums(content)
        try:
            return torch.load(content, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"cannot be read: {without_advice(error)}") from None


def _check_sums(content: io.BytesIO) -> None:
    """Check what torch saves, and does not check when it reads: its files are archives with a sum of each part."""
    try:
        part = zipfile.ZipFile(content).testzip()
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise ValueError(f"is damaged: {error}") from None
    if part is not None:
        raise ValueError(f"is damaged: the checksum of {part} does not agree")
    content.seek(0)


def _slices(chunk: ChunkStorageMetadata) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))


def uncovered(tensor: StoredTensor) -> str | None:
    """Return what is wrong with a tensor's chunks, if they do not give each of its values exactly once."""
    if not tensor.num_values:
        return None
    # borders of chunks cut the tensor into a coarse grid, each cell of which is in a chunk whole or not at all
    borders = [sorted({0, size}) for size in tensor.shape]
    for chunk in tensor.chunks:
        for dim, part in enumerate(_slices(chunk)):
            if not 0 <= part.start <= part.stop <= tensor.shape[dim]:
                return f"a chunk at {tuple(chunk.offsets)} of {tuple(chunk.sizes)} lies outside of {tensor.shape}"
            borders[dim] = sorted({*borders[dim], part.start, part.stop})
    covered = torch.zeros([len(border) - 1 for border in borders], dtype=torch.int32)
    for chunk in tensor.chunks:
        cells = zip(borders, _slices(chunk), strict=True)
        covered[tuple(slice(border.index(part.start), border.index(part.stop)) for border, part in cells)] += 1
    for count, fault in ((covered == 0, "no chunk holds"), (covered > 1, "several chunks hold")):
        if count.any():
            first = count.nonzero()[0].tolist()
            return f"{fault} its values from {tuple(border[cell] for border, cell in zip(borders, first, strict=True))}"
    return None
