"""What ``low_rank`` keeps of a block, by operator."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from typing_extensions import override

from lightning_boost.kernels.library import APART
from lightning_boost.layout import Decoder, projection_of
from lightning_boost.model.factor_pair import factor_names
from lightning_boost.recompute.shares import Contexts, by_name, share_out


@dataclass(frozen=True)
class Keeping:
    """What is kept. Operators are known by name, since they do not pickle."""

    communicating: frozenset[str]
    """Operators that must not run twice."""

    latent_weights: frozenset[tuple[int, int]]
    """Shapes ``[in, R]`` of the factors into a bottleneck, as they are multiplied with."""

    keep_attention: bool
    shared_out: frozenset[str] = frozenset()
    """Those of ``communicating`` of whose first result each process keeps a share."""

    def contexts(self) -> Contexts:
        """Return what a block's first run and its second are under."""
        contexts: Contexts = create_selective_checkpoint_contexts(_Policy(self))
        first, second = share_out(self.shared_out, contexts) if self.shared_out else contexts
        return _Apart(first), _Apart(second)

    def keeps(self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether an operator's results are kept."""
        return (
            operator.name() in self.communicating
            or (operator is torch.ops.aten.mm.default and tuple(args[1].shape) in self.latent_weights)
            or (self.keep_attention and _is_attention(operator, args, kwargs))
        )


class _Apart(TorchDispatchMode):
    """A run of a block in which fused operators are taken apart, so that no more is kept than one of them gives.

    Args:
        others: Which sees all operators that are left.
    """

    def __init__(self, others: TorchDispatchMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.others = others

    @override
    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in APART:
            return self.others.__torch_dispatch__(func, types, args, kwargs)
        with self:
            return APART[func](*args, **(kwargs or {}))


def traced_contexts(keeping: Keeping) -> Contexts:
    """Return what tells a compiler what to keep of a block."""
    contexts: Contexts = create_selective_checkpoint_contexts(partial(_mark, keeping))
    return contexts


def _mark(keeping: Keeping, _: Any, operator: OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Mark what a compiler keeps of a block; in its graph nothing is changed in place."""
    is_kept = keeping.keeps(operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


class _Policy:
    """Tells torch what to keep of one run of a block, and sees that nobody changes it.

    torch itself sees a change only through the tensor that is kept or a view of it, and what a matrix product gives is
    handed on as neither.
    """

    def __init__(self, keeping: Keeping) -> None:
        self._keeping = keeping
        self._addresses: set[int] = set()
        """Of the storages that are kept, and so not freed while the block runs."""

    def __call__(self, context: Any, operator: OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator._schema.is_mutable and any(
            address in self._addresses for address in _addresses(_written(operator, args, kwargs))
        ):
            raise ValueError(
                f"{operator.name()} must not change in place what recompute 'low_rank' keeps of a block: latents, and"
                " what other collectives give. Let it make a new tensor (inplace=False, z * 2 for z.mul_(2)), or set"
                " recompute to 'block', which keeps none of them."
            )
        if not self._keeping.keeps(operator, args, kwargs):
            return CheckpointPolicy.PREFER_RECOMPUTE
        # torch before 2.13 does not tell results
        self._addresses.update(_addresses(getattr(context, "op_output", None)))
        return CheckpointPolicy.MUST_SAVE


def _written(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes into."""
    given = by_name(operator, args, kwargs)
    written = (each.name for each in operator._schema.arguments if each.alias_info and each.alias_info.is_write)
    return [given[name] for name in written if name in given]


def _addresses(tree: Any) -> Iterator[int]:
    """Yield where the storages of the tensors in a tree begin; an empty one has no place."""
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return filter(None, (tensor.untyped_storage().data_ptr() for tensor in tensors))


def latent_weights(decoder: Decoder) -> frozenset[tuple[int, int]]:
    """Return the shapes ``[in, R]`` of a decoder's factors where its projections are its own modules.

    On a tensor axis latents come from operators that communicate. On one process they are ordinary matrix products,
    known by the shape of what is multiplied with, which autocast does not change.
    """
    shapes = set()
    for layer in decoder.layers.values():
        for projection in (projection_of(layer, name) for name in decoder.layout.projections()):
            names = factor_names(projection)
            if names is not None:
                shape = projection.get_parameter(names.factor_a).shape
                shapes.add((shape[names.in_dim], shape[1 - names.in_dim]))
    return frozenset(shapes)


def _is_attention(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an operator is torch's attention without dropout.

    One that draws must run again: a second run that leaves it out would draw other numbers behind it.
    """
    if not operator.name().startswith("aten::_scaled_dot_product_"):
        return False
    return not by_name(operator, args, kwargs).get("dropout_p", 0.0)
