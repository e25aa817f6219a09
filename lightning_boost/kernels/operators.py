"""Every kernel as an operator of torch: what counters count, recompute keeps and compilers see of it.

An operator of a kernel does not know gradients. ``reference.py`` says what each computes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.cuda import device_of

from lightning_boost.kernels.dispatch import implementation
from lightning_boost.kernels.library import Operator, register

FAKES: dict[OpOverload, Operator] = {}
"""Of every operator of a kernel: results of the right shapes, dtypes and strides, without values."""


def _operator(kernel: str, schema: str, fake: Operator) -> OpOverload:
    function = schema.partition("(")[0]

    def run(first: Tensor, *others: Any) -> Any:
        # Triton launches on the current device, wherever its tensors are
        with device_of(first):
            return implementation(kernel, function, first)(first, *others)

    registered = register(schema, run, fake=fake)
    FAKES[registered] = fake
    return registered


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _scales(rows: Tensor) -> Tensor:
    """Return one number for each row, ``[N, 1]``, fp32 at least."""
    return rows.new_empty(rows.shape[0], 1, dtype=torch.promote_types(rows.dtype, torch.float32))


def _norm_input_backward(x: Tensor, gamma: Tensor, t: Tensor, c: Tensor, is_scaled_needed: bool) -> Sequence[Tensor]:
    return _like(x), _like(gamma), _like(t) if is_scaled_needed else t.new_empty(0)


def _norm_latent(
    buffer: Tensor, width: int, num_processes: int, hidden_size: int, eps: float, activation: str
) -> Sequence[Tensor]:
    z = buffer.new_empty(buffer.shape[0], width)
    return z, _scales(buffer), z.new_empty(0) if activation == "none" else _like(z)


norm_input = _operator(
    "norm_input",
    "norm_input(Tensor x, Tensor gamma, Tensor(a!) columns, int index) -> Tensor",
    lambda x, gamma, columns, index: x.new_empty(x.shape, dtype=columns.dtype),
)
norm_input_backward = _operator(
    "norm_input",
    "norm_input_backward(Tensor x, Tensor gamma, Tensor t, Tensor c, bool is_scaled_needed)"
    " -> (Tensor, Tensor, Tensor)",
    _norm_input_backward,
)
norm_latent = _operator(
    "norm_latent",
    "norm_latent(Tensor buffer, int width, int num_processes, int hidden_size, float eps, str activation)"
    " -> (Tensor, Tensor, Tensor)",
    _norm_latent,
)
norm_latent_backward = _operator(
    "norm_latent",
    "norm_latent_backward(Tensor grad, Tensor z, Tensor rho, int hidden_size, str activation) -> (Tensor, Tensor)",
    lambda grad, z, rho, hidden_size, activation: (_like(z), _like(rho)),
)
activate = _operator("norm_latent", "activate(Tensor z, str activation) -> Tensor", lambda z, activation: _like(z))
gated_activation = _operator(
    "gated_activation",
    "gated_activation(Tensor gate, Tensor up, str activation) -> Tensor",
    lambda gate, up, activation: _like(gate),
)
gated_activation_backward = _operator(
    "gated_activation",
    "gated_activation_backward(Tensor grad, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
    lambda grad, gate, up, activation: (_like(gate), _like(up)),
)
rotary = _operator(
    "rotary",
    "rotary(Tensor heads, Tensor cosines, Tensor sines) -> Tensor",
    lambda heads, cosines, sines: torch.empty_like(heads),
)
rotary_backward = _operator(
    "rotary",
    "rotary_backward(Tensor grad, Tensor cosines, Tensor sines) -> Tensor",
    lambda grad, cosines, sines: torch.empty_like(grad),
)
cross_entropy_parts = _operator(
    "cross_entropy",
    "cross_entropy_parts(Tensor(a!) logits, Tensor targets, float smoothing, float spread) -> Tensor",
    lambda logits, targets, smoothing, spread: _scales(logits).new_empty(3, logits.shape[0]),
)
cross_entropy_gradient = _operator(
    "cross_entropy",
    "cross_entropy_gradient(Tensor(a!) work, Tensor targets, Tensor parts, Tensor maxima, Tensor sums, Tensor scale,"
    " float smoothing, float spread) -> ()",
    lambda *_: None,
)
