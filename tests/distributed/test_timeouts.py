"""The strategy's ``timeout`` holds on every axis, not only in the group of all processes."""

import logging
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_boost import BoostParallelStrategy
from lightning_boost.mesh import ParallelSizes, build_mesh
from tests.processes import run_processes
from tests.users_module import UsersModule, loader, trainer_for

ON_THREE_AXES = ParallelSizes(pipeline_parallel_size=2, data_parallel_size=2, tensor_parallel_size=2)
HYBRID = ParallelSizes(data_parallel_size=4, data_replicate_size=2, tensor_parallel_size=2)


def _seconds_in_vain(sizes):
    """Wait on each axis for the process that does not come."""
    mesh, waited = build_mesh(sizes, "cpu", timedelta(seconds=1)), {}
    for name in [*mesh.mesh_dim_names, "data_parallel"]:
        dist.barrier()
        if mesh[name].size() == 1 or mesh[name].get_local_rank() == 1:
            time.sleep(2)
            continue
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="Timed out waiting 1000ms|Application timeout"):
            dist.all_reduce(torch.zeros(1), group=mesh[name].get_group())
        waited[name] = time.monotonic() - began
    return waited


@pytest.mark.parametrize("sizes", [ON_THREE_AXES, HYBRID], ids=["three axes", "hybrid"])
def test_it_holds_on_every_axis(sizes):
    waited = [seconds for each in run_processes(_seconds_in_vain, 8, sizes) for seconds in each.values()]
    assert waited
    assert max(waited) < 10


class _Hanging(UsersModule):
    """Its process 1 hangs inside the model: its replica waits on the tensor axis, the other one on the data axis."""

    def on_train_start(self):
        if dist.get_rank() == 1:
            self.net.model.layers[1].register_forward_pre_hook(lambda *_: time.sleep(3600))


def _hang(path):
    logging.getLogger("lightning_boost").addHandler(logging.FileHandler(path))
    trainer_for(strategy=BoostParallelStrategy(2, timeout=timedelta(seconds=3))).fit(_Hanging(), loader())


def test_a_process_that_hangs_in_the_model_is_named(tmp_path):
    with pytest.raises(RuntimeError, match="Timed out waiting 3000ms|Application timeout"):
        run_processes(_hang, 4, tmp_path / "log", timeout=30)
    said = (tmp_path / "log").read_text()
    assert "for process 1, which did not join it within timeout (0:00:03)" in said
