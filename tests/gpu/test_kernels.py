"""Every kernel on a GPU, beside its twin."""

import pytest
import torch

from lightning_boost.kernels.cases import cases
from tests.gpu.kernels_on_gpu import ACTIVATIONS, DTYPES, SIZES, check_case, differing_far_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("dtype", "stream"), DTYPES.values(), ids=DTYPES)
def test_kernels_are_their_twins(sizes, dtype, stream):
    torch.manual_seed(0)
    every = cases(sizes, dtype, torch.device("cuda"), ACTIVATIONS, stream)
    found = {case.name: check_case(case, dtype) for case in every}
    assert max(found.values()) <= 1.0, found


def test_rows_beyond_two_to_the_31():
    assert differing_far_rows(torch.device("cuda")) == []
