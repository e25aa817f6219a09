"""What a user's module may do that would train something else on several processes: it is exact, or refused."""

import pickle
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_boost import BoostParallelStrategy
from lightning_boost.config import LlamaConfig
from tests.models import gradient_errors, masked_batch, one_process_model, parallel_model, small_config, whole
from tests.processes import run_processes
from tests.users_module import HEADS, WIDTH, UsersModule, loader, trainer_for


def _weights(make_module, size_of_world):
    """Train from process-dependent seeds and weights; return whole weights, or the error."""
    torch.manual_seed(dist.get_rank())
    module = make_module()
    options = {} if size_of_world > 1 else {"strategy": "auto"}
    try:
        trainer_for(**options).fit(module, loader())
    except (ValueError, RuntimeError) as error:
        return str(error)
    return {name: whole(parameter).float().numpy() for name, parameter in module.named_parameters()}


def _differences(make_module):
    """Return how far weights trained on two processes are from those of plain Lightning on one."""
    expected = run_processes(_weights, 1, make_module, 1)[0]
    results = run_processes(_weights, 2, make_module, 2)
    errors = [result for result in results if isinstance(result, str)]
    if errors:
        return errors[0]
    return max(abs(result[name] - weight).max() for result in results for name, weight in expected.items())


class _Changed(UsersModule):
    def __init__(self):
        super().__init__()
        self.change(self.net.model.layers[0])

    @staticmethod
    def change(layer): ...


class _ViewWithGaps(_Changed):
    """A factor cut out of a larger matrix, as a truncated SVD leaves it; known_failures V1."""

    @staticmethod
    def change(layer):
        torch.manual_seed(torch.initial_seed())
        wide = torch.randn(8, 2 * WIDTH)
        layer.self_attn.q_proj.factor_a.weight = nn.Parameter(wide[:, :WIDTH])


class _RandomBuffer(_Changed):
    @staticmethod
    def change(layer):
        layer.register_buffer("scale", torch.rand(1) + 0.5)
        mlp = layer.mlp.forward
        layer.mlp.forward = lambda hidden: layer.scale * mlp(hidden)


class _RandomMask(UsersModule):
    """Draws in training_step without anybody having set a seed."""

    def training_step(self, batch, batch_idx):
        kept = torch.rand(batch["labels"].shape) < 0.8
        labels = batch["labels"].masked_fill(~kept, -100)
        return super().training_step({"input_ids": batch["input_ids"], "labels": labels}, batch_idx)


class _HookedWeight(_Changed):
    @staticmethod
    def change(layer):
        layer.mlp.up_proj.factor_a.weight.register_hook(lambda gradient: 2 * gradient)


class _HookedModule(_Changed):
    @staticmethod
    def change(layer):
        layer.mlp.down_proj.register_forward_hook(lambda module, inputs, output: 2 * output)


class _ScaledNorm(_Changed):
    @staticmethod
    def change(layer):
        attention = layer.self_attn.forward
        layer.self_attn.forward = lambda hidden: attention(torch.tanh(hidden))


class _SecondReader(_Changed):
    @staticmethod
    def change(layer):
        original = layer.self_attn.forward
        layer.self_attn.forward = lambda hidden: original(hidden) * (1 + 0.1 * hidden[..., :1])


class _HeadsFromConstant(_Changed):
    @staticmethod
    def change(layer):
        attention = layer.self_attn

        def forward(hidden):
            batch, tokens, _ = hidden.shape
            # the constant counts all heads, of which a process has a part
            q = attention.q_proj(hidden).view(batch, tokens, HEADS, -1)
            return attention.o_proj(q.cumsum(2).flatten(2))

        attention.forward = forward


class _ScaledByWidth(_Changed):
    @staticmethod
    def change(layer):
        mlp = layer.mlp.forward
        layer.mlp.forward = lambda hidden: mlp(hidden) * hidden.shape[-1] ** 0.5


class _Softmax(_Changed):
    @staticmethod
    def change(layer):
        layer.mlp.up_proj.activation = nn.Softmax(-1)


class _ChannelDropout(_Changed):
    @staticmethod
    def change(layer):
        layer.dropout = nn.Dropout1d(0.1)


