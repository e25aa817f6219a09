"""Counts the bytes of all tensors that were made since, and are alive."""

import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_boost.kernels.library import NAMESPACE

_KERNEL = torch._C.DispatchKey.CompositeExplicitAutograd
"""Under which this package's operators are registered."""


_STILL_FOR = 0.1
"""Seconds without a change after which nothing more is awaited."""

_READ_EVERY = 0.01
"""Seconds."""


class LiveMemory(TorchDispatchMode):
    """Follows the storages that operators make while it is entered, until they are freed.

    What this package's operators make and free inside themselves is followed too.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        """Of the storages that are alive."""

        self.peak = 0
        """The most that were alive at a time."""

        self._known: dict[int, weakref.ref[Any]] = {}

    def settled(self) -> int:
        """Return the bytes that are alive, once they have not changed for a tenth of a second.

        A backend's own thread may hold what it has summed for a moment after the collective has ended; on a busy
        machine that thread waits for its turn.
        """
        bytes_, since = self.bytes, time.monotonic()
        while time.monotonic() - since < _STILL_FOR:
            time.sleep(_READ_EVERY)
            if self.bytes != bytes_:
                bytes_, since = self.bytes, time.monotonic()
        return bytes_

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == NAMESPACE:
            # entered again, for the operators that its kernel calls; by name it would come back here
            with self:
                return func._op_dk(_KERNEL, *args, **(kwargs or {}))
        output = self._run(func, args, kwargs or {})
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(output):
            if tensor.untyped_storage()._cdata not in given:
                self._follow(tensor.untyped_storage())
        return output

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator of torch's."""
        return func(*args, **kwargs)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def forget(_: Any) -> None:
            self.bytes -= size
            del self._known[key]

        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        self._known[key] = weakref.ref(storage, forget)


class UncomputedProducts(LiveMemory):
    """Follows memory without computing matrix products, whose results nothing here depends on."""

    @override
    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.mm.out:
            return kwargs["out"]
        if func in (torch.ops.aten.mm.default, torch.ops.aten.linear.default):
            x, weight = args[:2]
            width = weight.shape[1] if func is torch.ops.aten.mm.default else weight.shape[0]
            return x.new_zeros(*x.shape[:-1], width)
        return super()._run(func, args, kwargs)


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
