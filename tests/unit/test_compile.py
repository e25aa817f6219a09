"""Compiled layers on one process: what is refused, and which calls run as they are."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from lightning_boost import BoostParallelStrategy, compilation
from lightning_boost.commands import parity
from lightning_boost.compilation import check_to_compile, compile_layers
from lightning_boost.layout import LLAMA, Decoder, find_decoder
from lightning_boost.model.cache import KeyValueCache
from lightning_boost.model.generation import generate
from lightning_boost.recompute import RecomputeOptions, recompute_layers
from tests.models import masked_batch, meta_model, one_process_model, small_config
from tests.users_module import UsersModule, loader, trainer_for


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """Count graphs, by a compiler that takes little time."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compilation, "BACKEND", counter)
    return counter


def _compiled(**changes):
    model = one_process_model(small_config(num_hidden_layers=2, **changes))
    compile_layers(Decoder(model, LLAMA))
    return model


def _gradients(model, batch):
    model.zero_grad()
    model(**batch).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def _are_equal(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], each) for name, each in expected.items())


def test_names_stay_and_other_shapes_add_one_graph(graphs):
    plain, model = one_process_model(small_config()), _compiled()
    assert list(model.state_dict()) == list(plain.state_dict())
    for tokens, num_graphs in ((12, 1), (9, 2), (7, 2)):
        batch = masked_batch(131, tokens=tokens)
        assert _are_equal(_gradients(model, batch), _gradients(plain, batch))
        assert graphs.frame_count == num_graphs
    with torch.no_grad():
        assert torch.equal(model(**batch), plain(**batch))


def test_copies_run_their_own_weights(graphs):
    model, batch = _compiled(), masked_batch(131)
    before = model(**batch)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        nn.init.zeros_(copied.model.layers[0].mlp.down_proj.factor_b.weight)
        assert not torch.equal(copied(**batch), before)
    assert torch.equal(model(**batch), before)


def test_what_a_graph_would_hide_runs_as_it_is(graphs):
    plain, model = one_process_model(small_config()), _compiled()
    prompt = masked_batch(131, rows=1)["input_ids"]
    expected, found = (list(generate(each, prompt, 4, cache=KeyValueCache(2))) for each in (plain, model))
    assert all(map(torch.equal, found, expected))
    seen = []
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(True))
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    model(prompt)
    handle.remove()
    with FlopCounterMode(display=False) as expected:
        plain(prompt)
    with FlopCounterMode(display=False) as found:
        model(prompt)
    assert found.get_total_flops() == expected.get_total_flops() > 0
    assert (seen, graphs.frame_count) == ([True], 0)


HOOKS = {
    "forward": lambda layer, hook: layer.mlp.register_forward_hook(hook),
    "forward, in front": lambda layer, hook: layer.mlp.register_forward_pre_hook(hook),
    "backward": lambda layer, hook: layer.mlp.register_full_backward_hook(hook),
    "backward, in front": lambda layer, hook: layer.mlp.register_full_backward_pre_hook(hook),
    "forward, everywhere": lambda _, hook: nn.modules.module.register_module_forward_hook(hook),
    "backward, everywhere": lambda _, hook: nn.modules.module.register_module_full_backward_hook(hook),
}


def test_hooks_inside_of_layers_are_called_as_often_as_uncompiled(graphs):
    plain, model, batch = one_process_model(small_config(num_hidden_layers=2)), _compiled(), masked_batch(131)
    _gradients(model, batch)
    for name, register in HOOKS.items():
        seen = {}
        for each in (plain, model):
            calls = seen[each] = []
            handle = register(each.model.layers[0], lambda *_, calls=calls: calls.append(True))
            _gradients(each, batch)
            handle.remove()
        assert len(seen[model]) == len(seen[plain]) > 0, name
    assert graphs.frame_count == 1


def test_a_block_that_is_run_again_is_what_it_was_though_hooks_are_gone():
    plain, model, batch = one_process_model(small_config()), one_process_model(small_config()), masked_batch(131)
    recompute_layers(Decoder(model, LLAMA), RecomputeOptions(kind="block"), [], [])
    compile_layers(Decoder(model, LLAMA))
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    loss = model(**batch)
    handle.remove()
    loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters()}
    assert _are_equal(found, _gradients(plain, batch))


