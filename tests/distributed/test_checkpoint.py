"""What is saved loads again, on any layout, or says why not; what others saved harms nobody."""

import pickle
import random

import pytest
import torch

from lightning_boost.config import LlamaConfig
from tests.models import whole
from tests.processes import run_processes
from tests.users_module import UsersModule, loader, trainer_for


class _Wider(UsersModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"config": LlamaConfig(), "name": "users"})


def _save(path, make_module=UsersModule):
    torch.manual_seed(0)
    trainer = trainer_for(max_steps=2, max_epochs=-1)
    module = make_module()
    trainer.fit(module, loader())
    try:
        trainer.save_checkpoint(path)
    except ValueError as error:
        return str(error)
    return ""


def _load(path, change=None, fit=False):
    module = UsersModule()
    if change == "layers":
        del module.net.model.layers[1]
    if change == "dtype":
        module = module.to(torch.bfloat16)
    trainer = trainer_for(max_steps=3, max_epochs=-1)
    try:
        if fit:
            trainer.fit(module, loader(), ckpt_path=path)
        else:
            trainer.validate(module, loader(), ckpt_path=path, verbose=False)
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "message"),
    [("layers", "not in the model net.model.layers.1."), ("dtype", "torch.bfloat16 in the model")],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, change, message):
    """known_failures A68, V9."""
    run_processes(_save, 2, tmp_path / "a.ckpt")
    for error in run_processes(_load, 2, tmp_path / "a.ckpt", change):
        assert message in error


def test_hyper_parameters_of_this_package_load_again(tmp_path):
    assert run_processes(_save, 2, tmp_path / "a.ckpt", _Wider) == ["", ""]
    assert run_processes(_load, 2, tmp_path / "a.ckpt", None, True) == ["", ""]


class _Unsafe(UsersModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"generator": random.Random(1)})


class _Unpicklable(UsersModule):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["activation"] = lambda hidden: hidden


@pytest.mark.parametrize("make_module", [_Unsafe, _Unpicklable])
def test_what_would_not_load_is_refused_when_saved(tmp_path, make_module):
    for error in run_processes(_save, 2, tmp_path / "a.ckpt", make_module):
        assert "the checkpoint would not load again" in error
    assert not list(tmp_path.iterdir())


