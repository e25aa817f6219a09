"""Which implementation of a kernel runs: Triton's on a GPU, the plain one of torch elsewhere.

Each kernel has two implementations of one signature: ``reference.py`` has all of the plain ones, and a file of the
kernel's name the Triton one. Triton is imported only where it runs.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_boost.kernels import reference

KERNELS = ("norm_input", "norm_latent", "gated_activation", "rotary", "cross_entropy")
"""By the names of their files."""

DTYPES = (torch.float32, torch.bfloat16)
"""That Triton kernels read and write; they compute in fp32."""

KernelMode = Literal["auto", "reference", "triton"]
MODES = get_args(KernelMode)

_HAS_TRITON = find_spec("triton") is not None
"""Looked up once: kernels are chosen at every call."""

_mode = "auto"
_chosen: frozenset[str] = frozenset(KERNELS)


def choose_kernels(kernels: KernelMode | Sequence[str]) -> None:
    """Choose which Triton kernels may run, in this process and from now on.

    Args:
        kernels: ``"auto"``: all, on a GPU; ``"reference"``: none; ``"triton"``: all, on a CPU too, where Triton's
            interpreter runs them (slowly, for tests); or the names of those that may run on a GPU.

    Raises:
        ValueError: If a name is unknown, or Triton cannot run where it must.
    """
    global _mode, _chosen
    check_kernels(kernels)
    _mode = kernels if isinstance(kernels, str) else "auto"
    _chosen = frozenset(KERNELS if isinstance(kernels, str) else kernels)


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Let torch run all kernels inside, whatever was chosen."""
    with _in_mode("reference"):
        yield


@contextmanager
def fused_everywhere() -> Iterator[None]:
    """Let everything inside call kernels as on a GPU, for who counts calls and lets none of them run."""
    with _in_mode("fused"):
        yield


@contextmanager
def _in_mode(mode: str) -> Iterator[None]:
    global _mode
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


def check_kernels(kernels: KernelMode | Sequence[str]) -> None:
    """Check a choice of kernels.

    Raises:
        ValueError: As ``choose_kernels``.
    """
    known = ", ".join(KERNELS)
    if isinstance(kernels, str) and kernels not in MODES:
        raise ValueError(f"kernels ({kernels!r}) must be one of {', '.join(MODES)}, or a list of names from {known}.")
    unknown = [] if isinstance(kernels, str) else [name for name in kernels if name not in KERNELS]
    if unknown:
        raise ValueError(f"kernels ({unknown[0]!r} in the list) must be names from {known}.")
    if kernels != "triton":
        return
    if not _HAS_TRITON:
        raise ValueError("kernels ('triton') needs Triton, which is not installed: pip install triton, or set 'auto'.")
    if not torch.cuda.is_available() and not is_interpreting():
        raise ValueError(
            "kernels ('triton') needs a GPU, and there is none. Set 'auto', or let Triton's interpreter run them on the"
            " CPU, slowly: set TRITON_INTERPRET=1 in the environment."
        )


def why_not(name: str, tensor: Tensor) -> str | None:
    """Tell why a kernel's Triton implementation does not run on a tensor; ``None`` where it does."""
    return _why_not(name, tensor.device, tensor.dtype)


def _why_not(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    if _mode == "fused":
        return None
    if _mode == "reference" or name not in _chosen:
        return "switched off by the option kernels"
    if device.type != "cuda" and not (_mode == "triton" and device.type == "cpu" and is_interpreting()):
        return f"on {device.type}"
    if dtype not in DTYPES:
        return f"in {str(dtype).removeprefix('torch.')}"
    if not _HAS_TRITON:
        return "Triton is not installed"
    return None


def describe_kernels(device: torch.device, dtype: torch.dtype) -> str:
    """Say which kernels Triton runs on tensors of a device and dtype, and why torch runs the others."""
    by_reason: dict[str | None, list[str]] = {}
    for name in KERNELS:
        by_reason.setdefault(_why_not(name, device, dtype), []).append(name)
    running = by_reason.pop(None, [])
    if not running and len(by_reason) == 1:
        return f"torch's own operations ({next(iter(by_reason))})"
    parts = [f"Triton runs {', '.join(running)}"] if running else []
    parts += [f"torch runs {', '.join(names)} ({reason})" for reason, names in by_reason.items()]
    return "; ".join(parts)


def implementation(kernel: str, function: str, tensor: Tensor) -> Callable[..., Any]:
    """Return what computes ``function``, one of a kernel's, on tensors like the given one."""
    module = reference if why_not(kernel, tensor) else import_module(f"lightning_boost.kernels.{kernel}")
    chosen: Callable[..., Any] = getattr(module, function)
    return chosen


def is_interpreting() -> bool:
    """Tell whether Triton interprets kernels instead of compiling them: on a CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"
