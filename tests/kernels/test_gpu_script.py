"""What a GPU's kernels are checked by, tried with interpreted ones."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_boost.kernels import norm_latent, rotary
from lightning_boost.kernels.cases import cases
from lightning_boost.kernels.dispatch import choose_kernels
from tests.gpu.kernels_on_gpu import ACTIVATIONS, DTYPES, SIZES, check_case, differing_far_rows
from tests.kernels.interpreter import round_as_a_gpu

SMALL = {
    "share": replace(
        SIZES["a 7B model's share"],
        rows=8,
        tokens=4,
        hidden=40,
        latents=72,
        gated=36,
        heads=2,
        vocabulary=301,
        loss_rows=8,
    ),
    "odd": replace(SIZES["odd"], rows=9, tokens=3, hidden=101, vocabulary=301, loss_rows=5),
    "narrow": replace(SIZES["narrow"], rows=16, loss_rows=4),
    "empty": SIZES["empty"],
}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def interpreted():
    round_as_a_gpu()
    choose_kernels("triton")
    torch.manual_seed(0)
    yield
    choose_kernels("auto")


@pytest.mark.parametrize("sizes", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize(("dtype", "stream"), DTYPES.values(), ids=DTYPES)
def test_kernels_are_their_twins(sizes, dtype, stream):
    found = {case.name: check_case(case, dtype) for case in cases(sizes, dtype, CPU, ACTIVATIONS, stream)}
    assert max(found.values()) <= 1.0, found


def test_a_defect_is_seen(monkeypatch):
    backward = norm_latent.norm_latent_backward
    monkeypatch.setattr(
        norm_latent, "norm_latent_backward", lambda grad, z, rho, *others: backward(grad, z, rho * 1.01, *others)
    )
    monkeypatch.setattr(rotary, "rotary_backward", rotary.rotary)
    found = {
        case.name: check_case(case, torch.float32) for case in cases(SMALL["share"], torch.float32, CPU, ("silu",))
    }
    assert {name for name, error in found.items() if error > 1.0} == {"norm_latent_backward silu", "rotary_backward"}


def test_rows_behind_others(monkeypatch):
    """Fewer than there are on a GPU."""
    assert differing_far_rows(CPU, 5) == []
    activate = norm_latent.activate
    monkeypatch.setattr(norm_latent, "activate", lambda z, activation: activate(z, activation) * min(len(z), 3))
    assert differing_far_rows(CPU, 5) == ["activate"]


def test_the_script_needs_neither_lightning_nor_what_it_brings(tmp_path):
    """It gets as far as asking for a GPU, beside another package of the tests' name, too."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    script = Path(__file__).parents[1] / "gpu" / "run.py"
    blocked = [
        "lightning",
        "datasets",
        "jsonargparse",
        "torchmetrics",
        "rich",
        "safetensors",
        "jinja2",
        "tokenizers",
        "transformers",
    ]
    code = f"""
import runpy, sys
sys.modules |= dict.fromkeys({blocked})
sys.path.append({str(tmp_path)!r})
sys.argv = ["run.py"]
runpy.run_path({str(script)!r}, run_name="__main__")
"""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 2, done.stderr
    assert done.stderr.endswith(
        "kernels are checked on a GPU, and torch sees none. Without one `make test` interprets them.\n"
    )
