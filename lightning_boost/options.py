"""Options as plain types: to be logged, saved without any class of this package, and compared."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch

_PLAIN = (bool, int, float, str, type(None))


def plain(value: Any) -> Any:
    """Return a value in plain types: a dataclass as a dict, a tuple as a list, a dtype by its name.

    Of an object of any other class only the name of its class is left.
    """
    if type(value) in _PLAIN:
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, (PurePath, torch.dtype, str)):
        return str(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def flat(options: Any, name: str = "") -> dict[str, Any]:
    """Return plain options with those inside of one another under dotted names; lists of plain values stay lists."""
    if isinstance(options, dict):
        inner: Iterator[tuple[Any, Any]] = iter(options.items())
    elif isinstance(options, list) and any(isinstance(each, dict) for each in options):
        inner = enumerate(options)
    else:
        return {name: options}
    return {
        below: value
        for key, each in inner
        for below, value in flat(each, f"{name}.{key}" if name else str(key)).items()
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the names whose values differ, with both in words; one that is not there counts as none."""
    names = sorted(before.keys() | now.keys())
    return {
        name: (_in_words(before, name), _in_words(now, name)) for name in names if before.get(name) != now.get(name)
    }


def _in_words(options: dict[str, Any], name: str) -> str:
    return repr(options[name]) if name in options else "not given"
