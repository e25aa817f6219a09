"""Replicas that see different data train the model that one process trains on all of it."""

import contextlib
import io
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_boost import BoostParallelStrategy, LowRankLanguageModel, TextDataModule, data_parallel
from lightning_boost.commands.parity import SHAPES, model_config
from lightning_boost.config import IGNORED_LABEL
from lightning_boost.gradients import global_gradient_norm
from lightning_boost.layout import find_decoder
from lightning_boost.mesh import DATA_AXIS, ParallelSizes, build_mesh
from lightning_boost.model.initialization import initialize
from lightning_boost.model.llama import LlamaForCausalLM
from lightning_boost.model.loss import loss_of
from lightning_boost.parallelize import parallelize
from lightning_boost.parity import check_parity
from lightning_boost.strategy import boost
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
    spread = boost.spread_over_mesh

    def without(module, decoder, *arguments):
        spread(module, decoder, *arguments)
        data_parallel.set_gradient_sync(decoder.root, False)

    boost.spread_over_mesh = without


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


class _LooksAround(UsersModule):
    """Asks between steps which parameters it has, as callbacks do that know parameters by identity."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.held = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
        self.strangers = []
        return optimizer

    def look(self):
        self.strangers.append(sum(id(parameter) not in self.held for parameter in self.parameters()))

    on_train_epoch_start = on_validation_epoch_end = on_train_end = look


def _strangers(data_axis):
    module = _LooksAround()
    strategy = BoostParallelStrategy(1, data_axis=data_axis)
    trainer_for(strategy=strategy, num_sanity_val_steps=1, max_epochs=2).fit(module, loader(), loader())
    return module.strangers


@pytest.mark.parametrize("data_axis", ["replicate", "shard"])
def test_between_steps_a_module_has_the_parameters_that_its_optimizer_holds(data_axis):
    assert run_processes(_strangers, 2, data_axis) == [[0] * 6] * 2


def _other_axis(first, second):
    module = UsersModule()
    trainer_for(strategy=BoostParallelStrategy(1, data_axis=first), max_steps=1).fit(module, loader())
    try:
        trainer_for(strategy=BoostParallelStrategy(1, data_axis=second)).validate(module, loader(), verbose=False)
    except ValueError as error:
        return str(error)
    return ""


def test_another_data_axis_for_a_module_that_is_spread_is_refused():
    for error in run_processes(_other_axis, 2, "shard", "replicate"):
        assert "data_axis ('replicate') must be 'shard': an earlier Trainer has spread this module so" in error
    assert run_processes(_other_axis, 2, "shard", "shard") == ["", ""]
    assert run_processes(_other_axis, 1, "shard", "replicate") == [""]


class _LogitsAndLoss(NamedTuple):
    logits: torch.Tensor
    loss: torch.Tensor


@dataclass(frozen=True)
class _Frozen:
    loss: torch.Tensor
    logits: torch.Tensor


class _OwnLoss(LlamaForCausalLM):
    """Takes its loss from logits, as Hugging Face's models do, and returns it in one of their forms."""

    def __init__(self, config, form):
        super().__init__(config)
        del self.loss
        self.form = form

    def forward(self, input_ids, labels=None):
        logits = self.lm_head(self.model(input_ids))
        loss = None if labels is None else cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        forms = {
            "mapping": dict,
            "object": SimpleNamespace,
            "frozen": _Frozen,
            "tuple": lambda loss, logits: (loss, logits),
            "named_tuple": _LogitsAndLoss,
            "logits_first": lambda loss, logits: (logits, loss),
        }
        return loss if self.form == "alone" else forms[self.form](loss=loss, logits=logits)


