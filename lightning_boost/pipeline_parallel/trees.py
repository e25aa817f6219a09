"""Tensors in tuples, lists and dicts."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to every tensor in tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return dict_like(tree, {key: map_tensors(function, value) for key, value in tree.items()})
    if isinstance(tree, tuple | list):
        return sequence_like(tree, [map_tensors(function, value) for value in tree])
    return tree


def dict_like(like: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict of the same class; Hugging Face's outputs are made from keyword arguments."""
    return items if type(like) is dict else type(like)(**items)


def sequence_like(like: Any, items: list[Any]) -> Any:
    """Return a tuple or list of the same class."""
    make = getattr(type(like), "_make", type(like))  # of a named tuple
    return make(items)