class _Runs:
    """What a pickle of somebody else's may do when it is read."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def test_a_description_that_would_run_code_is_refused(tmp_path):
    """known_failures A02."""
    run_processes(_save, 1, tmp_path / "a.ckpt")
    marker = tmp_path / "ran"
    (tmp_path / "a.ckpt" / ".metadata").write_bytes(pickle.dumps(_Runs(marker)))
    error = run_processes(_load, 1, tmp_path / "a.ckpt")[0]
    assert "it must not name" in error
    assert not marker.exists()


def test_a_save_that_was_killed_between_its_renames_still_loads(tmp_path):
    run_processes(_save, 2, tmp_path / "a.ckpt")
    (tmp_path / "a.ckpt").rename(tmp_path / "a.replaced.ckpt")
    assert run_processes(_load, 2, tmp_path / "a.ckpt") == ["", ""]
    run_processes(_save, 2, tmp_path / "a.ckpt")
    run_processes(_save, 2, tmp_path / "a.ckpt")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.ckpt"]


def test_a_missing_checkpoint_is_told(tmp_path):
    assert "does not exist; strategy 'boost' loads" in run_processes(_load, 1, tmp_path / "a.ckpt")[0]


class _SavesFirst(UsersModule):
    def on_train_start(self):
        self.trainer.save_checkpoint(self.path)


def _losses(path):
    torch.manual_seed(0)
    module = _SavesFirst() if path else UsersModule()
    module.path = path
    trainer_for(max_steps=3, max_epochs=-1).fit(module, loader())
    return module.losses


def test_saving_before_the_first_step_changes_nothing(tmp_path):
    assert run_processes(_losses, 2, tmp_path / "a.ckpt") == run_processes(_losses, 2, None)


@pytest.mark.parametrize("damaged", [b"", b"\x80\x04junk", b"c\xff\xfe\n", pickle.dumps(3)])
def test_a_damaged_description_is_told(tmp_path, damaged):
    run_processes(_save, 1, tmp_path / "a.ckpt")
    (tmp_path / "a.ckpt" / ".metadata").write_bytes(damaged)
    assert "cannot be read" in run_processes(_load, 1, tmp_path / "a.ckpt")[0]


def _resumed(path):
    torch.manual_seed(99)
    module = UsersModule()
    trainer = trainer_for(max_steps=3, max_epochs=-1)
    trainer.fit(module, loader(num_batches=1), ckpt_path=path)
    steps = {int(state["step"]) for state in trainer.optimizers[0].state.values()}
    return module.losses, steps


def _uninterrupted(path):
    torch.manual_seed(0)
    module = _SavesFirst()
    module.path = path
    trainer_for(max_steps=3, max_epochs=-1).fit(module, loader(num_batches=1))
    return module.losses


def test_an_optimizer_that_was_saved_before_its_first_step_begins_with_it(tmp_path):
    expected = run_processes(_uninterrupted, 2, tmp_path / "a.ckpt")[0]
    for losses, steps in run_processes(_resumed, 2, tmp_path / "a.ckpt"):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert steps == {3}


def _shards(path):
    return sorted(path.glob("*.distcp"))


def _truncate(shard):
    shard.write_bytes(shard.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [(lambda shard: shard.unlink(), "is missing"), (_truncate, r"bytes and must have")],
    ids=["missing", "truncated"],
)
def test_a_damaged_shard_is_named_on_every_process(tmp_path, damage, message):
    """known_failures A63."""
    run_processes(_save, 2, tmp_path / "a.ckpt")
    shard = _shards(tmp_path / "a.ckpt")[-1]
    damage(shard)
    for error in run_processes(_load, 2, tmp_path / "a.ckpt"):
        assert f"is damaged: its file {shard.name}" in error
        assert message in error


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"foreach": False}),
    "AdamW, foreach": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    "SGD, no state": (torch.optim.SGD, {}),
    "SGD, momentum": (torch.optim.SGD, {"momentum": 0.9}),
}


class _WithOptimizer(UsersModule):
    """Keeps what its optimizer holds as it starts to train."""

    kind, begins_with = "", None

    def configure_optimizers(self):
        optimizer, options = OPTIMIZERS[self.kind]
        return optimizer(self.parameters(), lr=0.1, **options)

    def on_train_start(self):
        self.begins_with = _held(self.trainer.optimizers[0])


def _held(optimizer):
    """Return a copy of what this process holds of an optimizer's state."""
    return [
        {name: whole(value).clone() for name, value in optimizer.state.get(parameter, {}).items() if value is not None}
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def _round_trip(path, kind):
    saved, loaded = _WithOptimizer(), _WithOptimizer()
    saved.kind = loaded.kind = kind
    trainer = trainer_for(max_steps=2, max_epochs=-1)
    trainer.fit(saved, loader())
    trainer.save_checkpoint(path)
    trainer_for(max_steps=3, max_epochs=-1).fit(loaded, loader(), ckpt_path=path)
    before = _held(trainer.optimizers[0])
    same = [
        each.keys() == other.keys() and all(torch.equal(each[name], other[name]) for name in each)
        for each, other in zip(before, loaded.begins_with, strict=True)
    ]
    return all(same), sum(len(each) for each in before)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_s_state_comes_back_bit_for_bit(tmp_path, kind):
    """known_failures A76."""
    for same, num_states in run_processes(_round_trip, 2, tmp_path / "a.ckpt", kind):
        assert same
        assert (num_states == 0) == (kind == "SGD, no state")
