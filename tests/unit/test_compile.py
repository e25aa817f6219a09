"""Compiled layers on one process: what is refused, and which calls run as they are."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from lightning_boost import BoostParallelStrategy, compilation
from lightning_boost.compilation import check_to_compile, compile_layers
from lightning_boost.layout import LLAMA, Decoder, find_decoder
from lightning_boost.model.cache import KeyValueCache
from lightning_boost.model.generation import generate
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


@pytest.mark.slow
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


class _Looking(nn.Module):
    """Looks at a value in its forward."""

    def __init__(self, layer):
        super().__init__()
        self._modules.update(layer._modules)

    def forward(self, hidden, rotary, mask, cache):
        return hidden if hidden.sum() > 0 else -hidden


def test_a_layer_that_is_no_graph_is_told():
    model = one_process_model(small_config())
    model.model.layers[1] = _Looking(model.model.layers[1])
    compile_layers(Decoder(model, LLAMA))
    with pytest.raises(RuntimeError, match=r"compile \(True\) must be False with a _Looking"):
        model(**masked_batch(131))


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
