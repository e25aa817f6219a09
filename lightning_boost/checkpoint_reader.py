"""Reading torch's distributed checkpoints without running code that they may hold.

torch describes a checkpoint in a pickle, and keeps numbers beside the tensors in further ones; either may be made to
run anything. Here a description may name torch's own classes for it and nothing else, and values are plain types.
"""

import io
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from typing_extensions import override

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
}


_TORCH_ADVICE = re.compile(
    r"^Weights only load failed.*?WeightsUnpickler error:\s*(.*?)\s*(?:Please use .*|Check the documentation.*)?$", re.S
)


def without_advice(error: Exception) -> str:
    """Return what torch says of a pickle that it refuses, without the advice to run what the pickle asks for."""
    return _TORCH_ADVICE.sub(r"\1", str(error))


class _DescriptionUnpickler(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it must not name {module}.{name}")


class PlainReader(FileSystemReader):
    """Reads a checkpoint's description if it is one.

    Raises:
        ValueError: If the description is missing, damaged, or names anything that does not belong in it, or if a file
            that it names is missing or too short.
    """

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the description."""
        metadata = self.read_description()
        for name, fault in self.damaged_files(metadata):
            raise ValueError(f"checkpoint {self.path} is damaged: its file {name} {fault}. Load another one.")
        return metadata

    def read_description(self) -> Metadata:
        """Return the description, whatever became of the files that it names.

        Raises:
            ValueError: If it is missing, damaged, or names anything that does not belong in it.
        """
        try:
            description = (Path(self.path) / ".metadata").read_bytes()
            metadata = _DescriptionUnpickler(io.BytesIO(description)).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
        except PermissionError:
            raise
        except Exception as error:
            # a damaged pickle fails in any way there is
            raise ValueError(f"the description of checkpoint {self.path} cannot be read: {error}") from None
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata

    def damaged_files(self, metadata: Metadata) -> Iterator[tuple[str, str]]:
        """Yield the name of each file that is missing or too short, and which of the two it is."""
        ends: dict[str, int] = {}
        for place in (metadata.storage_data or {}).values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for name, expected in sorted(ends.items()):
            file = Path(self.path) / name
            found = file.stat().st_size if file.is_file() else None
            if found is None:
                yield name, "is missing"
            elif found < expected:
                yield name, f"has {found:,} bytes and must have {expected:,}"


class PlainPlanner(DefaultLoadPlanner):
    """Reads what is no tensor as plain types."""

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take one value that is no tensor."""
        torch.load(value, weights_only=True)
        # checked: torch's own planner now reads the same bytes
        value.seek(0)
        super().load_bytes(read_item, value)
