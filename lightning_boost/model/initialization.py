"""Initial values that depend on a seed and a parameter's name, and on nothing else.

Each parameter has a random generator of its own, so a process that holds a part of a model, or a part of a parameter,
draws exactly the values that one process would: the layout of a run does not change where training starts.
"""

import hashlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lightning_boost.model.low_rank import LowRankLinear

MakeValue = Callable[[], Tensor]
"""Makes the whole initial value of one parameter, on the CPU."""


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
            return nn.Parameter(values[name](), requires_grad=parameter.requires_grad)
        parameter.copy_(values[name]())
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


def initial_values(model: nn.Module, *, std: float = 0.02, seed: int | None = None) -> dict[str, MakeValue]:
    """Return for every parameter of ``model`` how its initial value is made, under its name.

    ==============================  =====================================================================
    parameter                       value
    ==============================  =====================================================================
    both factors of a pair          ``N(0, τ²)``, ``τ = R^-¼ (in + out)^-¼``: CoLA's, which gives every
                                    element of ``B A`` the variance ``1 / (in + out)``
    bias of a pair                  ``U(-out^-½, out^-½)``: CoLA's
    embedding, dense linear         ``N(0, std²)``; their bias zero
    weight of a norm                one
    ==============================  =====================================================================

    Raises:
        TypeError: If a parameter belongs to a module that the table does not name.
    """
    seed = torch.initial_seed() if seed is None else seed
    owners = dict(model.named_modules())
    values: dict[str, MakeValue] = {}
    for name, parameter in model.named_parameters():
        owner_name, _, leaf = name.rpartition(".")
        pair = owners.get(owner_name.rpartition(".")[0])
        owner = pair if isinstance(pair, LowRankLinear) else owners[owner_name]
        draw = _draw_for(owner, leaf, name, std)
        values[name] = partial(_make, draw, tuple(parameter.shape), parameter.dtype, _seed_of(name, seed))
    return values


Draw = Callable[[Tensor, torch.Generator], Tensor]


def _draw_for(owner: nn.Module, leaf: str, name: str, std: float) -> Draw:
    """Return what fills parameter ``leaf`` of ``owner``; a factor's owner is its pair."""
    if isinstance(owner, LowRankLinear):
        if leaf == "bias":
            limit = owner.out_features**-0.5
            return lambda value, generator: value.uniform_(-limit, limit, generator=generator)
        tau = owner.bottleneck_size**-0.25 * (owner.in_features + owner.out_features) ** -0.25
        return lambda value, generator: value.normal_(0.0, tau, generator=generator)
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


def _make(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    # drawn in fp32 and rounded, so that a bf16 run starts from the fp32 run's values; the device is named since a
    # caller may have another default
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return draw(torch.empty(shape, dtype=torch.float32, device="cpu"), generator).to(dtype)


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
