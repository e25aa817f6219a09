"""Replicas that see different data train the model that one process trains on all of it."""

import contextlib
import io
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_boost import BoostParallelStrategy, LowRankLanguageModel, TextDataModule, data_parallel
from lightning_boost.commands.parity import SHAPES, model_config
from lightning_boost.config import IGNORED_LABEL
from lightning_boost.gradients import global_gradient_norm
from lightning_boost.mesh import DATA_AXIS, ParallelSizes, build_mesh
from lightning_boost.parallelize import parallelize
from lightning_boost.parity import check_parity
from lightning_boost.strategy import boost
from lightning_boost.tensor_parallel.layout import find_decoder
from tests.models import CPU, SEED, gradient_errors, masked_batch, meta_model, one_process_model, small_config
from tests.processes import run_processes
from tests.users_module import UsersModule, loader, trainer_for

LAYOUTS = {
    "2 replicas": (2, 1, "replicate"),
    "2 replicas, sharded": (2, 1, "shard"),
    "4 replicas, sharded": (4, 1, "shard"),
    "tensor 2, 2 replicas": (4, 2, "replicate"),
    "tensor 2, 2 replicas, sharded": (4, 2, "shard"),
}


def _report(config, tensor_parallel_size, data_axis, plant=None):
    if plant is not None:
        plant()
    with contextlib.redirect_stderr(io.StringIO()):
        return check_parity(
            config,
            tensor_parallel_size=tensor_parallel_size,
            num_processes=dist.get_world_size(),
            data_axis=data_axis,
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicas_train_as_one_process_on_all_data(layout):
    """Unequal masks: known_failures A07, A40; clipping: A35; known_failures A38."""
    processes, tensor, data_axis = LAYOUTS[layout]
    report = run_processes(_report, processes, small_config(), tensor, data_axis)[0]
    assert report.passed, report
    assert f"data {processes // tensor}" in report.layout


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_does_too(shape):
    report = run_processes(_report, 4, model_config("cola", shape), 2, "shard")[0]
    assert report.passed, report


@pytest.mark.parametrize("shape", ["biased", "one_key_value_head", "tied"])
def test_dense_models_do_too(shape):
    report = run_processes(_report, 4, model_config("full_rank", shape), 2, "shard")[0]
    assert report.passed, report


def mean_of_means():
    """Weigh replicas alike, however many valid tokens they have."""
    data_parallel.TokenWeightedLoss.forward = lambda self, *arguments: self.loss(*arguments)


def no_average():
    spread = boost.BoostParallelStrategy._spread

    def without(self, decoder):
        spread(self, decoder)
        data_parallel.set_gradient_sync(decoder.root, False)

    boost.BoostParallelStrategy._spread = without


def same_data_everywhere():
    boost.BoostParallelStrategy.distributed_sampler_kwargs = property(lambda self: {"num_replicas": 2, "rank": 0})


def _excess(plant):
    try:
        return _report(small_config(), 1, "replicate", plant).worst_of_tolerance
    except ValueError:
        # without the average there is no gradient to compare
        return float("inf")


@pytest.mark.parametrize("plant", [mean_of_means, no_average, same_data_everywhere], ids=lambda plant: plant.__name__)
def test_a_planted_defect_is_seen(plant):
    assert min(run_processes(_excess, 2, plant)) > 3


def _hybrid():
    config = small_config()
    batch = masked_batch(config.vocab_size, rows=8)
    model, reference = meta_model(config), one_process_model(config)
    mesh = build_mesh(ParallelSizes(data_parallel_size=4, data_replicate_size=2), "cpu")
    parallelize(find_decoder(model), mesh, device=CPU, seed=SEED, data_axis="hybrid")
    replica = mesh[DATA_AXIS].get_local_rank()
    reference(**batch).backward()
    model(**{name: tensor[replica::4] for name, tensor in batch.items()}).backward()
    norms = [global_gradient_norm(each.parameters()).item() for each in (model, reference)]
    return max(gradient_errors(model, reference).values()), abs(norms[0] / norms[1] - 1)


def test_hybrid_shards_inside_groups_and_replicates_across_them():
    for gradient, norm in run_processes(_hybrid, 4):
        assert gradient < 1e-5
        assert norm < 1e-5


def _empty_replica():
    config = small_config()
    batch = masked_batch(config.vocab_size)
    batch["labels"][1::2] = IGNORED_LABEL
    model, reference = meta_model(config), one_process_model(config)
    mesh = build_mesh(ParallelSizes(data_parallel_size=2), "cpu")
    parallelize(find_decoder(model), mesh, device=CPU, seed=SEED)
    replica = mesh[DATA_AXIS].get_local_rank()
    reference(**batch).backward()
    model(**{name: tensor[replica::2] for name, tensor in batch.items()}).backward()
    return max(gradient_errors(model, reference).values())


def test_a_replica_without_a_valid_label_counts_nothing():
    """known_failures A41."""
    assert max(run_processes(_empty_replica, 2)) < 1e-5


class _SGD(UsersModule):
    def __init__(self):
        super().__init__()
        self.steps = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def on_before_optimizer_step(self, optimizer):
        self.steps.append(global_gradient_norm(self.parameters()).item())


def _last_window(accumulate):
    torch.manual_seed(0)
    module = _SGD()
    trainer_for(accumulate_grad_batches=accumulate).fit(module, loader(num_batches=4))
    torch.manual_seed(0)
    expected = UsersModule()
    expected.net.train()
    batches, norms, start = list(loader(num_batches=4)), [], 0
    while start < len(batches):
        window = batches[start : start + accumulate]
        expected.zero_grad()
        for batch in window:
            (expected._loss(batch) / len(window)).backward()
        norms.append(global_gradient_norm(expected.parameters()).item())
        with torch.no_grad():
            for parameter in expected.parameters():
                parameter -= parameter.grad
        start += accumulate
    return module.steps, norms


@pytest.mark.parametrize("size", [1, 2])
def test_a_shorter_last_window_of_accumulation_weighs_as_its_own_mean(size):
    """known_failures A60, V11: four batches, three accumulated."""
    for found, expected in run_processes(_last_window, size, 3):
        assert len(found) == 2
        assert found == pytest.approx(expected, rel=1e-4)


class _Launches(TorchDispatchMode):
    """Counts what reaches the process groups, by operation."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _reductions(data_axis, accumulate):
    torch.manual_seed(0)
    strategy = BoostParallelStrategy(1, data_axis=data_axis)
    trainer = trainer_for(strategy=strategy, accumulate_grad_batches=accumulate)
    with _Launches() as launches:
        trainer.fit(UsersModule(), loader(num_batches=4))
    return sum(count for name, count in launches.counts.items() if "reduce_scatter" in name)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_gradients_are_reduced_once_for_each_optimizer_step(accumulate):
    """Three units (two layers and the rest), reduced with the last batch of a window; known_failures A10."""
    for scattered in run_processes(_reductions, 2, "shard", accumulate):
        assert scattered == 3 * (4 // accumulate)


def _validate():
    torch.manual_seed(0)
    module = LowRankLanguageModel(small_config(vocab_size=257, num_hidden_layers=1))
    data = TextDataModule(sequence_length=311, batch_size=4)
    strategy = BoostParallelStrategy(1, data_axis="shard")
    trainer = trainer_for(strategy=strategy, use_distributed_sampler=True)
    loss = trainer.validate(module, data, verbose=False)[0]["val_loss"]
    return loss, len(data.held_out[""])


def test_validation_counts_every_sequence_once():
    """known_failures A15, A59: a number of sequences that replicas cannot share evenly."""
    expected, num_sequences = run_processes(_validate, 1)[0]
    assert num_sequences % 4
    for size in (2, 4):
        for loss, _ in run_processes(_validate, size):
            assert loss == pytest.approx(expected, abs=1e-6)


class _PastForward(UsersModule):
    def _loss(self, batch):
        logits = self.net.lm_head(self.net.model(batch["input_ids"]))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def _error_of(make_module, tensor):
    try:
        trainer_for(strategy=BoostParallelStrategy(tensor)).fit(make_module(), loader())
    except RuntimeError as error:
        return str(error)
    return ""


def test_calling_parts_of_the_model_past_its_forward_is_refused():
    for error in run_processes(_error_of, 4, _PastForward, 2):
        assert "training_step did not call" in error
