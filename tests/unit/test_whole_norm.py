"""The norm of a whole hidden state: its gradients in closed form are those of its operations."""

import pytest
import torch

from lightning_boost.model.norm import RMSNorm
from lightning_boost.tensor_parallel.whole_norm import whole_norm
from tests.models import relative_error


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_values_are_bitwise_and_gradients_are_those_of_the_operations(dtype, tolerance):
    torch.manual_seed(0)
    norm = RMSNorm(24, eps=0.1).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x, upstream = (torch.randn(2, 5, 24, dtype=dtype, requires_grad=True) for _ in range(2))
    expected = norm(x)
    found = whole_norm(x, norm.weight, norm.eps).view_as(x)
    assert torch.equal(found, expected)
    for one, other in zip(
        torch.autograd.grad(found, [x, norm.weight], upstream),
        torch.autograd.grad(expected, [x, norm.weight], upstream),
        strict=True,
    ):
        assert relative_error(one, other) < tolerance


def test_what_is_not_trained_gets_no_gradient():
    x, gamma = torch.randn(3, 8), torch.ones(8, requires_grad=True)
    whole_norm(x, gamma, 1e-6).sum().backward()
    assert x.grad is None
    assert gamma.grad is not None
    x, gamma = torch.randn(3, 8, requires_grad=True), torch.ones(8)
    whole_norm(x, gamma, 1e-6).sum().backward()
    assert x.grad is not None
    assert gamma.grad is None
