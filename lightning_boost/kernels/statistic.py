"""A sum over processes that rides, exact, in another collective of any dtype.

RMSNorm over a sharded hidden needs ``Σ x²`` over all processes. It travels in extra columns of the all-reduce that
the projections need anyway. In fp32 one column is summed as it is. In bf16 a sum would round, so each process writes
its fp32 value as three bf16 limbs, 8 significant bits each, into columns of its own and zeros into all others: adding
zeros is exact in any order, and every process then adds the same fp32 values in the same order. The result is bit for
bit the fp32 sum in the order of the processes.
"""

import torch
from torch import Tensor

LIMBS = 3
"""bf16 numbers that hold one fp32 number: 3 × 8 significant bits make 24."""

ALIGNMENT = 8
"""Columns are padded to a multiple of this, so that rows of a half-precision buffer start on 16 bytes."""


def statistic_columns(dtype: torch.dtype, num_processes: int) -> int:
    """Return how many columns the statistic takes in a buffer of ``dtype``, padding included."""
    used = LIMBS * num_processes if dtype == torch.bfloat16 else 1
    return -(-used // ALIGNMENT) * ALIGNMENT


def write_statistic(columns: Tensor, value: Tensor, index: int) -> None:
    """Write this process's part of the sum.

    Args:
        columns: Where it goes, ``[…, C]`` with ``C`` from ``statistic_columns``; overwritten whole.
        value: This process's part, ``[…]``, fp32, or fp64 for a buffer in fp64.
        index: This process's position in the group.
    """
    columns.zero_()
    if columns.dtype != torch.bfloat16:
        columns[..., 0] = value
        return
    rest = value
    for limb in range(LIMBS):
        rounded = rest.to(torch.bfloat16)
        columns[..., LIMBS * index + limb] = rounded
        rest = rest - rounded


def read_statistic(columns: Tensor, num_processes: int) -> Tensor:
    """Return the sum over all processes, ``[…, 1]``, fp32 (fp64 from a buffer in fp64).

    Args:
        columns: The same columns after the collective, ``[…, C]``.
        num_processes: Size of the group.
    """
    if columns.dtype != torch.bfloat16:
        return columns[..., :1]
    limbs = columns[..., : LIMBS * num_processes].float().unflatten(-1, (num_processes, LIMBS))
    # from the smallest limb up: each partial sum is then exact
    parts = (limbs[..., 2] + limbs[..., 1]) + limbs[..., 0]
    total: Tensor = parts[..., :1].clone()
    for process in range(1, num_processes):
        total += parts[..., process : process + 1]
    return total
