"""What happens when one process fails, with processes that Lightning starts by itself as a user's script does."""

import os
import re
import signal
import time

import pytest

from tests.launched import LIMIT_SECONDS, finish, needs_proc, start, time_when_all_ended

SCRIPT = """
import os, signal, sys, time
from datetime import timedelta
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset
from lightning_boost import BoostParallelStrategy, LlamaConfig, LowRankConfig, LowRankLanguageModel

FAILING, PLACE, HOW, STAGES, TIMEOUT = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])


def say(line):
    # one write: the processes share a pipe
    os.write(1, f"{line}\\n".encode())


def fail(place, process):
    if (place, process) != (PLACE, FAILING):
        return
    say(f"fault at {time.time()}")
    if HOW == "raise":
        raise ArithmeticError("planted in " + place)
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)


class Rows(Dataset):
    def __init__(self, process):
        self.process = process

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        if index > 8:
            fail("worker", self.process)
        tokens = torch.arange(16)
        return {"input_ids": tokens, "labels": tokens}


class Module(LowRankLanguageModel):
    def setup(self, stage):
        super().setup(stage)
        fail("setup", self.global_rank)

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            fail("training_step", self.global_rank)
        if HOW == "signal":
            say(f"step {batch_idx} of {self.global_rank} in {os.getpid()}")
            time.sleep(0.1 if PLACE == "step" or batch_idx == 0 else 3600)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        if self.global_step:
            fail("validation_step", self.global_rank)
        return super().validation_step(batch, batch_idx, dataloader_idx)

    def on_train_batch_end(self, *_):
        if PLACE == "guarded save" and self.trainer.is_global_zero:
            self.trainer.save_checkpoint("guarded.ckpt")

    def train_dataloader(self):
        return DataLoader(Rows(self.global_rank), batch_size=2, num_workers=int(PLACE == "worker"))

    def val_dataloader(self):
        return DataLoader(Rows(-1), batch_size=2)


config = LlamaConfig(
    vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    low_rank=LowRankConfig(bottleneck_size=8),
)
if __name__ == "__main__":
    strategy = BoostParallelStrategy(pipeline_parallel_size=STAGES, timeout=timedelta(seconds=TIMEOUT))
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=1000 if HOW == "signal" else 12, logger=False,
        val_check_interval=4 if HOW != "signal" else None, limit_val_batches=2 if HOW != "signal" else 0,
        callbacks=[ModelCheckpoint("kept", every_n_train_steps=1)] if PLACE == "kept step" else [],
        enable_checkpointing=PLACE == "kept step", enable_progress_bar=False, use_distributed_sampler=False,
    )
    trainer.fit(Module(config))
"""

HANG_TIMEOUT = 20

pytestmark = needs_proc


def _start(tmp_path, failing, place, how, stages=1, timeout=1800):
    return start(tmp_path, SCRIPT, failing, place, how, stages, timeout)


def _run(tmp_path, *arguments):
    """Return exit code, output, and the seconds from the fault until the last process was gone."""
    (code,), (output,), seconds = finish(tmp_path, _start(tmp_path, *arguments))
    return code, output, seconds


@pytest.mark.parametrize(
    ("failing", "place", "stages"),
    [
        (0, "training_step", 1),
        pytest.param(1, "training_step", 1, marks=pytest.mark.slow),
        (1, "training_step", 2),
        (1, "validation_step", 1),
        (1, "setup", 1),
        (1, "worker", 1),
    ],
)
def test_an_error_in_one_process_ends_all_and_is_shown(tmp_path, failing, place, stages):
    """known_failures A77."""
    code, output, seconds = _run(tmp_path, failing, place, "raise", stages)
    assert code == 1
    assert f"ArithmeticError: planted in {place}" in output
    assert f"The first failure was that of process {failing}: ArithmeticError: " in output
    assert seconds < LIMIT_SECONDS


@pytest.mark.parametrize(("failing", "stages"), [(0, 1), pytest.param(1, 1, marks=pytest.mark.slow), (1, 2)])
def test_a_killed_process_ends_all(tmp_path, failing, stages):
    """known_failures A77."""
    code, output, seconds = _run(tmp_path, failing, "training_step", "kill", stages)
    if failing == 0:
        assert code == -signal.SIGKILL
        assert "Process 1 stops because process 0, or what started it, does not answer any more." in output
    else:
        assert code == 1
        assert "The first failure was that of process 1, which was killed by SIGKILL." in output
    assert seconds < LIMIT_SECONDS


@pytest.mark.parametrize(("failing", "stages"), [pytest.param(0, 1, marks=pytest.mark.slow), (1, 2)])
def test_a_process_that_hangs_is_named_and_shown_where_it_is(tmp_path, failing, stages):
    code, output, seconds = _run(tmp_path, failing, "training_step", "hang", stages, HANG_TIMEOUT)
    assert code == 1
    assert f"The first failure was that of process {1 - failing}: RuntimeError: " in output
    assert f"for process {failing}, which did not join it within timeout (0:00:{HANG_TIMEOUT})" in output
    assert f"Process {failing} has not ended 6 s after the first failure" in output
    assert "time.sleep(3600)" in output
    assert seconds < HANG_TIMEOUT + LIMIT_SECONDS


def test_a_save_by_process_0_alone_is_an_error_that_names_the_rule(tmp_path):
    """known_failures A66."""
    code, output, _ = _run(tmp_path, -1, "guarded save", "none", 1, HANG_TIMEOUT)
    assert code == 1
    assert f"process 0 saves a checkpoint, and process 1 did not within {HANG_TIMEOUT // 2} s" in output
    assert "Take the call out of `if trainer.is_global_zero:`" in output


def _process_ids(process, step):
    """Read on until both processes are in a step; return their ids."""
    found = {}
    for line in process.stdout:
        for number, pid in re.findall(rf"step {step} of (\d) in (\d+)", line):
            found[int(number)] = int(pid)
        if len(found) == 2:
            return found
    raise AssertionError("the run ended before")


@pytest.mark.parametrize(("receiving", "signum"), [(1, signal.SIGTERM), (0, signal.SIGUSR1)])
def test_a_signal_to_one_process_stops_all_with_a_checkpoint(tmp_path, receiving, signum):
    """known_failures A78."""
    process = _start(tmp_path, -1, "step", "signal")
    os.kill(_process_ids(process, 1)[receiving], signum)
    output, _ = process.communicate(timeout=90)
    (saved,) = tmp_path.glob("interrupted_step_*.ckpt")
    assert process.returncode == 75
    assert f"{signal.Signals(signum).name}: saved {saved} and stopping with exit code 75." in output
    assert "The first failure" not in output
    time_when_all_ended(tmp_path)


@pytest.mark.parametrize("receiving", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_second_signal_ends_at_once(tmp_path, receiving):
    """known_failures A78."""
    process = _start(tmp_path, -1, "kept step", "signal")
    told = _process_ids(process, 1)[receiving]
    os.kill(told, signal.SIGTERM)
    time.sleep(0.5)
    os.kill(told, signal.SIGTERM)
    process.communicate(timeout=90)
    assert process.returncode == 128 + signal.SIGTERM
    time_when_all_ended(tmp_path)
    assert [entry.name for entry in (tmp_path / "kept").iterdir()] == ["epoch=0-step=1.ckpt"]
