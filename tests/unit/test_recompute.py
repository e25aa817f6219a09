"""Options of recompute, and what its policy keeps."""

import inspect
import pickle
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_boost import BoostParallelStrategy
from lightning_boost.callbacks.low_rank_activation_checkpointing import LowRankActivationCheckpointing
from lightning_boost.layout import find_decoder
from lightning_boost.recompute import RecomputeOptions, check_layers, layers
from lightning_boost.recompute.kept import Keeping
from lightning_boost.recompute.layers import RecomputedForward
from tests.models import meta_model, small_config
from tests.users_module import UsersModule, loader, trainer_for


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute": "full"}, r"recompute \('full'\) must be one of 'none', 'low_rank', 'block'"),
        ({"recompute": "low_rank", "recompute_every": 0}, r"recompute_every \(0\) must be a whole number k"),
        ({"recompute": "low_rank", "recompute_every": 1.5}, r"recompute_every \(1.5\) must be"),
        ({"recompute": "low_rank", "recompute_every": -0.5}, r"recompute_every \(-0.5\) must be"),
        ({"recompute": "low_rank", "recompute_every": float("inf")}, r"recompute_every \(inf\) must be"),
        ({"recompute": "low_rank", "recompute_every": float("nan")}, r"recompute_every \(nan\) must be"),
        ({"recompute": "low_rank", "recompute_every": True}, r"recompute_every \(True\) must be"),
        ({"recompute": "block", "keep_attention": True}, r"keep_attention \(True\) must be False with recompute"),
        (
            {"recompute": "low_rank", "store_latents": "half"},
            r"store_latents \('half'\) must be one of 'whole', 'sharded'",
        ),
        (
            {"recompute": "block", "store_latents": "sharded"},
            r"store_latents \('sharded'\) must be 'whole' with recompute",
        ),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BoostParallelStrategy(**options)


@pytest.mark.parametrize("options", [{"recompute_every": 2}, {"keep_attention": True}, {"store_latents": "sharded"}])
def test_options_that_mean_nothing_are_noted(options):
    with pytest.warns(UserWarning, match="mean nothing with recompute 'none'"):
        BoostParallelStrategy(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "no recompute"),
        ({"kind": "block"}, "recompute block in every block"),
        ({"kind": "low_rank", "every": 2.0}, "recompute low_rank in every 2. block"),
        (
            {"kind": "low_rank", "every": 0.25, "keep_attention": True, "store_latents": "sharded"},
            "recompute low_rank in 25% of the blocks, attention kept, latents sharded",
        ),
    ],
)
def test_options_in_words(options, words):
    assert str(RecomputeOptions(**options)) == words


def _callback(**options):
    return LowRankActivationCheckpointing(**options)


def test_a_callback_is_held_to_the_same_ranges():
    for options in ({"every": 0}, {"store_latents": "half"}):
        with pytest.raises(ValueError, match="must be"):
            _callback(**options)


def test_a_callback_chooses_in_the_strategy_s_stead():
    requested = BoostParallelStrategy(2).requested
    assert requested.joined_by([ModelCheckpoint()]) is requested
    expected = RecomputeOptions(kind="low_rank", every=2, keep_attention=True, store_latents="sharded")
    callback = _callback(every=2, keep_attention=True, store_latents="sharded")
    assert requested.joined_by([ModelCheckpoint(), callback]) == replace(requested, recompute=expected)


@pytest.mark.parametrize(
    ("options", "callbacks", "message"),
    [
        (
            {"recompute": "low_rank"},
            [_callback()],
            r"recompute \('low_rank'\) of the strategy must be 'none' beside the",
        ),
        ({"recompute": "block"}, [_callback()], r"recompute \('block'\) of the strategy must be 'none' beside the"),
        (
            {},
            [_callback(), _callback(every=2)],
            "LowRankActivationCheckpointing must be given once, and is given 2 times",
        ),
    ],
)
def test_recompute_that_is_chosen_twice_is_refused_before_processes_start(options, callbacks, message, monkeypatch):
    monkeypatch.setattr(BoostParallelStrategy, "_setup_distributed", lambda _: pytest.fail("a process group started"))
    trainer = trainer_for(strategy=BoostParallelStrategy(**options), callbacks=callbacks)
    with pytest.raises(ValueError, match=message):
        trainer.fit(UsersModule(), loader())


def test_a_callback_without_the_strategy_is_refused():
    trainer = trainer_for(strategy="auto", callbacks=[_callback()])
    with pytest.raises(ValueError, match=r"strategy \(SingleDeviceStrategy\) must be 'boost' with LowRankActivation"):
        trainer.fit(UsersModule(), loader())


def test_shares_of_one_process_are_whole_and_that_is_told():
    requested = BoostParallelStrategy(1, recompute="low_rank", store_latents="sharded").requested
    with pytest.warns(UserWarning, match=r"store_latents \('sharded'\) means nothing with tensor_parallel_size 1"):
        requested.resolve(find_decoder(meta_model(small_config())), 1, 1)


