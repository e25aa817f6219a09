"""Benchmarks in processes that torchrun has started, and on devices that are not there."""

import json
import os

import pytest
import torch

from lightning_boost.benchmark import processes
from lightning_boost.cli import main
from lightning_boost.commands.benchmark import BENCHMARKS
from tests.launched import TORCHRUN, finish, needs_proc, start

SCRIPT = "from lightning_boost.cli import main\n\nmain()\n"
TINY = [
    "--sizes.hidden_size=32",
    "--sizes.intermediate_size=48",
    "--sizes.bottleneck_size=8",
    "--sizes.num_attention_heads=4",
    "--sizes.sequence_length=8",
    "--sizes.num_sequences=1",
]


def _under_torchrun(folder, *options):
    launcher = (*TORCHRUN, "--standalone", "--nproc-per-node=2")
    run = start(folder, SCRIPT, "benchmark", *options, launcher=launcher)
    (code,), (output,), _ = finish(folder, run)
    return code, output


@needs_proc
@pytest.mark.parametrize(
    "options",
    [("strategy", "--repetitions=2", *TINY), ("numerics", "--processes=2", "--repetitions=1")],
    ids=lambda options: options[0],
)
def test_processes_of_torchrun_give_one_report_and_end_well(options, tmp_path):
    code, output = _under_torchrun(tmp_path, *options, "--json")
    assert code == 0, output
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert [each["sizes"]["processes"] for each in found] == [2]
    assert "Signal" not in output


@needs_proc
@pytest.mark.slow
def test_another_number_of_processes_than_torchrun_s_is_refused(tmp_path):
    code, output = _under_torchrun(tmp_path, "statistic", "--processes=4")
    assert code != 0
    assert "error: processes (4) must be the number that torchrun has started (2)." in output


def test_a_process_of_torchrun_leaves_before_python_takes_its_threads_down(monkeypatch, capfd):
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    assert processes.leave(0) == 0
    assert left == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    processes.leave(3)
    assert left == [3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("what", [name for name in BENCHMARKS if name not in ("counts", "memory", "kernels")])
def test_gpus_that_are_not_there_are_told_before_anything_starts(what, capfd):
    with pytest.raises(SystemExit) as exit_info:
        main(["benchmark", what, "--device=cuda", "--processes=2"])
    assert exit_info.value.code == 2
    assert (
        "device ('cuda') needs a GPU for each of 2 processes, and torch sees 0; set processes, or device to 'cpu'."
        in capfd.readouterr().err
    )