class _Looking(nn.Module):
    """Looks at a value in its forward."""

    def __init__(self, layer):
        super().__init__()
        self._modules.update(layer._modules)

    def forward(self, hidden, rotary, mask, cache):
        return hidden if hidden.sum() > 0 else -hidden


def _call_twice(model):
    for _ in range(2):
        model(**masked_batch(131))


class _Refusing(_Looking):
    """Has an error of its own."""

    def forward(self, hidden, rotary, mask, cache):
        raise ValueError("no more than 5 tokens")


class _Counting(_Looking):
    """Computes with a number that is another at each call."""

    calls = 0

    def forward(self, hidden, rotary, mask, cache):
        self.calls += 1
        return hidden * self.calls


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (_Looking, "whose forward torch cannot compile as one graph (Data-dependent branching: "),
        (_Refusing, "(Observed exception: raised exception ValueError('no more than 5 tokens'); above is where)"),
        (_Counting, "whose calls take more than 1 graphs"),
    ],
)
def test_a_layer_that_is_no_graph_is_told(layer, reason, monkeypatch):
    monkeypatch.setattr(compilation, "MOST_GRAPHS", 1)
    model = one_process_model(small_config())
    model.model.layers = nn.ModuleList(map(layer, model.model.layers))
    compile_layers(Decoder(model, LLAMA))
    with pytest.raises(RuntimeError, match=rf"compile \(True\) must be False with a {layer.__name__}") as told:
        _call_twice(model)
    assert reason in str(told.value)


def _no_compiler(*_):
    raise torch._inductor.exc.InvalidCxxCompiler


def test_a_machine_without_a_compiler_is_told(monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", _no_compiler)
    with pytest.raises(RuntimeError, match=r"compile \(True\) must be False .*No working C\+\+ compiler .* CXX names"):
        _compiled()(**masked_batch(131))


def _own_forward(module):
    module.net.model.layers[1].forward = module.net.model.layers[1].forward


def _already(module):
    module.net.model.layers[1].compile(backend="eager")


@pytest.mark.parametrize(
    ("options", "prepare", "message"),
    [
        ({"compile": "inductor"}, None, r"compile \('inductor'\) must be True or False"),
        (
            {"compile": True, "recompute": "low_rank", "store_latents": "sharded"},
            None,
            r"store_latents \('sharded'\) must be 'whole' where compile is True",
        ),
        ({"compile": True}, _own_forward, "model.layers.1 has one of its own"),
        ({"compile": True}, _already, "model.layers.1 must not be compiled where compile is True"),
    ],
)
def test_what_does_not_go_with_it_is_refused_before_processes_start(options, prepare, message, monkeypatch):
    monkeypatch.setattr(BoostParallelStrategy, "_setup_distributed", lambda _: pytest.fail("a process group started"))
    module = UsersModule()
    if prepare is not None:
        prepare(module)
    with pytest.raises(ValueError, match=message):
        trainer_for(strategy=BoostParallelStrategy(**options)).fit(module, loader())


@pytest.mark.parametrize(("scheme", "kind"), [("vanilla_sharded", "cola"), ("auto", "full_rank")])
def test_schemes_that_switch_random_streams_inside_layers_are_refused(scheme, kind):
    requested = BoostParallelStrategy(2, scheme=scheme, compile=True).requested
    decoder = find_decoder(meta_model(small_config(low_rank={"kind": kind})))
    with pytest.raises(ValueError, match=rf"compile \(True\) must be False with scheme '{scheme}' on a tensor axis"):
        requested.resolve(decoder, 2, 1)
    check_to_compile(decoder)


def test_parity_compiles_where_it_is_asked_to(monkeypatch, capsys):
    passed = {"passed": True, "worst_gradient_relative_error": 1e-7, "worst_weight_relative_error": 1e-7}
    asked = []
    monkeypatch.setattr(parity, "_run_cell", lambda options, *_: asked.append(options["compile"]) or passed)
    assert parity.parity(matrix=True, compile=True) == 0
    assert set(asked) == {True}
    assert "cola, compiled, 32-true: worst relative error" in capsys.readouterr().out

    def check(*_, **options):
        asked.append(options["compile"])
        raise InterruptedError

    monkeypatch.setattr(parity, "check_parity", check)
    with pytest.raises(InterruptedError):
        parity.parity(compile=True)
    assert asked[-1]
