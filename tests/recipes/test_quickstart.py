"""The quickstart recipe as a newcomer runs it, for fewer steps: two processes beside one."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import run_command

ROOT = Path(__file__).parents[2]
STEPS = 20


FIT = (
    "fit",
    f"--config={ROOT / 'recipes' / 'quickstart.yaml'}",
    f"--trainer.max_steps={STEPS}",
    f"--trainer.val_check_interval={STEPS}",
    "--trainer.limit_val_batches=4",
    "--trainer.log_every_n_steps=1",
)
CHECKPOINT = f"runs/quickstart/checkpoints/step_{STEPS}.ckpt"


def _losses(folder):
    with (folder / "runs/quickstart/logs/version_0/metrics.csv").open() as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]


def _validate(folder, processes):
    output = run_command(
        folder,
        "validate",
        f"--config={ROOT / 'recipes' / 'quickstart.yaml'}",
        f"--trainer.devices={processes}",
        f"--ckpt_path={CHECKPOINT}",
        "--trainer.limit_val_batches=16",
        processes=processes,
    )
    line = next(line for line in output.splitlines() if "val_loss" in line)
    return float(next(word for word in line.replace("│", " ").split() if word[0].isdigit()))


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Start the run as a newcomer does; return its folder and what it printed."""
    folder = tmp_path_factory.mktemp("quickstart")
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "lightning_boost", *FIT]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done.stdout


def test_the_first_losses_are_those_of_one_process(two_processes, tmp_path):
    run_command(tmp_path, *FIT, "--trainer.devices=1", "--trainer.callbacks.sample_tokens=0")
    losses, expected = _losses(two_processes[0]), _losses(tmp_path)
    assert len(losses) == STEPS
    assert losses == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < losses[0] - 1


def test_the_summary_says_what_the_run_was(two_processes):
    _, output = two_processes
    text = " ".join(output.replace("│", " ").split())
    for part in (
        "layout tensor 2",
        "2,008,832; with full-rank matrices 4,878,080",
        "4 collectives, 464 values per token counted; formula 4 and 464",
        "4 collectives, 448 values per token counted; formula 4 and 448",
        "from the exact norm",
        "5.6",
        "before training",
        f"after {STEPS} steps",
        CHECKPOINT,
        "-m lightning_boost validate",
    ):
        assert part in text, text


def test_the_checkpoint_is_validated_on_two_processes_and_on_one(two_processes):
    folder, _ = two_processes
    assert _validate(folder, 1) == pytest.approx(_validate(folder, 2), abs=1e-5)


def test_the_checkpoint_is_shown_verified_and_exported(two_processes):
    folder, _ = two_processes
    shown = run_command(folder, "checkpoint", "inspect", CHECKPOINT)
    assert "model.model.layers.*.self_attn.q_proj.factor_a.weight" in shown
    assert "2,008,832 values" in shown
    assert f"progress:    {STEPS} optimizer steps, epoch 0" in shown
    assert f"data:        epoch 0, behind {STEPS} batches of 4 on each replica" in shown
    assert "CHECKPOINT IS WHOLE" in run_command(folder, "checkpoint", "verify", CHECKPOINT)
    run_command(folder, "checkpoint", "export", CHECKPOINT, "weights")
    assert (folder / "weights" / "model.safetensors").stat().st_size > 4 * 2_008_832
