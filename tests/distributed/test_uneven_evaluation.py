"""Replicas that have different numbers of rows or batches evaluate and predict as one process does on all of them."""

import numpy
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.utils.data import DataLoader

from lightning_boost.mesh import DATA_AXIS
from tests.distributed.test_pipeline_trainer import CONFIG, Module, strategy
from tests.models import masked_batch
from tests.processes import run_processes
from tests.users_module import trainer_for

LAYOUTS = {
    "2 replicas": (2, 1, 1, "replicate"),
    "2 replicas, sharded": (2, 1, 1, "shard"),
    "tensor 2, 2 replicas": (4, 1, 2, "replicate"),
    "tensor 2, 2 replicas, sharded": (4, 1, 2, "shard"),
    "pipeline 2, 2 replicas": (4, 2, 1, "replicate"),
    "pipeline 2, 2 replicas, sharded": (4, 2, 1, "shard"),
}


class _Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("epoch")

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.logits = dict(zip(sum(batch_indices[0], []), torch.cat(predictions).numpy(), strict=True))


def _rows(count):
    batch = masked_batch(CONFIG.vocab_size, rows=count)
    return [{name: tensor[row] for name, tensor in batch.items()} for row in range(count)]


def _predict(pipeline, tensor, data_axis, num_rows, batch_size):
    torch.manual_seed(5)
    writer = _Writer()
    trainer = trainer_for(
        strategy=strategy(pipeline, tensor, data_axis=data_axis), use_distributed_sampler=True, callbacks=[writer]
    )
    trainer.predict(Module(), DataLoader(_rows(num_rows), batch_size=batch_size))
    return writer.logits


def _assert_predicted(layout, num_rows, batch_size):
    processes, *arguments = LAYOUTS[layout]
    expected = run_processes(_predict, 1, 1, 1, "replicate", num_rows, batch_size)[0]
    found = run_processes(_predict, processes, *arguments, num_rows, batch_size)
    assert set().union(*found) == expected.keys()
    for logits in found:
        assert len(logits) < num_rows
        for row, values in logits.items():
            numpy.testing.assert_allclose(values, expected[row], atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_row_is_predicted_as_on_one_process(layout):
    """Three rows and two: one replica has a batch more."""
    _assert_predicted(layout, 5, 2)


def test_replicas_cut_batches_of_different_sizes_into_as_many_micro_batches():
    """Four rows and three."""
    _assert_predicted("pipeline 2, 2 replicas, sharded", 7, 4)


class _Validating(Module):
    """Sums over batches, as a metric does; each replica has a number of its own."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def val_dataloader(self):
        mesh = self.trainer.strategy.device_mesh[DATA_AXIS]
        replica = mesh.get_local_rank() if mesh.size() > 1 else 0
        first = sum(self.counts[:replica])
        return DataLoader(_rows(sum(self.counts))[first : first + self.counts[replica]], batch_size=1)

    def on_validation_epoch_start(self):
        self.sums = torch.zeros(2)

    def validation_step(self, batch, batch_idx):
        self.sums += torch.tensor([self.model(**batch).item(), 1.0])

    def on_validation_epoch_end(self):
        # where a metric is computed: all replicas must have come
        total, count = self.trainer.strategy.reduce(self.sums, reduce_op="sum")
        self.log("val_loss", total / count)

    test_dataloader, test_step = val_dataloader, validation_step
    on_test_epoch_start, on_test_epoch_end = on_validation_epoch_start, on_validation_epoch_end


def _evaluate(pipeline, tensor, data_axis, counts):
    torch.manual_seed(5)
    module = _Validating(counts)
    trainer = trainer_for(strategy=strategy(pipeline, tensor, data_axis=data_axis), max_epochs=2)
    trainer.fit(module, DataLoader(_rows(4), batch_size=4))
    losses = [trainer.callback_metrics["val_loss"].item()]
    return losses + [run(module, verbose=False)[0]["val_loss"] for run in (trainer.validate, trainer.test)]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "sharded" in name])
def test_replicas_with_different_numbers_of_batches_evaluate_all_of_them(layout):
    """known_failures A15: seven batches and five."""
    processes, *arguments = LAYOUTS[layout]
    expected = run_processes(_evaluate, 1, 1, 1, "replicate", (12,))[0]
    for losses in run_processes(_evaluate, processes, *arguments, (7, 5)):
        assert losses == pytest.approx(expected, rel=1e-5)
