"""Cross-entropy over a share of the vocabulary: Triton's beside the plain one."""

import pytest
import torch

from lightning_boost.kernels import cross_entropy as kernel
from lightning_boost.kernels import reference
from tests.kernels.closeness import DTYPES, apart, assert_close, random

VOCAB_SIZE = 4000


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("width", [0, 1, 7, 2500])
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_passes(width, dtype, smoothing):
    logits = 3 * random(6, width).to(dtype)
    targets = torch.tensor([0, -4, -100, width, width + 3, max(width - 1, 0)])
    given = logits.double(), targets, smoothing, smoothing / VOCAB_SIZE
    parts = kernel.cross_entropy_parts(logits, *given[1:])
    work = given[0].clone()
    expected = reference.cross_entropy_parts(work, *given[1:])
    torch.testing.assert_close(parts.double(), expected, rtol=2e-6, atol=1e-5)
    # the whole rows have more logits than this share
    maxima, sums = expected[0].nan_to_num(neginf=0.0) + random(6).abs(), random(6, seed=1).abs() + width
    scale = random(6, seed=2).abs()
    reference.cross_entropy_gradient(work, targets, expected, maxima, sums, scale, *given[2:])
    kernel.cross_entropy_gradient(logits, targets, parts, maxima.float(), sums, scale, *given[2:])
    assert_close(logits, work, dtype)


def test_large_and_small_logits():
    """Where exponentials alone would overflow, or all but one vanish."""
    logits = torch.tensor([[1e4, -1e4, 0.0], [-3e4, -3e4, -3e4]])
    targets = torch.tensor([0, 2])
    found = kernel.cross_entropy_parts(logits.clone(), targets, 0.0, 0.0)
    assert torch.equal(found, torch.tensor([[1e4, -3e4], [1.0, 3.0], [1e4, -3e4]]))


def test_rows_that_lie_apart():
    logits, targets, ones = random(4, 300), torch.tensor([0, 299, 7, -1]), torch.ones(4)
    beside, given = apart(logits), (targets, 0.1, 0.1 / VOCAB_SIZE)
    parts = kernel.cross_entropy_parts(logits, *given)
    assert torch.equal(kernel.cross_entropy_parts(beside, *given), parts)
    for each in (logits, beside):
        kernel.cross_entropy_gradient(each, targets, parts, parts[0], parts[1], ones, *given[1:])
    assert torch.equal(beside, logits)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_twin_is_the_derivative(smoothing):
    """With the whole vocabulary on one process: torch's own loss."""
    logits = random(5, 11).double().requires_grad_()
    targets = torch.tensor([0, 3, 10, 5, 5])
    torch.nn.functional.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="sum").backward()
    work = logits.detach().clone()
    parts = reference.cross_entropy_parts(work, targets, smoothing, smoothing / 11)
    scale = torch.ones(5, dtype=torch.float64)
    reference.cross_entropy_gradient(work, targets, parts, parts[0], parts[1], scale, smoothing, smoothing / 11)
    torch.testing.assert_close(work, logits.grad)
