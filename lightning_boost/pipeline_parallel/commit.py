"""The node that hands a pipeline's gradients to autograd: they are made before the user's ``backward`` is called."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Gradients = list[Tensor | None]


@contextmanager
def gradients_set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[Gradients]:
    """Let parameters begin without gradients; yields a list that holds those made meanwhile once the context ends."""
    before = [parameter.grad for parameter in parameters]
    made: Gradients = []
    for parameter in parameters:
        parameter.grad = None
    try:
        yield made
    finally:
        made += [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


class Commit(torch.autograd.Function):
    """Returns the loss; its backward adds gradients to the parameters, times the gradient that reaches it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, parameters: Sequence[nn.Parameter], made: Gradients) -> Tensor:
        """Return ``loss``; ``anchor`` is any tensor that requires a gradient."""
        ctx.pairs = [pair for pair in zip(parameters, made, strict=True) if pair[1] is not None]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, None, None, None]:
        """Add the gradients.

        Raises:
            RuntimeError: If it is called a second time.
        """
        if ctx.pairs is None:
            raise RuntimeError("a pipeline's gradients are there once: call backward once for each loss.")
        shares = [_local(gradient) for _, gradient in ctx.pairs]
        if shares:
            torch._foreach_mul_(shares, upstream.to(shares[0].dtype))
        for parameter, gradient in ctx.pairs:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                _local(parameter.grad).add_(_local(gradient))
        ctx.pairs = None
        return None, None, None, None


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
