"""Initial values that depend on a seed and a parameter's name, and on nothing else.

Each parameter has a random generator of its own, so a process that holds a part of a model, or a part of a parameter,
draws exactly the values that one process would: the layout of a run does not change where training starts.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_boost.model.crossing import LatentNorm, LinearGate, TensorGate, gate_bound
from lightning_boost.model.low_rank import CrossingLinear, LowRankLinear

BLOCK_ELEMENTS = 1 << 22
"""Values that are drawn at a time; part of the rule, since other blocks would draw other values."""

Draw = Callable[[Tensor, torch.Generator], Tensor]


class Value(Protocol):
    """What a parameter starts from, drawn or read from a file, whole or in part."""

    def whole(self) -> Tensor:
        """Return the value, on the CPU."""

    def share(self, dim: int, start: int, stop: int, scratch: Tensor | None = None) -> Tensor:
        """Return ``whole().narrow(dim, start, stop - start)``, without holding the rest of it."""


@dataclass(frozen=True)
class InitialValue:
    """A value that is drawn."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    draw: Draw

    def whole(self) -> Tensor:
        """Return the value, on the CPU."""
        return self.share(0, 0, self.shape[0])

    def share(self, dim: int, start: int, stop: int, scratch: Tensor | None = None) -> Tensor:
        """Return ``value.narrow(dim, start, stop - start)`` without ever holding more of the rest than a block of rows.

        Every share draws all blocks in order, and so the same values as the whole.

        Args:
            dim: That is cut.
            start: Of the share.
            stop: Of the share.
            scratch: From ``make_scratch``, for many parameters: memory taken and given back for each would leave holes
                in the heap between their shares.
        """
        row_elements = math.prod(self.shape[1:])
        rows_of_block = max(1, BLOCK_ELEMENTS // max(1, row_elements))
        if scratch is None or scratch.numel() < row_elements:
            scratch = make_scratch(row_elements)
        shape = [*self.shape[:dim], stop - start, *self.shape[dim + 1 :]]
        share = torch.empty(shape, dtype=self.dtype, device="cpu")
        generator = torch.Generator(device="cpu").manual_seed(self.seed)
        for first in range(0, self.shape[0], rows_of_block):
            last = min(first + rows_of_block, self.shape[0])
            # drawn in fp32 and rounded, so that a bf16 run starts from the fp32 run's values
            block = scratch[: (last - first) * row_elements].view(last - first, *self.shape[1:])
            self.draw(block, generator)
            if dim == 0:
                low, high = max(first, start), min(last, stop)
                if low < high:
                    share[low - start : high - start] = block[low - first : high - first]
            else:
                share[first:last] = block.narrow(dim, start, stop - start)
        return share


def make_scratch(least: int = 0) -> Tensor:
    """Return memory for one block of values."""
    return torch.empty(max(BLOCK_ELEMENTS, least), dtype=torch.float32, device="cpu")


@torch.no_grad()
def initialize(model: nn.Module, *, std: float = 0.02, seed: int | None = None) -> None:
    """Give every parameter of ``model`` its initial value; parameters on the meta device become real, on the CPU.

    Args:
        model: A one-process model, before any swap.
        std: Standard deviation of embeddings and dense linears.
        seed: ``None`` takes torch's own (``seed_everything``).
    """
    values = initial_values(model, std=std, seed=seed)

    def filled(name: str, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.is_meta:
            whole = values[name].whole().to(parameter.dtype)
            return nn.Parameter(whole, requires_grad=parameter.requires_grad)
        parameter.copy_(values[name].whole())
        return parameter

    replace_parameters(model, filled)


def replace_parameters(model: nn.Module, replacement: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Put ``replacement(name, parameter)`` in each parameter's place; one that stands in several places stays one."""
    replaced: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in replaced:
            replaced[id(parameter)] = replacement(name, parameter)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, replaced[id(parameter)])


def set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put ``module`` in the place that the dotted ``name`` tells."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, module)


def initial_values(model: nn.Module, *, std: float = 0.02, seed: int | None = None) -> Mapping[str, Value]:
    """Return for every parameter of ``model`` what it starts from, under its name.

    That is the model's own ``given_values``, if it has any, or else:

    ==============================  =====================================================================
    parameter                       value
    ==============================  =====================================================================
    both factors of a pair          ``N(0, τ²)``, ``τ = R^-¼ (in + out)^-¼``: CoLA's, which gives every
                                    element of ``B A`` the variance ``1 / (in + out)``; where a latent is
                                    received, and so normalised, the factor out of it ``N(0, τ²/4)``
    bias of a pair                  ``U(-out^-½, out^-½)``: CoLA's
    embedding, dense linear         ``N(0, std²)``; their bias zero
    weight of a norm                one; the bias of a latent's norm zero
    linear gate of a latent         ``U(-in^-½, in^-½)``, its bias too: torch's linear
    tensor gate of a latent         ``U(-(6/n)^½, (6/n)^½)`` for each matrix ``[n, n]``: He's, for a fan of ``n``
    ==============================  =====================================================================

    Raises:
        TypeError: If a parameter belongs to a module that the table does not name.
    """
    given: Mapping[str, Value] | None = getattr(model, "given_values", None)
    if given:
        return given
    seed = torch.initial_seed() if seed is None else seed
    owners = dict(model.named_modules())
    values: dict[str, Value] = {}
    for name, parameter in model.named_parameters():
        owner_name, _, leaf = name.rpartition(".")
        pair = owners.get(owner_name.rpartition(".")[0])
        owner = pair if isinstance(pair, LowRankLinear) else owners[owner_name]
        draw = _draw_for(owner, leaf, name, std)
        values[name] = InitialValue(tuple(parameter.shape), parameter.dtype, _seed_of(name, seed), draw)
    return values


def _draw_for(owner: nn.Module, leaf: str, name: str, std: float) -> Draw:
    """Return what fills parameter ``leaf`` of ``owner``; a factor's owner is its pair."""
    if isinstance(owner, LowRankLinear):
        if leaf == "bias":
            limit = owner.out_features**-0.5
            return lambda value, generator: value.uniform_(-limit, limit, generator=generator)
        tau = owner.bottleneck_size**-0.25 * (owner.in_features + owner.out_features) ** -0.25
        if isinstance(owner, CrossingLinear) and owner.receives and ".factor_b." in name:
            tau /= 2
        return lambda value, generator: value.normal_(0.0, tau, generator=generator)
    if isinstance(owner, LinearGate | TensorGate):
        bound = gate_bound(owner, leaf)
        return lambda value, generator: value.uniform_(-bound, bound, generator=generator)
    if isinstance(owner, LatentNorm) and leaf == "bias":
        return lambda value, generator: value.zero_()
    if isinstance(owner, nn.Embedding | nn.Linear):
        if leaf == "bias":
            return lambda value, generator: value.zero_()
        return lambda value, generator: value.normal_(0.0, std, generator=generator)
    if "norm" in type(owner).__name__.lower() and leaf == "weight":
        return lambda value, generator: value.fill_(1.0)
    raise TypeError(
        f"no initial value is known for parameter {name!r} of a {type(owner).__name__}."
        " Build the model with its weights instead of on the meta device; process 0's are then given to all."
    )


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