def _own_loss_errors(form, data_axis, tensor, plant=None, nothing_on_one=False):
    if plant is not None:
        plant()
    config = small_config()
    with torch.device("meta"):
        model, reference = _OwnLoss(config, form), _OwnLoss(config, form)
    initialize(reference, seed=SEED)
    replicas = dist.get_world_size() // tensor
    mesh = build_mesh(ParallelSizes(tensor_parallel_size=tensor, data_parallel_size=replicas), "cpu")
    parallelize(find_decoder(model), mesh, device=CPU, seed=SEED, data_axis=data_axis)
    batch = masked_batch(config.vocab_size)
    if nothing_on_one:
        batch["labels"][1::replicas] = IGNORED_LABEL
    replica = mesh[DATA_AXIS].get_local_rank()
    mine = {name: value[replica::replicas] for name, value in batch.items()}
    loss = loss_of(model(mine["input_ids"], mine["labels"]) if form == "tuple" else model(**mine))
    loss.backward()
    expected = loss_of(reference(**batch))
    expected.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if nothing_on_one:
        return gradient_errors(model, reference)
    with torch.no_grad():
        alone = loss_of(model(**mine)) - loss_of(reference(**mine))
    return {
        "loss": abs(mean.item() / dist.get_world_size() - expected.item()),
        "alone": abs(alone.item()),
    } | gradient_errors(model, reference)


@pytest.mark.parametrize("form", ["alone", "mapping", "object", "frozen", "tuple", "named_tuple"])
def test_a_loss_of_the_model_s_own_is_weighed_by_tokens(form):
    """In evaluation it is the replica's own."""
    for errors in run_processes(_own_loss_errors, 2, form, "shard" if form == "object" else "replicate", 1):
        assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])


def test_it_is_so_where_layers_are_shared():
    for errors in run_processes(_own_loss_errors, 4, "object", "shard", 2):
        assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])


def test_a_replica_without_a_valid_label_adds_nothing():
    """known_failures A41: the model's own mean over no label is no number."""
    for errors in run_processes(_own_loss_errors, 2, "object", "replicate", 1, None, True):
        assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])


def unweighted():
    data_parallel.TokenWeights.weighted = lambda self, loss, labels: loss


def test_a_loss_that_is_not_weighed_is_seen():
    assert max(run_processes(_own_loss_errors, 2, "object", "replicate", 1, unweighted)[0].values()) > 1e-2


class _Wrapped(_OwnLoss):
    """Hands on whatever it is called with."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def _gradient_errors_of_wrapped():
    config = small_config()
    with torch.device("meta"):
        model, reference = _Wrapped(config, "alone"), _Wrapped(config, "alone")
    initialize(reference, seed=SEED)
    mesh = build_mesh(ParallelSizes(data_parallel_size=2), "cpu")
    parallelize(find_decoder(model), mesh, device=CPU, seed=SEED)
    batch, replica = masked_batch(config.vocab_size), mesh[DATA_AXIS].get_local_rank()
    model(batch["input_ids"][replica::2], labels=batch["labels"][replica::2]).backward()
    reference(**batch).backward()
    return gradient_errors(model, reference)


def test_a_forward_without_names_is_called_as_it_was():
    for errors in run_processes(_gradient_errors_of_wrapped, 2):
        assert max(errors.values()) < 1e-5


@pytest.mark.parametrize(
    ("form", "arguments", "message"),
    [
        ("logits_first", {}, "must return its mean loss as one number, .* and returned tuple"),
        ("alone", {"num_items_in_batch": 7}, "num_items_in_batch must be left out where a model runs on several"),
        ("alone", {"labels": torch.zeros(4, dtype=torch.long)}, r"labels \(\[4\]\) must be \[B, T\]"),
    ],
)
def test_a_loss_that_cannot_be_weighed_is_refused(form, arguments, message):
    """A replica without a valid label would learn token 0, were the loss not found."""
    config = small_config()
    with torch.device("meta"):
        model = _OwnLoss(config, form)
    initialize(model, seed=SEED)
    data_parallel.TokenWeights(mesh=None).attach(model)
    with pytest.raises((TypeError, ValueError), match=message):
        model(**masked_batch(config.vocab_size) | arguments)


def _weight_of_narrow_loss():
    mesh = build_mesh(ParallelSizes(data_parallel_size=2), "cpu")
    valid = 257 if mesh[DATA_AXIS].get_local_rank() else 511
    labels = torch.full((1, 600), IGNORED_LABEL)
    labels[0, 1 : valid + 1] = 0
    return data_parallel.TokenWeights(mesh[DATA_AXIS]).weighted(torch.ones((), dtype=torch.bfloat16), labels).item()


def test_tokens_of_a_narrow_loss_are_counted_exactly():
    assert run_processes(_weight_of_narrow_loss, 2) == pytest.approx([511 / 384, 257 / 384], rel=1e-6)
