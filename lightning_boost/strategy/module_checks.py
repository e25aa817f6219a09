"""What a LightningModule must be to be trained as on one process, where its decoder alone does not tell."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import LBFGS, Adafactor, Optimizer, Rprop

from lightning_boost.layout import Decoder

_WHOLE = "computes with whole parameters where each process has a share"
_REFUSED = {LBFGS: _WHOLE, Adafactor: _WHOLE, Rprop: "takes operations that torch does not have for DTensors"}
"""Optimizers that fail on shares of parameters, and why."""


def _is_shared_out(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and not all(placement.is_replicate() for placement in parameter.placements)


def check_optimizers(module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
    """Check that optimizers hold the module's parameters as they are now, and work on a share of each.

    Raises:
        ValueError: If one holds parameters from before the swap, or fails where each process has a share.
    """
    if any(map(_is_shared_out, module.parameters())):
        for optimizer in optimizers:
            reason = next((reason for kind, reason in _REFUSED.items() if isinstance(optimizer, kind)), None)
            if reason is not None:
                raise ValueError(
                    f"configure_optimizers returned {type(optimizer).__name__}, which {reason}. Return another one,"
                    " AdamW for instance, or set tensor_parallel_size to 1 and data_axis to 'replicate'."
                )
    names = {id(parameter) for parameter in module.parameters()}
    held = [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]
    stale = sum(id(parameter) not in names for parameter in held)
    if stale:
        raise ValueError(
            f"configure_optimizers returned an optimizer with {stale} of {len(held)} parameters that are not the"
            " module's: it was built before strategy 'boost' replaced them. Build it inside configure_optimizers,"
            " from self.parameters()."
        )


def check_none_outside(module: LightningModule, decoder: Decoder) -> None:
    """Check that the decoder holds every parameter of the module: others would not be kept equal over processes.

    Raises:
        ValueError: If there are others.
    """
    inside = {id(parameter) for parameter in decoder.root.parameters()}
    outside = [name for name, parameter in module.named_parameters() if id(parameter) not in inside]
    if outside:
        raise ValueError(
            f"parameters {', '.join(outside[:5])} stand outside the decoder, and cannot be trained on several processes"
            " yet: they would not be kept equal. Set devices to 1."
        )


def check_same_dtype(before: torch.dtype, now: torch.dtype) -> None:
    """Check that a module that is spread over replicas goes on in the dtype it was spread in.

    Raises:
        ValueError: If it does not.
    """
    if before != now:
        raise ValueError(
            f"a module that was trained on several replicas in {before} cannot go on in {now}: torch keeps its units'"
            " first dtype. Save a checkpoint, build the module anew and load it."
        )


@contextmanager
def check_called_as_whole(root: Module) -> Iterator[None]:
    """Check that a step on a data axis calls the model, and not only parts of it.

    Raises:
        RuntimeError: If parts were called past its ``forward``: torch then averages no gradients of theirs.
    """
    calls: list[bool] = []
    handle = root.register_forward_pre_hook(lambda *_: calls.append(True))
    try:
        yield
    finally:
        handle.remove()
    if not calls:
        raise RuntimeError(
            f"training_step did not call {type(root).__name__} but only parts of it. With data_parallel_size"
            " above 1 gradients are averaged as the whole model is called: give it a forward that does what"
            " training_step needs, and call that."
        )
