"""φ(gate) · up: Triton's beside the plain one."""

import pytest
import torch

from lightning_boost.kernels import gated_activation as kernel
from lightning_boost.kernels import operators, reference
from tests.kernels.closeness import DTYPES, apart, assert_close, random, wide

SHAPES = [(0, 16), (5, 24), (3, 1100)]


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_passes(shape, dtype, activation):
    gate, up, grad = (random(*shape, dtype=dtype, seed=seed) for seed in range(3))
    given = wide(gate, up, grad)
    found = kernel.gated_activation(apart(gate), up, activation)
    assert_close(found, reference.gated_activation(*given[:2], activation), dtype)
    found = kernel.gated_activation_backward(grad.t().contiguous().t(), gate, apart(up), activation)
    expected = reference.gated_activation_backward(given[2], *given[:2], activation)
    for result, right in zip(found, expected, strict=True):
        assert_close(result, right, dtype)


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_the_twin_is_the_derivative(activation):
    gate, up = (random(3, 8, seed=seed).double().requires_grad_() for seed in range(2))
    upstream = random(3, 8, seed=2).double()
    (reference.gated_activation(gate, up, activation) * upstream).sum().backward()
    grad_gate, grad_up = operators.gated_activation_backward(upstream, gate.detach(), up.detach(), activation)
    torch.testing.assert_close(grad_gate, gate.grad)
    torch.testing.assert_close(grad_up, up.grad)
