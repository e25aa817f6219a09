"""Counts the bytes that a block's element-wise passes move, with kernels and without.

Without kernels every operator of torch reads its arguments and writes its results. With them, what a kernel does is one
such operator, counted by its signature; nothing of it runs, so no GPU is needed.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_boost.benchmark.blocks import Candidate, make_block
from lightning_boost.benchmark.counts import processes_that_do_nothing
from lightning_boost.config import LlamaConfig
from lightning_boost.kernels.dispatch import fused_everywhere, plain_kernels
from lightning_boost.kernels.library import NAMESPACE
from lightning_boost.kernels.operators import FAKES

_KERNEL = torch._C.DispatchKey.CompositeExplicitAutograd
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product")
_WRITE_NOTHING = ("aten::empty", "aten::new_empty", "aten::detach", "aten::_unsafe_view")
_LEFT_ALONE = "lightning_boost::cross_entropy_parts"
"""The kernel only reads its logits, which plain torch uses up."""
_TOKENS = (16, 32)
"""At two numbers of tokens: what grows with them, and what does not (weights), are told apart."""


class ElementWise(TorchDispatchMode):
    """Counts the bytes of all operators but matrix products, attention, collectives and views.

    Args:
        is_fused: Whether an operator of a kernel counts as one, and does not run.
    """

    def __init__(self, *, is_fused: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_fused = is_fused
        self.by_operator: dict[str, int] = {}

    @property
    def bytes(self) -> int:
        """Of all operators."""
        return sum(self.by_operator.values())

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FAKES and self.is_fused:
            results = FAKES[func](*args, **kwargs)
        elif func.namespace == NAMESPACE:
            with self:
                return func._op_dk(_KERNEL, *args, **kwargs)
        else:
            results = func(*args, **kwargs)
        if _is_counted(func) and not _is_view(func, args, results):
            name = func.name().removesuffix(".default")
            self.by_operator[name] = self.by_operator.get(name, 0) + moved_bytes(func, args, kwargs, results)
        return results


def _is_counted(func: Any) -> bool:
    return func.namespace in ("aten", NAMESPACE) and not func.name().startswith((*_PRODUCTS, *_WRITE_NOTHING))


def _is_view(func: Any, args: Any, results: Any) -> bool:
    """Tell whether an operator has only given other shapes to what it was given."""
    given = {tensor.untyped_storage()._cdata for tensor in _tensors(args)}
    return not func._schema.is_mutable and all(each.untyped_storage()._cdata in given for each in _tensors(results))


def moved_bytes(func: Any, args: Any, kwargs: Any, results: Any) -> int:
    """Return the bytes of what an operator reads and writes; an argument that is written and not returned is both."""
    written = list(_tensors(results))
    if func.name() != _LEFT_ALONE:
        named = zip(func._schema.arguments, args, strict=False)
        own = (value for argument, value in named if argument.is_write)
        written += [value for value in own if all(value is not each for each in written)]
    only_written = func.name().startswith(("aten::zero_", "aten::fill_", "aten::copy_"))
    read = [tensor for tensor in _tensors((args[only_written:], kwargs)) if tensor.dim()]
    return sum(_bytes(tensor) for tensor in [*read, *written])


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's values, those that are only repeated once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 0)
    return tensor.element_size() * int(torch.Size(sizes).numel())


def element_wise_bytes(
    config: LlamaConfig, *, tensor_parallel_size: int, num_tokens: int, is_fused: bool
) -> dict[str, int]:
    """Return the bytes that element-wise passes of a bottleneck block move on one process, by pass.

    Args:
        config: The model.
        tensor_parallel_size: Processes, all but one of which do not exist.
        num_tokens: Of a micro-batch.
        is_fused: Whether kernels are fused.
    """
    few, more = (_count(config, tensor_parallel_size, tokens, is_fused=is_fused) for tokens in _TOKENS)
    grown = {pass_: (more[pass_] - few[pass_]) / (_TOKENS[1] - _TOKENS[0]) for pass_ in few}
    return {pass_: round(few[pass_] + grown[pass_] * (num_tokens - _TOKENS[0])) for pass_ in few}


def _count(config: LlamaConfig, tensor_parallel_size: int, num_tokens: int, *, is_fused: bool) -> dict[str, int]:
    with processes_that_do_nothing(tensor_parallel_size):
        device = torch.device("cpu")
        block = make_block(config, Candidate("bottleneck"), (1, num_tokens), torch.bfloat16, device)
        block.step()  # caches of the first call are no block's
        forward, backward = ElementWise(is_fused=is_fused), ElementWise(is_fused=is_fused)
        with fused_everywhere() if is_fused else plain_kernels():
            with forward:
                y = block.forward()
            with backward:
                y.backward(block.upstream)
    return {"forward": forward.bytes, "backward": backward.bytes}
