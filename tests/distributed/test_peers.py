"""What ``benchmark peers`` times is what Lightning's own strategy trains."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.tensor import Partial
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.utils.data import DataLoader

from lightning_boost.benchmark import block, peers
from lightning_boost.benchmark.blocks import BlockSizes, block_config
from lightning_boost.benchmark.setup import Setup
from lightning_boost.communication_trace import CommunicationTrace
from lightning_boost.mesh import TENSOR_AXIS
from lightning_boost.parity.trajectory import Trajectory, compare
from tests.models import CPU, masked_batch, one_process_model, whole
from tests.processes import run_processes
from tests.users_module import trainer_for

SIZES = BlockSizes(
    hidden_size=64,
    intermediate_size=173,
    bottleneck_size=16,
    num_attention_heads=8,
    num_sequences=4,
    sequence_length=12,
    dtype="float32",
)
LAYERS, STEPS, VOCAB = 2, 3, 131
CONFIG = block_config(SIZES, "cola", num_layers=LAYERS, vocab_size=VOCAB)
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=3.0),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4),
}


def _batches():
    batch = masked_batch(VOCAB, rows=STEPS * SIZES.num_sequences, tokens=SIZES.sequence_length)
    rows = [{name: tensor[row] for name, tensor in batch.items()} for row in range(len(batch["input_ids"]))]
    return DataLoader(rows, batch_size=SIZES.num_sequences)


class _PlannedModule(LightningModule):
    """A low-rank model that is split as a user of ``ModelParallelStrategy`` splits it."""

    def __init__(self, optimizer):
        super().__init__()
        self.model, self.optimizer = one_process_model(CONFIG), optimizer
        self.trajectory, self.collectives = Trajectory(), []

    def configure_model(self):
        peers.apply_plan(self.model, self.device_mesh[TENSOR_AXIS])

    def training_step(self, batch, batch_idx):
        with CommunicationTrace({}, is_cuda=False).open() as trace:
            loss = self.model(**batch)
        self.collectives += trace.events()
        self.trajectory.losses.append(loss.item())
        return loss

    def backward(self, loss):
        with CommunicationTrace({}, is_cuda=False).open() as trace:
            loss.backward()
        self.collectives += trace.events()

    def on_before_optimizer_step(self, optimizer):
        note_gradients(self.model, self.trajectory)

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.parameters())


def note_gradients(model, trajectory):
    gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    trajectory.gradient_norms.append(torch.stack([each.norm() for each in gradients.values()]).norm().item())
    trajectory.gradients = trajectory.gradients or gradients


def note_weights(model, trajectory):
    for name, begun in one_process_model(CONFIG).named_parameters():
        trajectory.changes[name] = whole(model.get_parameter(name)) - begun.detach()
        trajectory.weight_norms[name] = begun.norm().item()


def _fit(optimizer, plant=None):
    """Return how far the strategy's run is from one process's, and what it launched."""
    if plant is not None:
        plant()
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=dist.get_world_size())
    module = _PlannedModule(optimizer)
    trainer_for(strategy=strategy).fit(module, _batches())
    note_weights(module.model, module.trajectory)
    return compare(module.trajectory, _one_process(optimizer)), block.traffic_by_pass(module.collectives)


def _one_process(optimizer):
    model, trajectory = one_process_model(CONFIG), Trajectory()
    chosen = OPTIMIZERS[optimizer](model.parameters())
    for batch in _batches():
        chosen.zero_grad()
        loss = model(**batch)
        loss.backward()
        note_gradients(model, trajectory)
        chosen.step()
        trajectory.losses.append(loss.item())
    note_weights(model, trajectory)
    return trajectory


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_torch_s_plan_in_lightning_s_strategy_trains_the_one_process_model(optimizer):
    for errors, _ in run_processes(_fit, 2, optimizer):
        assert max(errors.loss, errors.gradient, errors.gradient_norm, errors.weight) < 1e-5, errors


def test_a_block_launches_what_the_benchmark_counts():
    """Each pair sums its output, and in backward its input's gradient: 5D + 2F and 6D + F values a token."""
    hidden, features, tokens = SIZES.hidden_size, SIZES.intermediate_size, SIZES.num_tokens
    of_a_block = {
        "forward": {"launches": 7, "bytes": 4 * tokens * (5 * hidden + 2 * features)},
        "backward": {"launches": 7, "bytes": 4 * tokens * (6 * hidden + features)},
    }
    of_training = {
        pass_: {name: STEPS * LAYERS * number for name, number in each.items()} for pass_, each in of_a_block.items()
    }
    for _, collectives in run_processes(_fit, 2, "SGD"):
        assert collectives == of_training
    for found in run_processes(block._run, 2, CPU, Setup(sizes=SIZES, repetitions=2), block.peer_steps):
        assert found["collectives"]["peers"] == of_a_block


def _plan_without_sums():
    """Leave each pair's output a part of the sum."""
    peers.RowwiseParallel = lambda: RowwiseParallel(output_layouts=Partial())


def _plan_without_a_pair():
    plain = peers.plan_factor_pairs
    peers.plan_factor_pairs = lambda model: {
        name: style for name, style in plain(model).items() if "0.self_attn.o_proj" not in name
    }


def test_a_plan_that_does_not_sum_is_found():
    for errors, collectives in run_processes(_fit, 2, "SGD", _plan_without_sums):
        assert min(errors.loss, errors.gradient, errors.weight) > 1e-3
        assert collectives["forward"]["launches"] == 0


def test_a_pair_that_is_left_out_of_the_plan_is_found_by_its_launches():
    for _, collectives in run_processes(_fit, 2, "SGD", _plan_without_a_pair):
        assert collectives["forward"]["launches"] == STEPS * (7 * LAYERS - 1)
