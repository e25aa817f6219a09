"""Files in the safetensors format, written tensor by tensor: nothing needs to be in memory at once.

A file is the length of a header in 8 bytes, the header (JSON: name, dtype, shape and place of each tensor), and the
tensors' bytes one after the other without gaps.
"""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names."""

_ALIGNMENT = 8


class Entry(NamedTuple):
    """A tensor that a file is to hold."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int


def write_safetensors(path: Path, entries: Iterable[Entry], read: Callable[[str], Tensor]) -> None:
    """Write a file.

    Args:
        path: Where to.
        entries: What it holds.
        read: Gives a tensor by its name; called once for each, when it is written.
    """
    # larger types first: so every tensor stands at a multiple of its type's size
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    with path.open("wb") as file:
        header = _header(ordered)
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for entry in ordered:
            values = read(entry.name).contiguous().flatten()
            file.write(values.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _header(entries: Iterable[Entry]) -> bytes:
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.num_bytes
        described[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": [start, end]}
    header = json.dumps(described, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % _ALIGNMENT)
