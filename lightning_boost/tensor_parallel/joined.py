"""What stands in the places of two modules of a model that are one projection."""

from torch import Tensor, nn
from typing_extensions import override

from lightning_boost.tensor_parallel.bottleneck import FactorPair

_PAIR = "_lightning_boost_pair"
"""Marks what the first of two modules gives for both of them."""


class _Place(nn.Module):
    """In the place of one of two modules that are one projection, whose weight it owns.

    Args:
        twin: The projection's, hidden from torch.
        name: Of the part of it that this module becomes.
    """

    def __init__(self, twin: FactorPair, name: str) -> None:
        super().__init__()
        self._parameters.update(twin.get_submodule(name)._parameters)
        twin._modules[name] = self
        self.__dict__["twin"] = twin


class DownPlace(_Place):
    """In the place of the first: does what both do."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Run the projection: map ``[…, in/tp]``, or its group's outputs ``[…, w]``, to ``[…, out/tp]``."""
        y: Tensor = self.__dict__["twin"](x)
        setattr(y, _PAIR, id(self.__dict__["twin"]))
        return y


class UpPlace(_Place):
    """In the place of the second: hands on what the first gave."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``, ``[…, out/tp]``."""
        if getattr(x, _PAIR, None) != id(self.__dict__["twin"]):
            raise RuntimeError(
                "a factor out of a bottleneck must read what its factor into it gives, and got something else: nothing"
                " may stand between two modules that a DecoderLayout names as one projection. Set tensor_parallel_size"
                " to 1."
            )
        return x