@pytest.mark.parametrize(
    ("every", "num_blocks", "chosen"),
    [
        (1, 4, [0, 1, 2, 3]),
        (1.0, 3, [0, 1, 2]),
        (2, 5, [0, 2, 4]),
        (3, 7, [0, 3, 6]),
        (9, 4, [0]),
        (0.5, 6, [0, 2, 4]),
        (0.75, 4, [0, 1, 2]),
        (0.01, 4, [0]),
        (0.0001, 4, [0]),
    ],
)
def test_blocks_are_chosen_evenly_and_the_first_always(every, num_blocks, chosen):
    assert RecomputeOptions(kind="low_rank", every=every).choose(num_blocks) == chosen


@pytest.mark.parametrize("percent", range(1, 100))
def test_a_share_is_met_exactly(percent):
    assert len(RecomputeOptions(kind="low_rank", every=percent / 100).choose(100)) == percent


@pytest.mark.parametrize(("dropout", "is_kept"), [(0.0, True), (0.1, False)])
def test_attention_that_draws_is_run_again(dropout, is_kept):
    """A second run without it would draw other masks behind it, where attention draws from the device's stream."""
    heads = torch.zeros(1, 1, 2, 4)
    operators = torch.ops.aten
    for keep_attention in (True, False):
        keeping, expected = Keeping(frozenset(), frozenset(), keep_attention), is_kept and keep_attention
        flash = operators._scaled_dot_product_flash_attention.default
        assert keeping.keeps(flash, (heads, heads, heads, dropout), {}) is expected
        assert keeping.keeps(flash, (heads, heads, heads), {"dropout_p": dropout}) is expected
        efficient = operators._scaled_dot_product_efficient_attention.default
        assert keeping.keeps(efficient, (heads, heads, heads, None, True, dropout), {}) is expected


class _Layer(nn.Module):
    def forward(self, hidden, scale, *, shift):
        return hidden * scale + shift


def test_what_is_given_by_name_is_handed_to_checkpoint_as_well(monkeypatch):
    """It keeps the random numbers of the devices that it finds among what it is given by position."""
    layer, seen = _Layer(), []
    layer.forward = RecomputedForward(layer, None)
    monkeypatch.setattr(layers, "checkpoint", lambda run, *inputs, **_: seen.extend(inputs) or run(*inputs))
    hidden, shift = torch.ones(2), torch.zeros(2)
    assert layer(hidden, shift=shift, scale=3.0).tolist() == [3.0, 3.0]
    assert layer(hidden=hidden, shift=shift, scale=3.0).tolist() == [3.0, 3.0]
    assert [each is hidden for each in seen] == [True, False, False, True, False, False]
    assert [each is shift for each in seen] == [False, True, False, False, True, False]


class _InPlace(nn.Module):
    """A layer that changes what its factor into the bottleneck gives."""

    def __init__(self, change):
        super().__init__()
        self.factor_a, self.factor_b = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.change = change

    def forward(self, hidden):
        return hidden + self.factor_b(self.change(self.factor_a(hidden)))


KEEPING = Keeping(frozenset(), frozenset({(6, 2)}), keep_attention=False)


@pytest.mark.parametrize(
    "change", [nn.SiLU(inplace=True), lambda latents: latents.view(-1).mul_(2).view(latents.shape)]
)
def test_latents_that_are_changed_in_place_are_refused(change):
    """On one process torch would not see it, and backward would compute with the changed ones."""
    layer, hidden = _InPlace(change), torch.rand(2, 3, 6, requires_grad=True)
    layer.forward = RecomputedForward(layer, None)
    layer(hidden).sum().backward()
    layer.forward.keeping = KEEPING
    with pytest.raises(
        ValueError, match=r"aten::(silu|mul)_\S* must not change in place what recompute 'low_rank' keeps"
    ):
        layer(hidden)


def test_what_is_not_kept_may_be_changed_in_place():
    layer, hidden = _InPlace(lambda latents: (latents * 1).mul_(2)), torch.rand(2, 3, 6, requires_grad=True)
    layer(hidden).sum().backward()
    expected, hidden.grad = hidden.grad, None
    layer.forward = RecomputedForward(layer, KEEPING)
    layer(hidden).sum().backward()
    assert torch.equal(hidden.grad, expected)


class _Counting(_InPlace):
    """A layer whose second run is another one: by a number, by an operator more, or by one less."""

    def __init__(self, by):
        super().__init__(nn.Identity())
        self.by, self.calls = by, 0

    def forward(self, hidden):
        self.calls += 1
        if self.by == "less" and self.calls == 2:
            return hidden + self.factor_a(hidden).sum()
        if self.by == "more" and self.calls == 2:
            hidden = hidden.tan()
        return super().forward(hidden)


