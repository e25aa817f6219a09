"""``benchmark statistic``: what each form of online RMSNorm costs its statistic in bytes, and its output in exactness.

Nothing is timed and every draw has its seed, so the figures are the same in every run.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from lightning_boost.benchmark.online_norm import (
    EPS,
    Form,
    Result,
    apart,
    check_draws,
    local_first,
    one_hot_limbs,
    rounded_column,
    share_of,
    wide_payload,
)
from lightning_boost.benchmark.processes import Device, run_together
from lightning_boost.benchmark.report import Bars, Report
from lightning_boost.collectives import count_collectives
from lightning_boost.model.norm import normalize

HIDDEN_SIZE = 4096
BOTTLENECK_SIZE = 1024
"""Of the paper's 7B model."""

OUTLIERS = {HIDDEN_SIZE // 8: 60.0, 5 * HIDDEN_SIZE // 8: 30.0}
"""What features of the hidden state are multiplied by, where it has outliers; of others the deviation is 1."""

ONE_PROCESS = "one process, bf16"
FORMS: dict[str, tuple[Form, int]] = {
    "bf16, statistic apart in fp32": (apart, 2),
    "bf16, statistic a bf16 column": (rounded_column, 2),
    "bf16, paper: local RMS first, statistic apart": (local_first, 2),
    "bf16, one-hot limbs (this package)": (one_hot_limbs, 2),
    "fp32, statistic a column": (wide_payload, 4),
}
"""How the layer is computed, and the bytes of a value of its payload."""


def measure_statistic(*, num_tokens: int, num_processes: int, device: Device = "cpu") -> Report | None:
    """Compare the forms with float64, on Gaussian hidden states and on those with outliers, in bf16.

    Args:
        num_tokens: Rows of the hidden state.
        num_processes: Tensor size; they may share cores, as nothing is timed, but not GPUs.
        device: Where it computes.

    Returns:
        The report; ``None`` on processes of torchrun other than 0.

    Raises:
        ValueError: If a number is below 1, the processes do not divide the features, or there are fewer GPUs.
    """
    check_draws(HIDDEN_SIZE, num_processes, tokens=num_tokens)
    found = run_together(_measure, num_processes, num_tokens, device=device)
    if found is None:
        return None
    return Report(
        title=f"RMSNorm and a linear of {HIDDEN_SIZE} to {BOTTLENECK_SIZE} features, {num_tokens:,} tokens,"
        f" {num_processes} processes; relative errors from float64",
        headings=("", "launches", "statistic, bytes a token", "output", "with outliers", "mean square, largest"),
        rows=list(_rows(found)),
        figures={"forms": found, "sizes": {"tokens": num_tokens, "processes": num_processes}},
        notes=["output: Frobenius norms; outliers: one feature multiplied by 60, another by 30"],
        bars=(Bars("relative error of the output from float64", "error", _errors(found)),),
    )


def _rows(found: dict[str, Any]) -> Iterator[list[str]]:
    for name, each in found.items():
        statistic = each["mean_square"]
        yield [
            name,
            str(each["launches"]),
            f"{each['statistic_bytes_per_token']:g}",
            f"{each['output']['gaussian']:.2e}",
            f"{each['output']['outliers']:.2e}",
            "" if statistic is None else f"{statistic:.1e}",
        ]


def _errors(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the errors that are drawn, by form, by input."""
    inputs = {"Gaussian": "gaussian", "with outliers": "outliers"}
    return {name: {form: each["output"][which] for form, each in found.items()} for name, which in inputs.items()}


def _measure(device: torch.device, num_tokens: int) -> dict[str, dict[str, Any]]:
    """Return what each form moves and how exact it is, by its name."""
    found: dict[str, dict[str, Any]] = {
        name: {"launches": 0, "statistic_bytes_per_token": 0.0, "output": {}, "mean_square": 0.0}
        for name in (ONE_PROCESS, *FORMS)
    }
    found[ONE_PROCESS]["mean_square"] = None  # it gives none away
    for inputs, outliers in {"gaussian": {}, "outliers": OUTLIERS}.items():
        layer = [tensor.to(device) for tensor in _draw(num_tokens, outliers)]
        exact = _exact(*layer)
        found[ONE_PROCESS]["output"][inputs] = _distance(_one_process(*layer), exact.output)
        for name, (form, payload_bytes) in FORMS.items():
            with count_collectives() as log:
                result = form(share_of(*layer))
            moved, each = log.total(), found[name]
            each["launches"] = moved.launches
            each["statistic_bytes_per_token"] = moved.bytes / num_tokens - payload_bytes * BOTTLENECK_SIZE
            each["output"][inputs] = _distance(result.output, exact.output)
            each["mean_square"] = max(each["mean_square"], _largest_error(result, exact))
    return found


def _draw(num_tokens: int, outliers: dict[int, float]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the hidden state, γ and the linear's weight, whole, in bf16."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator)
    gamma = 1 + 0.1 * torch.randn(HIDDEN_SIZE, generator=generator)
    weight = 0.02 * torch.randn(BOTTLENECK_SIZE, HIDDEN_SIZE, generator=generator)
    for feature, factor in outliers.items():
        x[:, feature] *= factor
    return x.bfloat16(), gamma.bfloat16(), weight.bfloat16()


def _exact(x: Tensor, gamma: Tensor, weight: Tensor) -> Result:
    """Compute the layer in float64."""
    rho = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)
    return Result(linear(x.double() * rho * gamma.double(), weight.double()), rho)


def _one_process(x: Tensor, gamma: Tensor, weight: Tensor) -> Tensor:
    return linear(gamma * normalize(x, EPS), weight)


def _distance(output: Tensor, exact: Tensor) -> float:
    distance: float = ((output.double() - exact).norm() / exact.norm()).item()
    return distance


def _largest_error(result: Result, exact: Result) -> float:
    """Return the largest relative error of the mean square that an output was scaled by."""
    largest: float = ((exact.rho / result.rho.double()).square() - 1).abs().max().item()
    return largest
