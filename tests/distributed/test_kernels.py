"""Training with the kernels' own code: Triton's interpreter runs them where no GPU is."""

import contextlib
import io
import logging

import pytest
import torch
import torch.distributed as dist

from lightning_boost.kernels import dispatch, norm_input, norm_latent, rotary
from lightning_boost.parity import check_parity
from tests.kernels.interpreter import round_as_a_gpu
from tests.models import small_config
from tests.processes import run_processes

ALL = {"norm_input", "norm_latent", "gated_activation", "rotary", "cross_entropy"}


def _report(config, precision="32-true", plant=None, options=None):
    """Return parity's report, and which functions of kernels ran in the model on the layout."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    round_as_a_gpu()
    if plant is not None:
        plant()
    ran, find = set(), dispatch.why_not

    def note(name, tensor):
        reason = find(name, tensor)
        if reason is None:
            ran.add(name)
        return reason

    dispatch.why_not = note
    size = dist.get_world_size()
    with contextlib.redirect_stderr(io.StringIO()):
        report = check_parity(
            config, num_processes=size, precision=precision, steps=2, **({"kernels": "triton"} | (options or {}))
        )
    return report, ran


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"low_rank": {"kind": "svd"}, "num_key_value_heads": 4}, {"recompute": "low_rank"}),
        pytest.param({}, {"recompute": "low_rank", "store_latents": "sharded"}, marks=pytest.mark.slow),
        pytest.param({"low_rank": {"kind": "lax"}}, {"scheme": "bottleneck_ungrouped"}, marks=pytest.mark.slow),
    ],
    ids=["cola", "svd, recompute", "cola, sharded latents", "lax, ungrouped"],
)
def test_training_is_that_of_one_process(changes, options):
    config = small_config(num_hidden_layers=1, hidden_size=32, **changes)
    report, ran = run_processes(_report, 2, config, "32-true", None, options)[0]
    assert report.passed, report
    assert ran == ALL


def test_bf16_is_no_farther_from_fp32_than_twice_one_process_in_bf16():
    report, ran = run_processes(_report, 2, small_config(num_hidden_layers=1, hidden_size=32), "bf16-true")[0]
    assert report.passed, report
    assert ran == ALL


@pytest.mark.slow
def test_under_autocast_kernels_are_as_near_to_fp32_as_torchs_operations():
    """A hidden stream in fp32 beside products in bf16."""
    config = small_config(num_hidden_layers=1, hidden_size=32)
    (plain, _), (fused, ran) = (
        run_processes(_report, 2, config, "bf16-mixed", None, {"kernels": kernels})[0]
        for kernels in ("reference", "triton")
    )
    assert ran == ALL
    assert fused.replicas_equal
    assert fused.worst_gradient_relative_error <= 1.5 * plain.worst_gradient_relative_error
    assert fused.worst_weight_relative_error <= 1.5 * plain.worst_weight_relative_error


def no_gradient_through_the_statistic():
    original = norm_latent.norm_latent_backward

    def backward(*args):
        u, c = original(*args)
        return u, torch.zeros_like(c)

    norm_latent.norm_latent_backward = backward


def limbs_in_the_wrong_columns():
    original = norm_input.norm_input
    norm_input.norm_input = lambda x, gamma, columns, index: original(x, gamma, columns, index + 1)


def heads_turned_the_wrong_way_back():
    rotary.rotary_backward = rotary.rotary


@pytest.mark.parametrize(
    ("plant", "precision"),
    [
        (no_gradient_through_the_statistic, "32-true"),
        (heads_turned_the_wrong_way_back, "32-true"),
        (limbs_in_the_wrong_columns, "bf16-true"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_planted_defect_is_seen(plant, precision):
    config = small_config(num_hidden_layers=1, hidden_size=32)
    report, _ = run_processes(_report, 2, config, precision, plant)[0]
    assert not report.passed, report
