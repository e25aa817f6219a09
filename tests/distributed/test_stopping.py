"""A run that a signal stops goes on to the weights of one that was not, wherever the signal came."""

import os
import signal
import stat

import pytest
from lightning.pytorch import seed_everything
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader

from lightning_boost import BoostParallelStrategy
from tests.models import masked_batch, whole
from tests.processes import run_processes
from tests.users_module import VOCAB, UsersModule, trainer_for

EPOCH = 5
"""Batches; with windows of two the last of an epoch is shorter."""


class _Signalled(UsersModule):
    """Sends its own process a signal in the middle of a batch."""

    def __init__(self, at, process, signum):
        super().__init__()
        self.at, self.process, self.signum = at, process, signum

    def training_step(self, batch, batch_idx):
        if len(self.losses) == self.at and self.global_rank == self.process:
            os.kill(os.getpid(), self.signum)
        return super().training_step(batch, batch_idx)


def _loader(replicas):
    num_rows = 3 * EPOCH * replicas
    batch = masked_batch(VOCAB, rows=num_rows)
    rows = [{name: tensor[row] for name, tensor in batch.items()} for row in range(num_rows)]
    return DataLoader(rows, batch_size=3, shuffle=True)


def _run(folder, at=None, process=0, signum=signal.SIGTERM, resume=None, tensor=1, plugins=()):
    seed_everything(3, verbose=False)
    module = _Signalled(at, process, signum)
    trainer = trainer_for(
        strategy=BoostParallelStrategy(tensor),
        max_epochs=3,
        accumulate_grad_batches=2,
        val_check_interval=2,
        default_root_dir=folder,
        use_distributed_sampler=True,
        plugins=list(plugins),
    )
    code = 0
    try:
        replicas = trainer.world_size // tensor
        trainer.fit(module, _loader(replicas), _loader(replicas), ckpt_path=resume)
    except SystemExit as end:
        code = end.code
    weights = {name: whole(parameter).detach().numpy() for name, parameter in module.named_parameters()}
    return code, trainer.global_step, module.losses, weights


def _assert_same(run, expected):
    code, step, losses, weights = run
    assert (code, step) == expected[:2]
    assert losses == pytest.approx(expected[2][-len(losses) :], rel=1e-6)
    for name, weight in expected[3].items():
        assert weights[name] == pytest.approx(weight, rel=1e-6, abs=1e-7), name


PLACES = {0: 1, 3: 2, EPOCH - 1: 3, EPOCH + 1: 4}
"""Batches before the signal: steps that are taken then."""


@pytest.mark.parametrize(("processes", "tensor", "places"), [(1, 1, PLACES), (2, 2, [0]), (2, 1, [EPOCH - 1])])
def test_it_goes_on_as_if_it_had_not_been_stopped(tmp_path, processes, tensor, places):
    """In the middle of a window, at a validation, at the end of an epoch; known_failures A78."""
    expected = run_processes(_run, processes, tmp_path, None, 0, signal.SIGTERM, None, tensor)
    last = processes - 1
    for at in places:
        step = PLACES[at]
        stopped = run_processes(_run, processes, tmp_path, at, last, signal.SIGUSR1, None, tensor)
        assert [each[:2] for each in stopped] == [(75, step)] * processes
        path = tmp_path / f"interrupted_step_{step}.ckpt"
        rest = run_processes(_run, processes, tmp_path, None, 0, signal.SIGTERM, path, tensor)
        for run, whole_run in zip(rest, expected, strict=True):
            _assert_same(run, whole_run)


def test_a_signal_in_the_last_step_changes_nothing(tmp_path):
    run = run_processes(_run, 1, tmp_path, 3 * EPOCH - 1)[0]
    assert run[:2] == (0, 9)
    assert not list(tmp_path.iterdir())


def _under_slurm(folder, at, resume):
    # what srun and its job would set
    os.environ.update(
        SLURM_JOB_ID="17",
        SLURM_NTASKS="2",
        SLURM_NTASKS_PER_NODE="2",
        SLURM_NNODES="1",
        SLURM_PROCID=os.environ["RANK"],
        SLURM_LOCALID=os.environ["RANK"],
        SLURM_NODEID="0",
        PATH=f"{folder}:{os.environ['PATH']}",
    )
    return _run(folder, at, 1, signal.SIGUSR1, resume, 2, [SLURMEnvironment(auto_requeue=True)])


def test_slurm_s_signal_saves_requeues_and_goes_on_as_lightning_does(tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/requeued"\n')
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
    expected = run_processes(_under_slurm, 2, tmp_path, None, None)
    assert not (tmp_path / "requeued").exists()
    for run, whole_run in zip(run_processes(_under_slurm, 2, tmp_path, 3, None), expected, strict=True):
        _assert_same(run, whole_run)
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    assert (tmp_path / "hpc_ckpt_1.ckpt").is_dir()
    # the requeued job is started as the first was, and finds it
    for run, whole_run in zip(run_processes(_under_slurm, 2, tmp_path, None, None), expected, strict=True):
        assert len(run[2]) == 3 * EPOCH - 4
        _assert_same(run, whole_run)
