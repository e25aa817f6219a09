"""The forms in which models keep the two factors of a low-rank projection, and how one is recognised.

A form is where the factors are, by name; what lies between them is found by trying: the module is run on small numbers
and must give ``B σ(A x) + bias``. So any class will do, whatever its ``forward`` is written like.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from lightning_boost.model.low_rank import ACTIVATIONS

JOINED = " + "
"""Between the names of two modules that are one projection: the one into the bottleneck and the one out of it."""

_IN, _BOTTLENECK, _OUT = 5, 3, 4
"""Sizes of a trial; it takes no longer for a wide projection than for a narrow one."""


@dataclass(frozen=True)
class FactorNames:
    """Where a module keeps its factors: dotted names of parameters."""

    factor_a: str
    """Into the bottleneck, ``[R, in]``."""

    factor_b: str
    """Out of it, ``[out, R]``."""

    bias: str
    """Of the output, ``[out]``; need not be there."""

    is_transposed: bool = False
    """Whether the factors are ``[in, R]`` and ``[R, out]`` instead."""

    @property
    def in_dim(self) -> int:
        """The dim of ``factor_a`` that is input features."""
        return 0 if self.is_transposed else 1

    @property
    def out_dim(self) -> int:
        """The dim of ``factor_b`` that is output features."""
        return 1 if self.is_transposed else 0


NAMED_FORMS = (
    FactorNames("factor_a.weight", "factor_b.weight", "factor_b.bias"),
    FactorNames("cola_a", "cola_b", "bias", is_transposed=True),
    FactorNames("BLinear.weight", "ALinear.weight", "ALinear.bias"),
)
"""Of ``LowRankLinear``, of CoLA's layer, of ASVD's, whose ``BLinear`` is the one into the bottleneck."""


class JoinedPair(nn.Module):
    """Two modules of a model that are one projection, under their own names."""

    def __init__(self, down_name: str, down: nn.Module, up_name: str, up: nn.Module) -> None:
        super().__init__()
        self.add_module(down_name, down)
        self.add_module(up_name, up)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Run the two after one another."""
        for module in self.children():
            x = module(x)
        return x


def factor_names(module: nn.Module) -> FactorNames | None:
    """Return where a module keeps its factors; ``None`` if it is no pair of them."""
    own = dict(module.named_parameters())
    for names in (*NAMED_FORMS, *_positional(module)):
        factors = {names.factor_a, names.factor_b}
        if factors <= own.keys() <= {*factors, names.bias}:
            is_pair = own[names.factor_a].dim() == own[names.factor_b].dim() == 2
            return names if is_pair else None
    return None


def _positional(module: nn.Module) -> Iterator[FactorNames]:
    """Yield the names in a sequence of two linears, with or without something between them."""
    if isinstance(module, nn.Sequential | JoinedPair):
        linears = [name for name, child in module.named_children() if isinstance(child, nn.Linear)]
        if len(linears) == 2:
            down, up = linears
            yield FactorNames(f"{down}.weight", f"{up}.weight", f"{up}.bias")


def out_features(module: nn.Module) -> int:
    """Return the output features of a pair, or of a dense linear."""
    names = factor_names(module)
    return (
        module.get_parameter(names.factor_b).shape[names.out_dim] if names else module.get_parameter("weight").shape[0]
    )


def find_activation(module: nn.Module) -> nn.Module | None:
    """Return σ of a pair, by trying which one makes ``B σ(A x) + bias`` of it; ``None`` if none does.

    Args:
        module: Has ``factor_names``; its parameters may be anywhere, the meta device too.
    """
    names = factor_names(module)
    if names is None:
        return None
    generator = torch.Generator().manual_seed(0)
    factor_a = torch.randn(_BOTTLENECK, _IN, generator=generator)
    factor_b = torch.randn(_OUT, _BOTTLENECK, generator=generator)
    bias = torch.randn(_OUT, generator=generator)
    # small and large numbers, lest a bound that only large ones reach is not seen
    x = torch.randn(4, _IN, generator=generator) * torch.tensor([[0.1], [1.0], [10.0], [1000.0]])
    has_bias = names.bias in dict(module.named_parameters())
    values = {
        names.factor_a: factor_a.t() if names.is_transposed else factor_a,
        names.factor_b: factor_b.t() if names.is_transposed else factor_b,
        **({names.bias: bias} if has_bias else {}),
    }
    was_training = {inner: inner.training for inner in module.modules()}
    module.train()  # a model that was loaded in evaluation mode would hide its dropout
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = functional_call(module, values, x)
    except Exception:  # whatever a forward that is none of a pair raises
        return None
    finally:
        for inner, training in was_training.items():
            inner.training = training
    candidates = [nn.Identity(), *(activation() for activation in ACTIVATIONS.values()), nn.GELU("tanh")]
    for activation in candidates:
        expected = activation(x @ factor_a.t()) @ factor_b.t() + (bias if has_bias else 0.0)
        if isinstance(output, Tensor) and output.shape == expected.shape and torch.allclose(output, expected):
            return activation
    return None


def activation_name(sigma: nn.Module) -> str:
    """Return the name of a σ that ``find_activation`` gives; ``none`` for the identity, ``gelu_tanh`` for that form."""
    if isinstance(sigma, nn.Identity):
        return "none"
    if isinstance(sigma, nn.GELU) and sigma.approximate == "tanh":
        return "gelu_tanh"
    return next(name for name, activation in ACTIVATIONS.items() if isinstance(sigma, activation))
