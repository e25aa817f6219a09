"""What happens when one process fails, with processes that Lightning starts by itself as a user's script does."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import os, signal, sys
import lightning.pytorch as pl
import lightning_boost
from lightning_boost import LlamaConfig, LowRankConfig, LowRankLanguageModel, TextDataModule

FAILING, HOW = int(sys.argv[1]), sys.argv[2]


class Module(LowRankLanguageModel):
    def training_step(self, batch, batch_idx):
        if self.global_rank == FAILING and batch_idx == 1:
            if HOW == "raise":
                raise ArithmeticError("planted in training_step")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


config = LlamaConfig(
    vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    low_rank=LowRankConfig(bottleneck_size=8),
)
if __name__ == "__main__":
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="boost", max_steps=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )
    print("process group of", os.getpid(), flush=True)
    trainer.fit(Module(config), TextDataModule(sequence_length=16, batch_size=2))
"""

LIMIT_SECONDS = 30
"""The promise: any process's failure ends all within this time."""


def _run(tmp_path, *arguments):
    """Run the script in a session of its own; return exit code, output, seconds, and processes that are left."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_PORT"):
        environment.pop(name, None)
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, script, *arguments],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    output, _ = process.communicate(timeout=120)
    return process.returncode, output, time.monotonic() - started, _members(process.pid)


def _members(session):
    """Return the processes of a session that still run."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        state, own_session = fields[0], int(fields[3])
        if own_session == session and state != "Z":
            members.append(int(stat.parent.name))
    return members


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="counts processes through /proc")
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_one_process_ends_all_and_is_shown(tmp_path, failing):
    """known_failures A77."""
    code, output, seconds, left = _run(tmp_path, str(failing), "raise")
    assert code != 0
    assert "ArithmeticError: planted in training_step" in output
    assert f"The first failure was that of process {failing}: ArithmeticError: planted in training_step" in output
    assert not left
    # the time to import and start two processes is in it too
    assert seconds < LIMIT_SECONDS + 20


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="counts processes through /proc")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_killed_process_ends_all(tmp_path, failing):
    code, _, seconds, left = _run(tmp_path, str(failing), "kill")
    assert code != 0
    deadline = time.monotonic() + LIMIT_SECONDS
    while left and time.monotonic() < deadline:
        time.sleep(0.5)
        left = [member for member in left if Path(f"/proc/{member}").exists()]
    assert not left
    assert seconds < LIMIT_SECONDS + 20
