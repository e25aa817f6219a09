"""Latents in shares: each process of the tensor axis keeps ``1/tp`` of what all have whole."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_boost.collectives import Label, all_gather, group_index, group_size
from lightning_boost.recompute.runs import DIFFERS

Contexts = tuple[TorchDispatchMode, TorchDispatchMode]
"""What a block's first run and its second are under."""


def share_out(replicated: Collection[str], contexts: Contexts) -> Contexts:
    """Return the contexts of a block of which each process keeps a share of what all have whole.

    Args:
        replicated: Names of the operators whose first result is the same on every process.
        contexts: For all other operators.
    """
    shares: deque[_Share] = deque()
    first, second = contexts
    return _KeepShares(replicated, shares, first), _GatherShares(replicated, shares, second)


@dataclass(frozen=True)
class _Share:
    """What one process keeps of an operator's results: of the first its share, others whole.

    A share is a run of ``⌈values / tp⌉`` values, whichever tokens they are of; the last is filled up with zeros.
    """

    values: Tensor
    shape: torch.Size
    """Of the whole."""

    others: tuple[Tensor, ...]
    group: str
    chunk: str

    @classmethod
    def cut(cls, results: tuple[Tensor, ...], group: str, chunk: str) -> "_Share":
        """Copy this process's share out of an operator's results."""
        whole, *others = results
        length = ceil(whole.numel() / group_size(group))
        start = group_index(group) * length
        mine = whole.reshape(-1)[start : start + length]
        values = whole.new_zeros(length)
        values[: mine.numel()] = mine
        # without the graph, which holds what is kept
        return cls(values, whole.shape, tuple(other.detach() for other in others), group, chunk)

    def gather(self) -> tuple[Tensor, ...]:
        """Return the results; all processes must call this. One all-gather of ``⌈values / tp⌉``."""
        gathered = all_gather(self.values, self.group, Label(self.chunk, "backward"))
        return gathered.view(-1)[: self.shape.numel()].view(self.shape), *self.others


class _SharedOut(TorchDispatchMode):
    """A run of a block in which replicated results are shared out; other operators are left to torch's own context."""

    def __init__(self, replicated: Collection[str], shares: deque[_Share], others: TorchDispatchMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.replicated, self.shares, self.others = replicated, shares, others

    @override
    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() not in self.replicated:
            return self.others.__torch_dispatch__(func, types, args, kwargs)
        return self.run(func, args, kwargs or {})

    def run(self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results of a replicated operator."""
        raise NotImplementedError


class _KeepShares(_SharedOut):
    """The first run: keeps a share."""

    @override
    def run(self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        results, given = operator(*args, **kwargs), by_name(operator, args, kwargs)
        every = results if isinstance(results, tuple) else (results,)
        self.shares.append(_Share.cut(every, given["group"], given["chunk"]))
        return results


class _GatherShares(_SharedOut):
    """The second run: gathers in the order of the first, which is that of all processes, and frees the shares."""

    @override
    def run(self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        share = self.shares.popleft() if self.shares else None
        if share is None or share.chunk != by_name(operator, args, kwargs)["chunk"]:
            raise RuntimeError(DIFFERS)
        results = share.gather()
        return results if len(results) > 1 else results[0]


def by_name(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments by their names in its schema."""
    return dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False)) | kwargs