@pytest.mark.parametrize(("by", "keeping"), [("less", KEEPING), ("less", None), ("more", KEEPING)])
def test_a_second_run_that_is_seen_to_differ_is_told(by, keeping):
    layer = _Counting(by)
    layer.forward = RecomputedForward(layer, keeping)
    loss = layer(torch.rand(2, 3, 6, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match="the second run of a recomputed layer, in backward, is not what the first"):
        loss.backward()


@pytest.mark.parametrize("keeping", [None, KEEPING])
def test_weights_that_were_stepped_before_backward_are_refused(keeping):
    layer, hidden = _InPlace(nn.Identity()), torch.rand(2, 3, 6)
    layer.forward = RecomputedForward(layer, keeping)
    optimizer = torch.optim.SGD(layer.factor_b.parameters(), lr=0.1)
    losses = [layer(hidden).sum() for _ in range(2)]
    losses[0].backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"factor_b.weight of a _InPlace was changed between forward and backward"):
        losses[1].backward()
    layer(hidden).sum().backward()


def test_only_kind_block_allows_a_second_backward():
    layer, hidden = _InPlace(nn.Identity()), torch.rand(2, 3, 6, requires_grad=True)
    found = []
    for kept in (None, KEEPING):
        layer.forward, hidden.grad = RecomputedForward(layer, kept), None
        loss = layer(hidden).sum()
        loss.backward(retain_graph=True)
        found.append(hidden.grad.clone())
        if kept is None:
            loss.backward()
            assert torch.equal(hidden.grad, 2 * found[0])
    assert torch.equal(*found)
    with pytest.raises(
        RuntimeError, match=r"recompute \('low_rank'\) must be 'block' or 'none' where backward goes twice"
    ):
        loss.backward()


class _Exacting(_InPlace):
    """Has subclasses that say something, and is none of them."""

    def __init_subclass__(cls, *, tag):
        super().__init_subclass__()

    def forward(self, hidden):
        assert type(self) is _Exacting
        return super(self.__class__, self).forward(hidden)


def test_a_layer_stays_of_its_own_class_and_is_copied_and_pickled_with_its_own_weights():
    layer, hidden = _Exacting(nn.SiLU()), torch.rand(2, 3, 6)
    plain = layer(hidden)
    layer.forward = RecomputedForward(layer, KEEPING)
    assert str(inspect.signature(layer.forward)) == "(hidden)"
    assert torch.equal(layer(hidden), plain)
    for other in (deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is _Exacting
        assert torch.equal(other(hidden), plain)
        nn.init.zeros_(other.factor_b.weight)
        assert torch.equal(other(hidden), hidden)
        other(hidden).sum().backward()
        assert layer.factor_b.weight.grad is None
        assert other.factor_b.weight.grad.abs().sum() > 0


def test_a_layer_whose_forward_is_the_instance_s_is_refused():
    decoder = find_decoder(meta_model(small_config()))
    check_layers(decoder)
    layer = decoder.root.model.layers[1]
    layer.forward = layer.forward
    with pytest.raises(ValueError, match=r"model.layers.1 has one of its own \(set on the instance\)"):
        check_layers(decoder)


def _checkpointed(module):
    module.net.model.layers[1].gradient_checkpointing = True


def _with_a_compiled_layer(module):
    module.net.model.layers[1].compile(backend="eager")


def _compiled(module):
    module.net.compile(backend="eager")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (_checkpointed, r"gradient_checkpointing_enable\(\) must not be called with recompute"),
        (_with_a_compiled_layer, "model.layers.1 must not be compiled with recompute"),
        (_compiled, "_Network must not be compiled with recompute"),
    ],
)
def test_what_recompute_does_not_go_with_is_refused_before_processes_start(prepare, message, monkeypatch):
    monkeypatch.setattr(BoostParallelStrategy, "_setup_distributed", lambda _: pytest.fail("a process group started"))
    module = UsersModule()
    prepare(module)
    with pytest.raises(ValueError, match=message):
        trainer_for(strategy=BoostParallelStrategy(recompute="low_rank")).fit(module, loader())


def test_what_is_compiled_later_is_refused_or_leaves_its_layers_as_they_are():
    layer, hidden = _InPlace(nn.SiLU()), torch.rand(2, 3, 6)
    layer(hidden).sum().backward()
    expected, layer.factor_a.weight.grad = layer.factor_a.weight.grad, None
    layer.forward = RecomputedForward(layer, KEEPING)
    torch.compile(nn.Sequential(layer), backend="eager")(hidden).sum().backward()
    assert torch.equal(layer.factor_a.weight.grad, expected)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a layer that is recomputed must not be compiled"):
        torch.compile(lambda hidden: layer(hidden), backend="eager", fullgraph=True)(hidden)
    layer.compile(backend="eager")
    with pytest.raises(ValueError, match="_InPlace must not be compiled with recompute"):
        layer(hidden)
