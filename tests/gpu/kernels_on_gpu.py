"""Every kernel on a GPU beside its twin, then in time; ``run.py`` starts it."""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from lightning_boost.benchmark.kernels import measure_kernels
from lightning_boost.benchmark.paper import BOOST_7B
from lightning_boost.kernels.cases import Case, Sizes, cases
from lightning_boost.kernels.dispatch import plain_kernels
from lightning_boost.kernels.statistic import read_statistic

DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp32": (torch.float32, torch.float32),
    "bf16 beside a stream in fp32": (torch.bfloat16, torch.float32),
}
"""Of what GEMMs read and write, and of the hidden stream."""
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
    return [results] if isinstance(results, torch.Tensor) else list(results)


def _written(case: Case, args: tuple) -> Iterator[torch.Tensor]:
    """Yield what a case leaves in its arguments."""
    if case.function == "norm_input":
        yield read_statistic(args[2], SHARE.processes)
    if case.function == "cross_entropy_gradient":
        yield args[0]


def differing_far_rows(device: torch.device, rows: int = 2**31 // 4096 + 3) -> list[str]:
    """Return the kernels that give the last two rows other results behind all others than alone.

    Args:
        device: Of the tensors.
        rows: Of 4096 values; by default so many that the last ones lie beyond 2^31 elements.
    """
    operators = torch.ops.lightning_boost
    x, c = torch.rand(rows, 4096, dtype=torch.bfloat16, device=device), torch.rand(rows, 1, device=device)
    gamma, table = x[0].clone(), torch.rand(rows, 128, device=device)
    targets, sums = torch.arange(rows, device=device) % 4096, c[:, 0] + 4096

    def norm_input(x: torch.Tensor) -> list[torch.Tensor]:
        columns = torch.empty(len(x), 8, dtype=torch.bfloat16, device=device)
        return [operators.norm_input(x, gamma, columns, 0), columns]

    def rotary(turn: Callable[..., torch.Tensor], x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        heads = x.view(1, len(x), -1, 128).transpose(1, 2)
        return turn(heads, table, table).transpose(1, 2)[0]

    def cross_entropy(x: torch.Tensor, targets: torch.Tensor, sums: torch.Tensor) -> list[torch.Tensor]:
        parts = operators.cross_entropy_parts(x, targets, 0.1, 1e-3)
        operators.cross_entropy_gradient(x, targets, parts, parts[0], sums, sums, 0.1, 1e-3)
        return [parts.t(), x]

    last = slice(rows - 2, rows)
    # the last changes x
    runs: dict[str, tuple[Callable[..., object], list[torch.Tensor]]] = {
        "norm_input": (norm_input, [x]),
        "norm_input_backward": (lambda x, c: operators.norm_input_backward(x, gamma, x, c, True)[::2], [x, c]),
        "norm_latent": (lambda x: operators.norm_latent(x, 4088, 2, 4096, 1e-6, "silu"), [x]),
        "norm_latent_backward": (lambda x, c: operators.norm_latent_backward(x, x, c, 4096, "silu"), [x, c]),
        "activate": (lambda x: operators.activate(x, "silu"), [x]),
        "gated_activation": (lambda x: operators.gated_activation(x, x, "silu"), [x]),
        "gated_activation_backward": (lambda x: operators.gated_activation_backward(x, x, x, "silu"), [x]),
        "rotary": (partial(rotary, operators.rotary), [x, table]),
        "rotary_backward": (partial(rotary, operators.rotary_backward), [x, table]),
        "cross_entropy": (cross_entropy, [x, targets, sums]),
    }
    differing = []
    for name, (run, args) in runs.items():
        alone = _listed(run(*(arg[last].clone() for arg in args)))
        behind = [result[last].clone() for result in _listed(run(*args))]
        if not all(map(torch.equal, alone, behind)):
            differing.append(name)
    return differing


def main() -> int:
    """Check every kernel, print what was found and what it takes; return 1 if any has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=20, help="of every time")
    repetitions = parser.parse_args().repetitions
    if not torch.cuda.is_available():
        parser.error("kernels are checked on a GPU, and torch sees none. Without one `make test` interprets them.")
    # a run that is cut off, too, has said what it found
    sys.stdout.reconfigure(line_buffering=True)
    say = sys.stdout.write
    torch.manual_seed(0)
    failed, device = 0, torch.device("cuda")
    for name, sizes in SIZES.items():
        for kind, (dtype, stream) in DTYPES.items():
            for case in cases(sizes, dtype, device, ACTIVATIONS, stream):
                error = check_case(case, dtype)
                failed += error > 1.0
                say(f"{'FAILS' if error > 1.0 else 'ok   '} {error:6.3f} of tolerance: {case.name}, {name}, {kind}\n")
    differing = differing_far_rows(device)
    failed += len(differing)
    say(f"{'FAILS' if differing else 'ok   '} rows beyond 2^31 elements {', '.join(differing)}\n")
    report = measure_kernels(BOOST_7B, tensor_parallel_size=4, num_tokens=16384, device="cuda", repetitions=repetitions)
    say(f"torch {torch.__version__}, {report.title}\n")
    for row in [report.headings, *report.rows]:
        say(" | ".join(f"{cell:>30}" if not column else f"{cell:>18}" for column, cell in enumerate(row)) + "\n")
    for note in report.notes:
        say(f"{note}\n")
    return int(failed > 0)
