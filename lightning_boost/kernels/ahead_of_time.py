"""Compiling every kernel for GPUs that are not there, to see what it takes of them.

The launches are taken down instead of made, on tensors without memory: what is compiled is what would be launched.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_boost.kernels.cases import Case, Sizes, cases
from lightning_boost.kernels.dispatch import is_interpreting

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes that a block of threads may have, by compute capability (CUDA C++ Programming Guide, Technical Specifications
per Compute Capability)."""


@dataclass(frozen=True)
class Compiled:
    """What one kernel takes of a GPU."""

    case: str
    kernel: str
    capability: int
    registers: int
    """Of a thread."""
    shared: int
    """Bytes of shared memory, of a block of threads."""
    spilled: int
    """Bytes of a thread that did not fit into registers."""


def compile_cases(
    sizes: Sizes,
    dtype: torch.dtype,
    capability: int,
    activations: Sequence[str] = ("silu", "none"),
    stream: torch.dtype | None = None,
) -> Iterator[Compiled]:
    """Compile what every case would launch.

    Args:
        sizes: Of the tensors.
        dtype: Of what GEMMs read and write.
        capability: Of the GPU, 80 for sm_80.
        activations: Of latents.
        stream: Dtype of the hidden stream, where it is another.

    Raises:
        RuntimeError: If Triton interprets in this process, where nothing is compiled.
    """
    if is_interpreting():
        raise RuntimeError("kernels are compiled where Triton does not interpret: unset TRITON_INTERPRET.")
    for case in cases(sizes, dtype, torch.device("meta"), activations, stream):
        for kernel, args, options in _launches(case):
            yield _compile(case, kernel, args, options, capability)


class _Recorder:
    """In the place of a kernel: takes launches down."""

    def __init__(self, kernel: Any, launches: list[Any]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.launches.append((self.kernel, args, options))


def _launches(case: Case) -> list[Any]:
    """Return kernel, arguments and compile-time constants of what a case launches."""
    module = import_module(f"lightning_boost.kernels.{case.kernel}")
    launches: list[Any] = []
    with _recorded(module, launches):
        getattr(module, case.function)(*case.args)
    return launches


@contextmanager
def _recorded(module: ModuleType, launches: list[Any]) -> Iterator[None]:
    own = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction) and value.__module__ == module.__name__
    }
    for name, kernel in own.items():
        setattr(module, name, _Recorder(kernel, launches))
    try:
        yield
    finally:
        for name, kernel in own.items():
            setattr(module, name, kernel)


def _compile(case: Case, kernel: Any, args: tuple[Any, ...], options: dict[str, Any], capability: int) -> Compiled:
    signature: dict[str, str] = dict.fromkeys(options, "constexpr")
    constants = {(kernel.arg_names.index(name),): value for name, value in options.items()}
    attributes = {}
    for position, (name, value) in enumerate(zip(kernel.arg_names, args, strict=False)):
        kind, is_aligned = _kind(value)
        signature[name] = kind
        if kind == "constexpr":
            constants[position,] = value
        elif is_aligned:
            attributes[position,] = [["tt.divisibility", 16]]
    ordered = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(kernel, signature=ordered, constexprs=constants, attrs=attributes)
    # by default Triton asks, from 3.9 on, that this be said
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": True})
    usage = _resource_usage(compiled.asm["cubin"])
    spilled = usage["STACK"] + usage["LOCAL"]
    return Compiled(case.name, kernel.__name__, capability, usage["REG"], compiled.metadata.shared, spilled)


def _kind(value: Any) -> tuple[str, bool]:
    """Return how Triton sees an argument, and whether it knows 16 to divide it: as when it launches."""
    if isinstance(value, Tensor):
        return f"*{_DTYPES[value.dtype]}", True
    if isinstance(value, float):
        return "fp32", False
    if value == 1:
        return "constexpr", False
    return ("i64" if value >= 2**31 else "i32"), value % 16 == 0


_DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64"}


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """Return what the assembler says that a kernel takes."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
