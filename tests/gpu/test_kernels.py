"""Every kernel on a GPU, beside its twin."""

import pytest
import torch

from lightning_boost.kernels.cases import cases
from tests.gpu.kernels_on_gpu import ACTIVATIONS, DTYPES, SIZES, check_case, check_far_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_are_their_twins(sizes, dtype):
    torch.manual_seed(0)
    found = {case.name: check_case(case, dtype) for case in cases(sizes, dtype, torch.device("cuda"), ACTIVATIONS)}
    assert max(found.values()) <= 1.0, found


def test_rows_beyond_two_to_the_31():
    assert check_far_rows() <= 1.0
