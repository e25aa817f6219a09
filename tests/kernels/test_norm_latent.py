"""ρ, z and σ(z) in one pass: Triton's beside the plain one."""

import pytest
import torch

from lightning_boost.kernels import norm_latent as kernel
from lightning_boost.kernels import reference
from lightning_boost.kernels.statistic import statistic_columns, write_statistic
from tests.kernels.closeness import DTYPES, apart, assert_close, random, wide

ACTIVATIONS = ["none", "silu", "gelu", "gelu_tanh", "relu", "tanh"]
SHAPES = [(0, 16), (5, 24), (3, 1100)]
"""Rows and latents."""
EPS = 1e-5


def _summed(shape, dtype, num_processes=2):
    """Return what an all-reduce leaves: latents, and the statistics of all processes."""
    rows, width = shape
    buffer = torch.empty(rows, width + statistic_columns(dtype, num_processes), dtype=dtype)
    buffer[:, :width] = random(*shape, dtype=dtype)
    squares = random(rows, num_processes, seed=1).square() * 50
    columns = torch.zeros_like(buffer[:, width:])
    for process in range(num_processes):
        own = torch.empty_like(columns)
        write_statistic(own, squares[:, process], process)
        columns += own
    buffer[:, width:] = columns
    return buffer, squares.double().sum(-1, keepdim=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward(shape, dtype, activation):
    buffer, squares = _summed(shape, dtype)
    z, rho, activated = kernel.norm_latent(buffer, shape[1], 2, 64, EPS, activation)
    right = (squares / 64 + EPS).rsqrt()
    assert_close(rho, right, dtype)
    assert_close(z, buffer[:, : shape[1]].double() * right, dtype)
    if activation == "none":
        assert activated.numel() == 0
    else:
        # of z as it is stored
        assert_close(activated, reference.activate(z.double(), activation), dtype)


@pytest.mark.parametrize("num_processes", [1, 3, 8])
def test_every_process_has_the_same_statistic_as_the_plain_form(num_processes):
    buffer, _ = _summed((6, 16), torch.bfloat16, num_processes)
    _, found, _ = kernel.norm_latent(buffer, 16, num_processes, 64, EPS, "none")
    _, expected, _ = reference.norm_latent(buffer, 16, num_processes, 64, EPS, "none")
    torch.testing.assert_close(found, expected, rtol=3e-7, atol=0.0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_backward(shape, dtype, activation):
    grad, z, rho = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1), random(shape[0], 1).abs()
    found = kernel.norm_latent_backward(apart(grad), z, rho, 64, activation)
    expected = reference.norm_latent_backward(*wide(grad, z, rho), 64, activation)
    for result, right in zip(found, expected, strict=True):
        assert_close(result, right, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_alone_gives_what_the_fused_pass_gives(dtype):
    buffer, _ = _summed((5, 24), dtype)
    z, _, fused = kernel.norm_latent(buffer, 24, 2, 64, EPS, "silu")
    assert torch.equal(kernel.activate(z, "silu"), fused)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_twin_is_the_derivative(activation):
    """Of ``σ(ρ u)`` by ``u``, and by ``Σ x²`` through ρ: ``dL/dΣ = -c/2``."""
    u, squares = random(3, 8).double().requires_grad_(), random(3, 1).double().square().requires_grad_()
    rho = (squares / 64 + EPS).rsqrt()
    z = rho * u
    upstream = random(3, 8, seed=1).double()
    (reference.activate(z, activation) * upstream).sum().backward()
    grad_u, c = reference.norm_latent_backward(upstream, z.detach(), rho.detach(), 64, activation)
    torch.testing.assert_close(grad_u, u.grad)
    torch.testing.assert_close(-c / 2, squares.grad)
