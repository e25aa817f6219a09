"""γ x and Σ x² in one pass: Triton's beside the plain one."""

import pytest
import torch

from lightning_boost.kernels import norm_input as kernel
from lightning_boost.kernels import reference
from lightning_boost.kernels.statistic import read_statistic, statistic_columns
from tests.kernels.closeness import DTYPES, apart, assert_close, random, wide

SHAPES = [(0, 16), (1, 16), (5, 24), (200, 9), (130, 40), (3, 1100)]
"""Rows and features: none, fewer and more than a tile, one feature beyond it."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward(shape, dtype):
    x, gamma = random(*shape, dtype=dtype), random(shape[1], dtype=dtype, seed=1)
    num_columns = statistic_columns(dtype, 3)
    columns = torch.full((shape[0], num_columns + 4), float("nan"), dtype=dtype)
    found = kernel.norm_input(apart(x), gamma, columns[:, :num_columns], 2)
    x, gamma = wide(x, gamma)
    assert_close(found, x * gamma, dtype)
    assert_close(read_statistic(columns[:, :num_columns], 3), x.square().sum(-1, keepdim=True), dtype)
    assert columns[:, num_columns:].isnan().all()


def test_every_process_writes_its_own_limbs_and_zeros():
    x, gamma = random(4, 24, dtype=torch.bfloat16), torch.ones(24, dtype=torch.bfloat16)
    found, expected = torch.empty(2, 4, 16, dtype=torch.bfloat16), torch.empty(2, 4, 16, dtype=torch.bfloat16)
    for index in range(2):
        kernel.norm_input(x, gamma, found[index], index)
        reference.norm_input(x, gamma, expected[index], index)
    # sums of 24 squares, in whichever order, have the same first 16 bits; all three limbs make the fp32 sum
    assert ((found != 0) == (expected != 0))[..., :3].all()
    assert torch.equal(found[0, :, :3], found[1, :, 3:6])
    assert not found[0, :, 3:].any()
    assert not found[1, :, :3].any()


def test_a_hidden_stream_in_fp32_beside_products_in_bf16():
    """As under autocast: what a GEMM reads is bf16, what the stream gets back is fp32."""
    x, gamma, t, c = random(5, 40), random(40, seed=1), random(5, 40, dtype=torch.bfloat16, seed=2), random(5, 1)
    columns = torch.empty(5, 8, dtype=torch.bfloat16)
    scaled = kernel.norm_input(x, gamma, columns, 1)
    assert_close(scaled, x.double() * gamma, torch.bfloat16)
    assert_close(read_statistic(columns, 2), x.double().square().sum(-1, keepdim=True), torch.bfloat16)
    found = kernel.norm_input_backward(x, gamma, t, c, True)
    expected = reference.norm_input_backward(*wide(x, gamma, t, c), True)
    for result, right in zip(found, expected, strict=True):
        assert_close(result, right, torch.bfloat16)
    assert [each.dtype for each in (scaled, *found)] == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("is_scaled_needed", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_backward(shape, dtype, is_scaled_needed):
    x, t, gamma = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1), random(shape[1], dtype=dtype)
    c = random(shape[0], 1)
    found = kernel.norm_input_backward(apart(x), gamma, apart(t), c, is_scaled_needed)
    expected = reference.norm_input_backward(*wide(x, gamma, t, c), is_scaled_needed)
    for result, right in zip(found, expected, strict=True):
        assert_close(result, right, dtype)


def test_rows_beyond_two_to_the_31():
    """Of the memory between the two rows nothing is touched, so nothing is taken."""
    far = 2**31 + 16
    x = torch.empty(far + 24, dtype=torch.bfloat16).as_strided((2, 24), (far, 1))
    x.copy_(random(2, 24))
    columns = torch.empty(2, 8, dtype=torch.bfloat16)
    found = kernel.norm_input(x, torch.ones(24, dtype=torch.bfloat16), columns, 0)
    assert torch.equal(found, x)


def test_the_twin_is_the_derivative():
    """Of ``γ x`` and ``Σ x²``, by numbers: ``t`` and ``-c/2`` are what comes back to the two."""
    x, gamma = random(3, 8).double().requires_grad_(), random(8).double().requires_grad_()

    def forward(x, gamma):
        columns = torch.empty(3, 8, dtype=torch.float64)
        return torch.cat([reference.norm_input(x, gamma, columns, 0), x.square().sum(-1, keepdim=True)], 1)

    t, c = random(3, 8, seed=1).double(), random(3, 1, seed=2).double()
    forward(x, gamma).backward(torch.cat([t, -c / 2], 1))
    grad_x, grad_gamma, _ = reference.norm_input_backward(x.detach(), gamma.detach(), t, c, True)
    torch.testing.assert_close(grad_x, x.grad)
    torch.testing.assert_close(grad_gamma, gamma.grad)
