"""The strategy inside a Trainer, with modules as users write them."""

import random
import warnings

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_boost import BoostParallelStrategy, LowRankLanguageModel, TextDataModule
from lightning_boost.strategy.random_numbers import agree_on_random_numbers
from tests.models import small_config, whole
from tests.processes import run_processes
from tests.users_module import WIDTH, UsersModule, loader, trainer_for


def _life_of_a_module(meta):
    # other weights in every process: process 0's must win
    torch.manual_seed(dist.get_rank() if not meta else 5)
    module, trainer = UsersModule(meta), trainer_for()
    trainer.fit(module, loader(), loader())
    validated = trainer.validate(module, loader(), verbose=False)[0]["val_loss"]
    tested = trainer.test(module, loader(), verbose=False)[0]["val_loss"]
    predicted = torch.cat(trainer.predict(module, loader()))
    # another Trainer and strategy on the same module
    again = trainer_for().validate(module, loader(), verbose=False)[0]["val_loss"]
    weights = {name: whole(parameter).numpy() for name, parameter in module.named_parameters()}
    return module.losses, [validated, tested, again], predicted.numpy(), weights


@pytest.mark.parametrize("meta", [False, True], ids=["real weights", "meta"])
def test_an_unchanged_module_trains_as_on_one_process(meta):
    """known_failures A25: processes that start from different weights."""
    expected_losses, _, expected_logits, expected_weights = run_processes(_life_of_a_module, 1, meta)[0]
    for size in (2, 4):
        for losses, evaluated, logits, weights in run_processes(_life_of_a_module, size, meta):
            assert losses == pytest.approx(expected_losses, rel=1e-5)
            assert max(evaluated) - min(evaluated) < 1e-6
            assert abs(logits - expected_logits).max() < 1e-4
            assert weights.keys() == expected_weights.keys()
            for name, weight in weights.items():
                assert abs(weight - expected_weights[name]).max() < 1e-4, name


def _fit_and_save(path, steps):
    trainer = trainer_for(max_epochs=steps, strategy=BoostParallelStrategy())
    torch.manual_seed(0)
    module = UsersModule()
    trainer.fit(module, loader(num_batches=1))
    trainer.save_checkpoint(path)
    return module.losses


def _resume(path, steps):
    trainer = trainer_for(max_epochs=steps)
    torch.manual_seed(99)
    module = UsersModule()
    trainer.fit(module, loader(num_batches=1), ckpt_path=path)
    return module.losses, trainer.validate(module, loader(num_batches=1), ckpt_path=path, verbose=False)[0]["val_loss"]


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 2), (2, 1), (1, 2), (4, 2)])
def test_a_checkpoint_goes_on_on_another_layout(tmp_path, saved_by, loaded_by):
    """known_failures A32, A43: sizes that processes do not divide."""
    uninterrupted = run_processes(_fit_and_save, 1, tmp_path / "whole.ckpt", 7)[0]
    run_processes(_fit_and_save, saved_by, tmp_path / "half.ckpt", 4)
    for losses, _ in run_processes(_resume, loaded_by, tmp_path / "half.ckpt", 7):
        assert losses == pytest.approx(uninterrupted[4:], rel=1e-5)


