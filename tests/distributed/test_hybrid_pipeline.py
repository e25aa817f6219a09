"""A hybrid data axis on several nodes, with a pipeline: the nodes are pretended, as torchrun would tell of them."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.distributed.test_pipeline_trainer import CONFIG, Module, strategy
from tests.models import masked_batch, whole
from tests.processes import run_processes
from tests.users_module import trainer_for

ROWS = 8


class _Recording(Module):
    """Takes SGD steps, which a wrong scale of the gradients would show in."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def on_before_optimizer_step(self, optimizer):
        self.gradients = {name: whole(parameter.grad).clone().numpy() for name, parameter in self.named_parameters()}


def _train(path, nodes, pipeline, data, data_axis, resume):
    world_size, process = dist.get_world_size(), dist.get_rank()
    of_a_node = world_size // nodes
    os.environ.update(LOCAL_RANK=str(process % of_a_node), GROUP_RANK=str(process // of_a_node))
    torch.manual_seed(5)
    module, batch = _Recording(), masked_batch(CONFIG.vocab_size, rows=ROWS)
    rows = [{name: tensor[row] for name, tensor in batch.items()} for row in range(ROWS)]
    trainer = trainer_for(
        strategy=strategy(pipeline, data_axis=data_axis),
        devices=of_a_node,
        num_nodes=nodes,
        max_epochs=4 if resume else 2,
        gradient_clip_val=0.5,
        use_distributed_sampler=True,
    )
    trainer.fit(module, DataLoader(rows, batch_size=ROWS // data), ckpt_path=path if resume else None)
    trainer.save_checkpoint(path)
    weights = {name: whole(parameter).numpy() for name, parameter in module.named_parameters()}
    return module.gradients, weights, trainer.strategy.device_mesh.mesh_dim_names


def _assert_close(found, expected, tolerance):
    largest = max(abs(value).max() for value in expected.values())
    for name, value in found.items():
        assert abs(value - expected[name]).max() < tolerance * largest, name


@pytest.mark.parametrize(
    ("nodes", "processes", "data", "axis"),
    [(2, 4, 2, "data_parallel"), (4, 8, 4, "data_replicate")],
    ids=["a stage in each node", "two nodes for each stage"],
)
def test_it_trains_as_one_process_and_its_checkpoint_goes_on_on_one(tmp_path, nodes, processes, data, axis):
    gradients, weights, _ = run_processes(_train, 1, tmp_path / "one.ckpt", 1, 1, 1, "replicate", False)[0]
    names = set()
    for found in run_processes(_train, processes, tmp_path / "nodes.ckpt", nodes, 2, data, "hybrid", False):
        assert axis in found[2]
        _assert_close(found[0], gradients, 1e-5)
        _assert_close(found[1], weights, 1e-6)
        names |= found[1].keys()
    assert names == weights.keys()
    expected = run_processes(_train, 1, tmp_path / "one.ckpt", 1, 1, 1, "replicate", True)[0]
    resumed = run_processes(_train, 1, tmp_path / "nodes.ckpt", 1, 1, 1, "replicate", True)[0]
    _assert_close(resumed[1], expected[1], 1e-6)
