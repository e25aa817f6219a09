"""What a user's module may do that would train something else on several processes: it is exact, or refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import dropout

from lightning_boost import BoostParallelStrategy
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


class _DroppedInPlace(_Changed):
    @staticmethod
    def change(layer):
        mlp = layer.mlp.forward
        layer.mlp.forward = lambda hidden: mlp(dropout(hidden, 0.5, layer.training, inplace=True))


class _ScaledInPlace(_Changed):
    @staticmethod
    def change(layer):
        mlp = layer.mlp
        mlp.forward = lambda hidden: mlp.down_proj(mlp.gate_proj(hidden).mul_(0.5) * mlp.up_proj(hidden))


class _Softmax(_Changed):
    @staticmethod
    def change(layer):
        layer.mlp.up_proj.activation = nn.Softmax(-1)


class _ChannelDropout(_Changed):
    @staticmethod
    def change(layer):
        layer.dropout = nn.Dropout1d(0.1)


@pytest.mark.parametrize("make_module", [_ViewWithGaps, _RandomBuffer, _RandomMask, _ScaledInPlace])
def test_it_is_exact(make_module):
    """known_failures A52: buffers."""
    difference = _differences(make_module)
    assert not isinstance(difference, str), difference
    assert difference < 1e-4


@pytest.mark.parametrize(
    ("make_module", "message"),
    [
        (_HookedWeight, "has hooks on its gradient"),
        (_HookedModule, "mlp.down_proj has hooks"),
        (_ScaledNorm, "a projection must read its norm's output as it is"),
        (_DroppedInPlace, "a projection must read its norm's output as it is"),
        (_SecondReader, "computes something else once strategy 'boost' has split it"),
        (_HeadsFromConstant, "computes something else once strategy 'boost' has split it"),
        (_ScaledByWidth, "computes something else once strategy 'boost' has split it"),
        (_Softmax, "is a LowRankLinear and must compute B σ"),
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


def _other_sizes():
    module = UsersModule()
    trainer_for(max_steps=1).fit(module, loader())
    try:
        trainer_for(strategy=BoostParallelStrategy(1)).fit(module, loader())
    except ValueError as error:
        return str(error)
    return ""


def test_another_layout_for_a_module_that_is_spread_is_refused():
    """known_failures A42."""
    assert "tensor_parallel_size (1) must be 2" in run_processes(_other_sizes, 2)[0]