class _NumPySchedule(UsersModule):
    """Its rates are NumPy's numbers, and so is what scheduler and optimizer keep of them."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: numpy.float64(0.5) ** epoch)]


def _save_numpy_numbers(path):
    torch.manual_seed(0)
    module, trainer = _NumPySchedule(), trainer_for(max_epochs=2)
    trainer.fit(module, loader(num_batches=1))
    trainer.save_checkpoint(path)
    return type(trainer.optimizers[0].param_groups[0]["lr"]).__name__


def _load_numpy_numbers(path):
    trainer = trainer_for(max_epochs=3)
    trainer.fit(_NumPySchedule(), loader(num_batches=1), ckpt_path=path)
    return trainer.optimizers[0].param_groups[0]["lr"]


def test_numpy_s_numbers_are_saved_as_plain_ones(tmp_path):
    """known_failures A03."""
    assert run_processes(_save_numpy_numbers, 2, tmp_path / "a.ckpt") == ["float64"] * 2
    assert run_processes(_load_numpy_numbers, 2, tmp_path / "a.ckpt") == pytest.approx([1e-2 * 0.5**3] * 2)


class _OtherRate(UsersModule):
    """Changes its learning rate before the first step, as a search for a good one does."""

    rate = None

    def on_train_start(self):
        group = self.trainer.optimizers[0].param_groups[0]
        if self.rate is None:
            self.rate = group["lr"]
            return
        group["lr"] = self.rate
        self.trainer.save_checkpoint(self.path)


def _rate_before_the_first_step(path):
    first, second = _OtherRate(), _OtherRate()
    first.rate, first.path = 0.25, path
    trainer_for(max_steps=1).fit(first, loader())
    trainer_for(max_steps=1).fit(second, loader(), ckpt_path=path)
    return second.rate


def test_options_of_an_optimizer_that_has_taken_no_step_are_saved(tmp_path):
    assert run_processes(_rate_before_the_first_step, 2, tmp_path / "a.ckpt") == [0.25, 0.25]


def _overwrite(path):
    _fit_and_save(path, 1)
    before = sorted(entry.name for entry in path.parent.iterdir())
    _fit_and_save(path, 2)
    return before, sorted(entry.name for entry in path.parent.iterdir())


def test_saving_again_under_a_name_replaces_the_checkpoint_and_leaves_nothing_behind(tmp_path):
    for before, after in run_processes(_overwrite, 2, tmp_path / "last.ckpt"):
        assert before == after == ["last.ckpt"]


def _train_text(precision):
    torch.manual_seed(0)
    module = LowRankLanguageModel(small_config(vocab_size=257, num_hidden_layers=1), warmup_steps=2)
    data = TextDataModule(sequence_length=32, batch_size=4)
    trainer = trainer_for(
        precision=precision,
        max_steps=6,
        val_check_interval=6,
        limit_val_batches=3,
        gradient_clip_val=1.0,
        use_distributed_sampler=True,
    )
    trainer.fit(module, data)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    dtypes = {parameter.dtype for parameter in module.parameters()}
    return metrics, dtypes


@pytest.mark.parametrize(
    ("precision", "dtype", "tolerance"),
    [("32-true", torch.float32, 1e-5), ("bf16-true", torch.bfloat16, 1e-2), ("bf16-mixed", torch.float32, 1e-2)],
)
def test_metrics_are_equal_on_every_process_and_those_of_one(precision, dtype, tolerance):
    expected, _ = run_processes(_train_text, 1, precision)[0]
    assert {"train_loss", "gradient_norm", "val_loss", "val_perplexity"} <= expected.keys()
    assert expected["val_perplexity"] == pytest.approx(torch.tensor(expected["val_loss"]).exp().item(), rel=1e-4)
    results = run_processes(_train_text, 2, precision)
    assert results[0][0] == results[1][0]
    for metrics, dtypes in results:
        assert dtypes == {dtype}
        assert metrics == pytest.approx(expected, rel=tolerance)


def _clip_by_value():
    torch.manual_seed(0)
    module = UsersModule()
    trainer_for(max_steps=2, gradient_clip_val=1e-3, gradient_clip_algorithm="value").fit(module, loader())
    return {name: whole(parameter).numpy() for name, parameter in module.named_parameters()}


def test_clipping_by_value_is_that_of_one_process():
    expected = run_processes(_clip_by_value, 1)[0]
    for weights in run_processes(_clip_by_value, 2):
        for name, weight in weights.items():
            assert abs(weight - expected[name]).max() < 1e-5, name


class _EarlyOptimizer(UsersModule):
    def __init__(self):
        super().__init__()
        self.early = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self):
        return self.early


class _WithMore(UsersModule):
    def __init__(self):
        super().__init__()
        self.value_head = nn.Linear(WIDTH, 1)


def _error_of(module_class, **options):
    try:
        trainer_for(**options).fit(module_class(), loader())
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("module_class", "message"),
    [
        (_EarlyOptimizer, "built before strategy 'boost' replaced them. Build it inside configure_optimizers"),
        (_WithMore, "value_head.weight, value_head.bias stand outside the decoder"),
    ],
)
def test_what_would_train_something_else_is_refused(module_class, message):
    for error in run_processes(_error_of, 2, module_class):
        assert message in error


class _Draws(UsersModule):
    """Draws numbers from all generators that a process has."""

    def on_train_start(self):
        self.drawn = [torch.rand(()).item(), float(numpy.random.random()), random.random()]


def _drawn():
    module, own_seed = _Draws(), dist.get_rank()
    torch.manual_seed(own_seed)
    numpy.random.seed(own_seed)
    random.seed(own_seed)
    trainer_for(max_steps=1).fit(module, loader())
    return module.drawn


def test_processes_that_share_layers_draw_the_same_random_numbers():
    first, second = run_processes(_drawn, 2)
    assert first == second


def _states_of_devices():
    """Agree with devices that are not there: each has its process's number as its state."""
    set_to = {}
    torch.cuda.get_rng_state = lambda device: torch.tensor(device.index)
    torch.cuda.set_rng_state = lambda state, device: set_to.update({device.index: state.item()})
    agree_on_random_numbers(dist.group.WORLD, torch.device("cuda", dist.get_rank()))
    return set_to


def test_a_process_sets_its_own_device_to_the_state_of_the_first_s():
    assert run_processes(_states_of_devices, 2) == [{0: 0}, {1: 0}]


class _NeedsMore(UsersModule):
    def __init__(self):
        super().__init__()
        forward = self.net.forward
        self.net.forward = lambda input_ids, *, mask: forward(input_ids)

    def _loss(self, batch):
        return self.net(batch["input_ids"], mask=None).square().mean()


class _NeverTheSame(UsersModule):
    def __init__(self):
        super().__init__()
        forward = self.net.forward
        self.net.forward = lambda input_ids: forward(input_ids) + random.random()


def _warnings_of(make_module):
    trainer, module = trainer_for(max_steps=1), make_module()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader())
    return [str(warning.message) for warning in caught if "could not try" in str(warning.message)]


@pytest.mark.parametrize(
    ("make_module", "reason"),
    [(_NeedsMore, "TypeError"), (_NeverTheSame, "it gives something else each time"), (UsersModule, None)],
)
def test_a_model_that_cannot_be_tried_before_and_after_is_told_once(make_module, reason):
    first, second = run_processes(_warnings_of, 2, make_module)
    assert second == []
    assert len(first) == (reason is not None)
    assert all(reason in message for message in first)
