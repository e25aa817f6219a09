"""Every kernel on a GPU beside its twin, then in time; ``run.py`` starts it."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from lightning_boost.benchmark.kernels import measure_kernels
from lightning_boost.benchmark.paper import BOOST_7B
from lightning_boost.kernels.cases import Case, Sizes, cases
from lightning_boost.kernels.dispatch import plain_kernels
from lightning_boost.kernels.statistic import read_statistic

DTYPES = (torch.bfloat16, torch.float32)
ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh", "relu", "tanh")
SHARE = Sizes(rows=512, tokens=256)
SIZES = {
    "a 7B model's share": SHARE,
    "odd": replace(SHARE, rows=303, tokens=101, hidden=1001, latents=333, gated=77, heads=3, vocabulary=12345),
    "narrow": replace(SHARE, rows=64, tokens=16, hidden=8, latents=4, gated=12, heads=1, head_size=4, vocabulary=7),
    "one row": replace(SHARE, rows=1, tokens=1, loss_rows=1),
    "empty": replace(SHARE, rows=0, tokens=1, loss_rows=0),
}
TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 1e-5}
"""In bf16 a rounding of ``z`` and one of what is made from it; in fp32 sums in another order."""


def check_case(case: Case, dtype: torch.dtype) -> float:
    """Run a case by Triton and its twin in fp64; return the worst error over what is allowed."""
    operator = getattr(torch.ops.lightning_boost, case.function)
    wide = tuple(_wide(case, position, arg) for position, arg in enumerate(case.args))
    found = operator(*case.args)
    with plain_kernels():
        expected = operator(*wide)
    results = [*_listed(found), *_written(case, case.args)]
    rights = [*_listed(expected), *_written(case, wide)]
    worst = 0.0
    for result, right in zip(results, rights, strict=True):
        if result.numel():
            scale = right.abs() + right.abs().mean()
            worst = max(worst, ((result.double() - right).abs() / scale).nan_to_num(0.0).max().item())
    return worst / TOLERANCE[dtype]


def _wide(case: Case, position: int, arg: object) -> object:
    """Return an argument in fp64."""
    if not isinstance(arg, torch.Tensor) or not arg.is_floating_point():
        return arg
    if case.function == "norm_latent":
        # the statistic of a bf16 buffer lies in several columns
        width, num_processes = case.args[1], case.args[2]
        columns = torch.zeros_like(arg[:, width:], dtype=torch.float64)
        columns[:, :1] = read_statistic(arg[:, width:], num_processes)
        return torch.cat([arg[:, :width].double(), columns], 1)
    if case.function == "cross_entropy_gradient" and position == 0:
        # the twin makes it from exponentials, which the kernel computes from the logits
        return (arg.double() - case.args[2][0].double()[:, None]).exp()
    return arg.double()


def _listed(results: object) -> list[torch.Tensor]:
    if results is None:
        return []
    return list(results) if isinstance(results, tuple) else [results]


def _written(case: Case, args: tuple) -> Iterator[torch.Tensor]:
    """Yield what a case leaves in its arguments."""
    if case.function == "norm_input":
        yield read_statistic(args[2], SHARE.processes)
    if case.function == "cross_entropy_gradient":
        yield args[0]


def check_far_rows() -> float:
    """Compare the last rows of tensors with more than 2³¹ elements; return the worst error over what is allowed."""
    width, rows = 4096, 2**31 // 4096 + 3
    x = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda")
    gamma = torch.ones(width, dtype=torch.bfloat16, device="cuda")
    columns = torch.empty(rows, 8, dtype=torch.bfloat16, device="cuda")
    operators = torch.ops.lightning_boost
    pairs = [(operators.norm_input(x, gamma, columns, 0)[-2:], x[-2:])]
    pairs.append((operators.gated_activation(x, x, "none")[-2:], x[-2:].square()))
    pairs.append((operators.activate(x, "relu")[-2:], x[-2:].relu()))
    return max(((found - right).abs() / (right.abs() + 1e-3)).max().item() for found, right in pairs) / 2**-7


def main() -> int:
    """Check every kernel, print what was found and what it takes; return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=20, help="of every time")
    repetitions = parser.parse_args().repetitions
    say = sys.stdout.write
    torch.manual_seed(0)
    failed = 0
    for name, sizes in SIZES.items():
        for dtype in DTYPES:
            for case in cases(sizes, dtype, torch.device("cuda"), ACTIVATIONS):
                error = check_case(case, dtype)
                failed += error > 1.0
                say(f"{'FAILS' if error > 1.0 else 'ok   '} {error:6.3f} of tolerance: {case.name}, {name}, {dtype}\n")
    error = check_far_rows()
    failed += error > 1.0
    say(f"{'FAILS' if error > 1.0 else 'ok   '} {error:6.3f} of tolerance: rows beyond 2^31 elements\n")
    report = measure_kernels(BOOST_7B, tensor_parallel_size=4, num_tokens=16384, device="cuda", repetitions=repetitions)
    say(f"torch {torch.__version__}, {report.title}\n")
    for row in [report.headings, *report.rows]:
        say(" | ".join(f"{cell:>30}" if not column else f"{cell:>18}" for column, cell in enumerate(row)) + "\n")
    for note in report.notes:
        say(f"{note}\n")
    return failed
