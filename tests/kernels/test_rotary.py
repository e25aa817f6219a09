"""Rotary embedding: Triton's beside the plain one."""

import pytest
import torch

from lightning_boost.kernels import operators, reference
from lightning_boost.kernels import rotary as kernel
from tests.kernels.closeness import DTYPES, apart, assert_close, random, wide

FORMS = ["contiguous", "heads behind tokens", "rows apart", "features apart"]


def _laid(tensor, form):
    if form == "heads behind tokens":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if form == "rows apart":
        return apart(tensor)
    return tensor.mT.contiguous().mT if form == "features apart" else tensor


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_own_positions", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 5, 12), (1, 40, 2, 64), (2, 1, 0, 8), (2, 0, 3, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_passes(shape, dtype, has_own_positions, form):
    batch, _, tokens, size = shape
    heads = random(*shape, dtype=dtype)
    table_shape = (batch, 1, tokens, size) if has_own_positions else (tokens, size)
    # tables whose halves differ: nothing is taken from only one of them
    cosines, sines = random(*table_shape, dtype=dtype, seed=1), random(*table_shape, dtype=dtype, seed=2)
    given = wide(heads, cosines, sines)
    found = kernel.rotary(_laid(heads, form), cosines, sines)
    assert_close(found, reference.rotary(*given), dtype)
    assert_close(kernel.rotary_backward(_laid(heads, form), cosines, sines), reference.rotary_backward(*given), dtype)


def test_tables_in_fp32_beside_heads_in_bf16():
    """As under autocast."""
    heads, tables = random(2, 3, 5, 12, dtype=torch.bfloat16), (random(5, 12, seed=1), random(5, 12, seed=2))
    given = wide(heads, *tables)
    for turn in ("rotary", "rotary_backward"):
        found = getattr(kernel, turn)(heads, *tables)
        assert_close(found, getattr(reference, turn)(*given), torch.bfloat16)
        assert found.dtype == torch.bfloat16


def test_heads_beyond_two_to_the_31():
    """Of the memory between heads nothing is touched, so nothing is taken."""
    far = 2**30 + 16
    heads = torch.empty(2 * far + 8, dtype=torch.bfloat16).as_strided((1, 3, 1, 8), (1, far, 8, 1))
    heads.copy_(random(1, 3, 1, 8))
    tables = random(1, 8, seed=1), random(1, 8, seed=2)
    assert torch.equal(kernel.rotary(heads, *tables), kernel.rotary(heads.clone(), *tables))


def test_the_twin_is_the_derivative():
    heads = random(2, 3, 5, 12).double().requires_grad_()
    cosines, sines = random(5, 12, seed=1).double(), random(5, 12, seed=2).double()
    upstream = random(2, 3, 5, 12, seed=3).double()
    (reference.rotary(heads, cosines, sines) * upstream).sum().backward()
    torch.testing.assert_close(operators.rotary_backward(upstream, cosines, sines), heads.grad)
