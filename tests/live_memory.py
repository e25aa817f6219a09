"""Counts the values of all tensors that are alive, parameters left out."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LiveMemory(TorchDispatchMode):
    """Follows the storages that are made while it is entered, until they are freed."""

    def __init__(self):
        super().__init__()
        self.bytes = 0
        self._known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(output):
            if tensor.untyped_storage()._cdata not in given:
                self._follow(tensor.untyped_storage())
        return output

    def _follow(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def forget(_):
            self.bytes -= size
            del self._known[key]

        self.bytes += size
        self._known[key] = weakref.ref(storage, forget)


def _tensors(value):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