@pytest.mark.parametrize("make_module", [_ViewWithGaps, _RandomBuffer, _RandomMask])
def test_it_is_exact(make_module):
    difference = _differences(make_module)
    assert not isinstance(difference, str), difference
    assert difference < 1e-4


@pytest.mark.parametrize(
    ("make_module", "message"),
    [
        (_HookedWeight, "has hooks on its gradient"),
        (_HookedModule, "mlp.down_proj has hooks"),
        (_ScaledNorm, "a projection must read its norm's output as it is"),
        (_SecondReader, "computes something else once strategy 'boost' has split it"),
        (_HeadsFromConstant, "computes something else once strategy 'boost' has split it"),
        (_ScaledByWidth, "computes something else once strategy 'boost' has split it"),
        (_Softmax, "activation is a Softmax and must be"),
        (_ChannelDropout, "dropout is a Dropout1d and must be a torch.nn.Dropout"),
    ],
)
def test_it_is_refused(make_module, message):
    assert message in _differences(make_module)


def _hidden_in_the_loss(kind):
    config = small_config(low_rank={"kind": kind})
    batch = masked_batch(config.vocab_size)
    models = parallel_model(config, dist.get_world_size()), one_process_model(config)
    for model in models:
        hidden = model.model(batch["input_ids"])
        (model.loss(hidden, model.lm_head.weight, batch["labels"]) + 0.1 * hidden.square().mean()).backward()
    return max(gradient_errors(*models).values())


@pytest.mark.parametrize("kind", ["cola", "full_rank"])
def test_a_loss_on_the_last_hidden_state_counts_once(kind):
    assert max(run_processes(_hidden_in_the_loss, 2, kind)) < 1e-5


def _wrong_label():
    model = parallel_model(small_config(), dist.get_world_size())
    batch = masked_batch(131)
    batch["labels"][0, 3] = 131
    try:
        model(**batch)
    except IndexError as error:
        return str(error)
    return ""


def test_a_label_beyond_the_vocabulary_is_refused_on_every_process():
    for error in run_processes(_wrong_label, 2):
        assert "token id 131 must be from 0 to 130" in error


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


def test_hyper_parameters_that_would_not_load_are_refused_when_saved(tmp_path):
    for error in run_processes(_save_on_first, 2, tmp_path / "a.ckpt"):
        assert "the checkpoint would not load again" in error
    assert not list(tmp_path.iterdir())


def _save_on_first(path):
    return _save(path, _Unsafe)


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
    (tmp_path / "a.ckpt").rename(tmp_path / ".a.ckpt.replaced")
    assert run_processes(_load, 2, tmp_path / "a.ckpt") == ["", ""]
    run_processes(_save, 2, tmp_path / "a.ckpt")
    run_processes(_save, 2, tmp_path / "a.ckpt")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.ckpt"]


def test_a_missing_checkpoint_is_told(tmp_path):
    assert "does not exist; strategy 'boost' loads" in run_processes(_load, 1, tmp_path / "a.ckpt")[0]


def _precisions():
    module = UsersModule()
    trainer_for(max_steps=1).fit(module, loader())
    trainer_for(max_steps=1, precision="bf16-true").fit(module, loader())
    return sorted({str(parameter.dtype) for parameter in module.parameters()})


def test_a_second_trainer_s_precision_is_its_own():
    assert run_processes(_precisions, 2) == [["torch.bfloat16"]] * 2


class _Gathers(UsersModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.gathered = self.all_gather(loss.detach()).sum().item() / loss.item()
        return loss


def _gathered():
    module = _Gathers()
    trainer_for(max_steps=1).fit(module, loader())
    return module.gathered


def test_all_gather_gives_one_value_for_each_replica():
    assert run_processes(_gathered, 2) == pytest.approx([1.0, 1.0])


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


def _other_sizes():
    module = UsersModule()
    trainer_for(max_steps=1).fit(module, loader())
    try:
        trainer_for(strategy=BoostParallelStrategy(1)).fit(module, loader())
    except ValueError as error:
        return str(error)
    return ""


def test_another_layout_for_a_module_that_is_spread_is_refused():
    assert "tensor_parallel_size (1) must be 2" in run_processes(_other_sizes, 2)[0]


@pytest.mark.parametrize("damaged", [b"", b"\x80\x04junk", b"c\xff\xfe\n"])
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
