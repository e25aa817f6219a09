"""``benchmark numerics``: online RMSNorm and a linear behind it, beside one process, in the paper's set-up."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from lightning_boost.benchmark.online_norm import EPS, Form, check_draws, one_hot_limbs, rounded_column, share_of
from lightning_boost.benchmark.processes import Device, run_together
from lightning_boost.benchmark.report import Bars, Report
from lightning_boost.model.norm import RMSNorm, normalize

FEATURES = 1024
"""Of the hidden state and of the linear's output."""

STANDARD_DEVIATION = 0.02
"""Of the linear's elements; those of the hidden state have 1, γ is 1."""

ONE_PROCESS = "one process"
"""The form that others are compared with."""

PAPER_TOKENS = 2
PAPER_PROCESSES = 4
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Distance(NamedTuple):
    """Absolute difference of two outputs."""

    largest: float
    mean: float


PAPER = {"float32": Distance(7e-7, 6e-8), "bfloat16": Distance(3.1e-2, 2.2e-3)}
"""From one process in the same dtype, as the BOOST paper (MLSys 2026, project page) reports it for this set-up."""


class Exactness(NamedTuple):
    """How far an output is from two others; medians over draws of the input and the weight."""

    from_one_process: Distance
    """In the same dtype."""

    from_float64: Distance
    """Of the same input and weight."""


def measure_numerics(*, num_tokens: int, num_processes: int, num_draws: int, device: Device = "cpu") -> Report | None:
    """Compare forms of the layer, for each dtype.

    Args:
        num_tokens: Rows of the hidden state.
        num_processes: Tensor size; they may share cores, as nothing is timed, but not GPUs.
        num_draws: Of input and weight.
        device: Where it computes.

    Returns:
        The report; ``None`` on processes of torchrun other than 0.

    Raises:
        ValueError: If a number is below 1, the processes do not divide the features, or there are fewer GPUs.
    """
    check_draws(FEATURES, num_processes, tokens=num_tokens, repetitions=num_draws)
    measured = run_together(_measure, num_processes, num_tokens, num_draws, device=device)
    if measured is None:
        return None
    found = {
        dtype: {form: Exactness(Distance(*pair[0]), Distance(*pair[1])) for form, pair in forms.items()}
        for dtype, forms in measured.items()
    }
    return Report(
        title=f"RMSNorm and a linear, {num_tokens:,} tokens, {num_processes} processes; absolute, median of"
        f" {num_draws} draws",
        headings=("", "from one process: max", "mean", "from float64: max", "mean"),
        rows=[row for dtype, forms in found.items() for row in _rows(dtype, forms)],
        figures={
            **{dtype: _figures(dtype, forms) for dtype, forms in found.items()},
            "sizes": {"tokens": num_tokens, "processes": num_processes, "draws": num_draws},
        },
        bars=[
            Bars(f"{dtype}: absolute difference of the output from float64", "difference", _differences(forms))
            for dtype, forms in found.items()
        ],
    )


def _rows(dtype: str, forms: dict[str, Exactness]) -> Iterator[list[str]]:
    for form, exactness in forms.items():
        of_one_process = [f"{value:.1e}" for value in exactness.from_one_process] if form != ONE_PROCESS else ["", ""]
        yield [f"{dtype}, {form}", *of_one_process, *(f"{value:.1e}" for value in exactness.from_float64)]
    name = f"{dtype}, paper ({PAPER_TOKENS} tokens, {PAPER_PROCESSES} GPUs)"
    yield [name, *(f"{value:.1e}" for value in PAPER[dtype]), "", ""]


def _differences(forms: dict[str, Exactness]) -> dict[str, dict[str, float]]:
    """Return what is drawn: the largest and the mean difference, by form."""
    return {
        which: {form: getattr(each.from_float64, which) for form, each in forms.items()} for which in Distance._fields
    }


def _figures(dtype: str, forms: dict[str, Exactness]) -> dict[str, Any]:
    measured = {form: {name: pair._asdict() for name, pair in each._asdict().items()} for form, each in forms.items()}
    return {**measured, "paper": {"from_one_process": PAPER[dtype]._asdict()}}


def _measure(device: torch.device, num_tokens: int, num_draws: int) -> dict[str, dict[str, list[list[float]]]]:
    return {name: _medians(device, dtype, num_tokens, num_draws) for name, dtype in _DTYPES.items()}


def _medians(device: torch.device, dtype: torch.dtype, num_tokens: int, num_draws: int) -> dict[str, list[list[float]]]:
    draws = [_distances(device, dtype, num_tokens, seed) for seed in range(num_draws)]
    return {form: [_median([draw[form][which] for draw in draws]) for which in (0, 1)] for form in draws[0]}


def _median(distances: Sequence[Distance]) -> list[float]:
    return [statistics.median(figures) for figures in zip(*distances, strict=True)]


def _distances(
    device: torch.device, dtype: torch.dtype, num_tokens: int, seed: int
) -> dict[str, tuple[Distance, Distance]]:
    """Return the distances of each form's output from one process's and from that in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, FEATURES, generator=generator).to(device, dtype)
    weight = (STANDARD_DEVIATION * torch.randn(FEATURES, FEATURES, generator=generator)).to(device, dtype)
    one_process = linear(RMSNorm(FEATURES, eps=EPS).to(device, dtype)(x), weight).detach()
    exact = linear(normalize(x.double(), EPS), weight.double())
    forms: dict[str, Form] = {"online": one_hot_limbs}
    if dtype == torch.bfloat16:
        forms["online, statistic in bf16"] = rounded_column
    share = share_of(x, torch.ones(FEATURES, dtype=dtype, device=device), weight)
    outputs = {ONE_PROCESS: one_process, **{name: form(share).output for name, form in forms.items()}}
    return {name: (_distance(output, one_process), _distance(output, exact)) for name, output in outputs.items()}


def _distance(output: Tensor, reference: Tensor) -> Distance:
    difference = (output.double() - reference.double()).abs()
    return Distance(difference.max().item(), difference.mean().item())
