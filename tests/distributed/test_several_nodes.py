"""Runs that torchrun starts, or one start on each of several nodes, are those that Lightning's launcher starts."""

import re
import socket

import pytest

from tests.launched import LIMIT_SECONDS, TORCHRUN, finish, needs_proc, start

SCRIPT = """
import os, signal, sys, time
from datetime import timedelta
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from lightning_boost import BoostParallelStrategy, LlamaConfig, LowRankConfig, LowRankLanguageModel

DEVICES, NODES, STAGES, TIMEOUT = map(int, sys.argv[1:5])
FAILING, HOW = int(sys.argv[5]), sys.argv[6]


def say(line):
    os.write(1, f"{line}\\n".encode())


class Module(LowRankLanguageModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == FAILING:
            say(f"fault at {time.time()}")
            if HOW == "raise":
                raise ArithmeticError("planted")
            if HOW == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if HOW == "hang in the model":
                self.model.model.layers[1].register_forward_pre_hook(lambda *_: time.sleep(3600))
            else:
                time.sleep(3600)
        loss = super().training_step(batch, batch_idx)
        mean = self.trainer.strategy.reduce(loss.detach().clone())
        if self.trainer.is_global_zero:
            say(f"loss {mean:.5f}")
        return loss


config = LlamaConfig(
    vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    low_rank=LowRankConfig(bottleneck_size=8),
)
if __name__ == "__main__":
    pl.seed_everything(0)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(257, (16, 16))]
    strategy = BoostParallelStrategy(2, pipeline_parallel_size=STAGES, timeout=timedelta(seconds=TIMEOUT))
    trainer = pl.Trainer(
        accelerator="cpu", devices=DEVICES, num_nodes=NODES, strategy=strategy, max_steps=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Module(config), DataLoader(rows, batch_size=2))
    say(f"{trainer.global_rank} of {trainer.world_size} on node {trainer.node_rank}: {strategy.sizes}")
"""

pytestmark = needs_proc
STANDALONE = (*TORCHRUN, "--standalone", "--nproc_per_node")


def _run(folder, devices, nodes=1, stages=1, *, failing=-1, how="none", timeout=1800, launcher=(), variables=()):
    """Start once for each node; return exit codes, everything that was said, and the seconds after a fault."""
    arguments = (devices, nodes, stages, timeout, failing, how)
    processes = [start(folder, SCRIPT, *arguments, launcher=launcher, **each) for each in variables or ({},)]
    codes, outputs, seconds = finish(folder, *processes)
    return codes, "".join(outputs), seconds


def _losses(output):
    return re.findall(r"loss ([\d.]+)", output)


def _free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.mark.parametrize(
    ("stages", "sizes"), [pytest.param(1, "tensor 2 × data 2", marks=pytest.mark.slow), (2, "tensor 2 × pipeline 2")]
)
def test_torchrun_starts_the_same_run(tmp_path, stages, sizes):
    _, expected, _ = _run(tmp_path, 4, stages=stages)
    codes, output, _ = _run(tmp_path, 4, stages=stages, launcher=(*STANDALONE, "4"))
    assert codes == [0], output
    assert len(_losses(output)) == 4
    assert _losses(output) == _losses(expected)
    for process in range(4):
        assert f"{process} of 4 on node 0: {sizes}" in output


@pytest.mark.parametrize(
    "by_torchrun", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["torchrun", "environment variables"]
)
def test_two_nodes_run_as_one(tmp_path, by_torchrun):
    _, expected, _ = _run(tmp_path, 2)
    port = _free_port()
    if by_torchrun:
        rendezvous = ("--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}")
        launcher, variables = (*TORCHRUN, "--nnodes", "2", "--nproc_per_node", "1", *rendezvous), ({}, {})
    else:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        launcher, variables = (), [{**address, "NODE_RANK": str(node)} for node in range(2)]
    codes, output, _ = _run(tmp_path, 1, nodes=2, launcher=launcher, variables=variables)
    assert codes == [0, 0], output
    assert _losses(output) == _losses(expected) != []
    for node in range(2):
        assert f"{node} of 2 on node {node}: tensor 2" in output


@pytest.mark.parametrize(
    ("how", "first"),
    [
        ("raise", "The first failure was that of process 1: ArithmeticError: planted"),
        pytest.param(
            "kill", "It lost its connection to another process, which has not said why", marks=pytest.mark.slow
        ),
    ],
)
def test_a_failure_under_torchrun_ends_all(tmp_path, how, first):
    """known_failures A77."""
    codes, output, seconds = _run(tmp_path, 4, failing=1, how=how, launcher=(*STANDALONE, "4"))
    assert codes == [1]
    assert first in output
    # torchrun's own last words
    assert re.search(r"Root Cause \(first observed failure\):(\n.*){3}\n +rank +: 1 ", output)
    assert seconds < LIMIT_SECONDS
