"""A process that is killed while a run starts, before its processes share a group, leaves none behind."""

import os
import signal
import time

import pytest

from tests.launched import LIMIT_SECONDS, finish, needs_proc, start

SCRIPT = """
import os, sys, time
import lightning.pytorch as pl
from torch.utils.data import DataLoader
from lightning_boost import BoostParallelStrategy, LlamaConfig, LowRankConfig, LowRankLanguageModel

KILLED, PLACE = int(sys.argv[1]), sys.argv[2]
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))


def at(place):
    if place != PLACE:
        return
    os.write(1, f"{LOCAL_RANK} is {os.getpid()}\\n".encode())
    # before the group exists, the other one goes on and waits for it
    if LOCAL_RANK == KILLED or place == "building":
        time.sleep(3600)


class Strategy(BoostParallelStrategy):
    def setup_environment(self):
        at("before the group")
        super().setup_environment()


class Module(LowRankLanguageModel):
    def configure_model(self):
        at("building")
        super().configure_model()


config = LlamaConfig(
    vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    low_rank=LowRankConfig(bottleneck_size=8),
)
if __name__ == "__main__":
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=Strategy(), logger=False, enable_checkpointing=False)
    trainer.fit(Module(config), DataLoader([]))
"""

pytestmark = needs_proc


@pytest.mark.parametrize("place", ["before the group", "building"])
@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_it_ends_all(tmp_path, killed, place):
    """known_failures A77."""
    process = start(tmp_path, SCRIPT, killed, place)
    found = {}
    while len(found) < 2:
        number, _, pid = process.stdout.readline().partition(" is ")
        if pid:
            found[number] = int(pid)
    fault = time.time()
    os.kill(found[str(killed)], signal.SIGKILL)
    codes, (output,), ended = finish(tmp_path, process)
    assert codes == [-signal.SIGKILL if killed == 0 else 1], output
    assert ended - fault < LIMIT_SECONDS
