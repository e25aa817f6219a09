"""How near a kernel's result must be to that of its twin."""

import torch

from tests.kernels.interpreter import round_as_a_gpu

round_as_a_gpu()
DTYPES = [torch.float32, torch.bfloat16]


def assert_close(found, expected, dtype):
    """Compare results with the twin's on wide inputs, whose own rounding would be as large as the kernel's.

    In bf16 half a unit in the last place is allowed, and what fp32 inside adds to it.
    """
    assert found.shape == expected.shape
    if found.dtype != torch.bfloat16:
        torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-5)
    else:
        torch.testing.assert_close(found.double(), expected.double(), rtol=1.001 * 2**-8, atol=1e-5)
    assert found.dtype in (dtype, torch.float32)


def wide(*tensors):
    """Return tensors in fp64: exact beside what is tested."""
    return tuple(tensor.double() for tensor in tensors)


def random(*shape, dtype=torch.float32, seed=0):
    """Return normally distributed numbers in a dtype, the same in every run."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def apart(tensor):
    """Return the same numbers with rows that lie apart."""
    wider = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 5), float("nan"), dtype=tensor.dtype)
    wider[..., : tensor.shape[-1]] = tensor
    return wider[..., : tensor.shape[-1]]
