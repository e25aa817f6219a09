"""Latent crossing on one process: gates, what is given on, and what is refused."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.functional import layer_norm, silu

from lightning_boost.benchmark.paper import BOOST_7B
from lightning_boost.config import PROJECTIONS, LlamaConfig, LowRankConfig, llama_config, structure
from lightning_boost.cost.parameters import count_parameters, gate_parameters
from lightning_boost.model.cache import KeyValueCache
from lightning_boost.model.crossing import Crossing, LinearGate, TensorGate
from lightning_boost.model.generation import generate
from lightning_boost.model.initialization import initialize
from tests.models import masked_batch, meta_model, one_process_model, small_config

GATES = ("identity", "linear", "tensor")


def lax(**options):
    return small_config(num_hidden_layers=3, low_rank={"kind": "lax", **options})


@pytest.mark.parametrize(
    ("size", "rows", "columns", "parameters"),
    [
        (128, 8, 16, 320),
        (256, 16, 16, 512),
        (512, 16, 32, 1280),
        (768, 24, 32, 1600),
        (1280, 32, 40, 2624),
        (7, 1, 7, 50),
    ],
)
def test_a_tensor_gate_has_the_most_balanced_matrices(size, rows, columns, parameters):
    gate = TensorGate(size)
    assert gate.row_weight.shape == (rows, rows)
    assert gate.column_weight.shape == (columns, columns)
    assert gate_parameters(size, size, "tensor") == parameters == sum(each.numel() for each in gate.parameters())


def test_a_tensor_gate_multiplies_by_the_product_of_both_matrices():
    gate = TensorGate(12)
    torch.manual_seed(0)
    for parameter in gate.parameters():
        torch.nn.init.normal_(parameter)
    z = torch.randn(2, 5, 12)
    torch.testing.assert_close(gate(z), z @ torch.kron(gate.row_weight, gate.column_weight))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("base", ["svd", "cola"])
def test_a_projection_reads_the_latent_of_the_layer_before(gate, base):
    """``z = σ(LN(A x + gate(z_before)))``, of which ``B z`` is the output and ``z`` what is given on."""
    model = one_process_model(lax(crossing_gate=gate, crossing_base=base))
    given, seen = {}, {}

    def note(key, _, args, output):
        seen[key] = args[0], output

    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _, __, output, index=index: given.update({index: output[1]}))
        for name, module in (*layer.self_attn.named_children(), *layer.mlp.named_children()):
            module.register_forward_hook(partial(note, (index, name)))
    model(**masked_batch(131))
    sigma = silu if base == "cola" else lambda u: u
    for index, layer in enumerate(model.model.layers):
        assert set(given[index]) == set(PROJECTIONS)
        assert set(layer.crossings) == (set(PROJECTIONS) if index else set())
        for name in PROJECTIONS:
            pair = getattr(layer.self_attn, name, None) or getattr(layer.mlp, name)
            x, y = seen[index, name]
            u = x @ pair.factor_a.weight.T
            if index:
                crossing = layer.crossings[name]
                u = u + crossing.gate(given[index - 1][name])
                u = layer_norm(u, (15,), crossing.norm.weight, crossing.norm.bias, 1e-6)
            torch.testing.assert_close(given[index][name], sigma(u))
            torch.testing.assert_close(y, sigma(u) @ pair.factor_b.weight.T)


@pytest.mark.parametrize("gate", GATES)
def test_parameters_are_those_of_the_base_and_of_the_crossings(gate):
    config, base = lax(crossing_gate=gate), small_config(num_hidden_layers=3)
    assert count_parameters(config) - count_parameters(base) == 2 * 7 * (2 * 15 + gate_parameters(15, 15, gate))
    counts = [sum(each.numel() for each in meta_model(every).parameters()) for every in (config, base)]
    norm = 2 * 15
    assert counts[0] - counts[1] == 2 * 7 * (norm + gate_parameters(15, 15, gate))


@pytest.mark.parametrize(("gate", "parameters"), [("tensor", 888_832), ("linear", 228_207_616)])
def test_parameters_in_a_model_of_7b_are_those_of_the_page(gate, parameters):
    low_rank = LowRankConfig(kind="lax", crossing_gate=gate, bottleneck_size=1024)
    assert count_parameters(replace(BOOST_7B, low_rank=low_rank)) - count_parameters(BOOST_7B) == parameters


def test_gates_and_norms_start_as_documented():
    torch.manual_seed(0)
    crossing = torch.nn.ModuleDict({kind: Crossing(512, 512, kind) for kind in ("linear", "tensor")})
    initialize(crossing)
    weights = {name: each.detach() for name, each in crossing.named_parameters()}
    for name, bound in (
        ("linear.gate.weight", 512**-0.5),
        ("linear.gate.bias", 512**-0.5),
        ("tensor.gate.row_weight", (6 / 16) ** 0.5),
        ("tensor.gate.column_weight", (6 / 32) ** 0.5),
    ):
        assert 0.95 * bound < weights[name].abs().max() <= bound
        assert weights[name].std() == pytest.approx(bound / 3**0.5, rel=0.1)
    assert (weights["tensor.norm.weight"] == 1).all()
    assert (weights["tensor.norm.bias"] == 0).all()


def test_where_a_latent_is_normalised_the_factor_out_of_it_starts_at_half_of_the_base_s():
    crossing = one_process_model(lax(crossing_projections=["q_proj", "down_proj"]))
    base = dict(one_process_model(small_config(num_hidden_layers=3)).named_parameters())
    for name, parameter in crossing.named_parameters():
        if ".crossings." not in name:
            receives = any(f"{each}.factor_b" in name for each in ("q_proj", "down_proj")) and "layers.0." not in name
            assert torch.equal(parameter, base[name] / 2 if receives else base[name]), name


def test_without_crossing_the_layers_are_the_base_s():
    """A model with as few crossings as can be: the first layer has none, whatever its successors do."""
    config = lax()
    first = one_process_model(config).model.layers[0]
    assert not list(first.crossings.parameters())
    assert [name for name, _ in first.named_parameters()] == [
        name for name, _ in one_process_model(small_config()).model.layers[0].named_parameters()
    ]


def test_only_chosen_projections_cross():
    model = one_process_model(lax(crossing_projections=["up_proj", "q_proj"]))
    assert [set(layer.crossings) for layer in model.model.layers] == [
        set(),
        {"q_proj", "up_proj"},
        {"q_proj", "up_proj"},
    ]


def test_a_dense_projection_interrupts_the_crossing():
    config = lax(other_bottleneck_sizes={"layers.1.q_proj": "dense"})
    names = [set(config.crossing_sizes(layer)) for layer in range(3)]
    assert names == [set(), {*PROJECTIONS} - {"q_proj"}, {*PROJECTIONS} - {"q_proj"}]
    one_process_model(config)(**masked_batch(131)).backward()


def test_a_linear_gate_bridges_unequal_widths():
    model = one_process_model(lax(crossing_gate="linear", other_bottleneck_sizes={"layers.1.up_proj": 30}))
    gates = [model.model.layers[index].crossings["up_proj"].gate for index in (1, 2)]
    assert all(isinstance(gate, LinearGate) for gate in gates)
    assert [tuple(gate.weight.shape) for gate in gates] == [(30, 15), (15, 30)]
    model(**masked_batch(131)).backward()


@pytest.mark.parametrize("gate", ["identity", "tensor"])
def test_unequal_widths_are_refused_by_other_gates(gate):
    with pytest.raises(
        ValueError, match=r"\(30\) of layers\.1\.up_proj must be that of layer 0 \(15\) with crossing_gate"
    ):
        lax(crossing_gate=gate, other_bottleneck_sizes={"layers.1.up_proj": 30})


@pytest.mark.parametrize(
    "dense",
    [{"q_proj": "dense", "up_proj": "dense"}, {"layers.1": "dense"}, {"layers.0": "dense", "layers.2": "dense"}],
)
def test_a_model_in_which_nothing_crosses_is_refused(dense):
    with pytest.raises(ValueError, match=r"crossing_projections \(q_proj, up_proj\) must be factor pairs in two"):
        lax(crossing_projections=["q_proj", "up_proj"], other_bottleneck_sizes=dense)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kind": "lax", "crossing_gate": "sigmoid"},
            r"crossing_gate \('sigmoid'\) must be one of 'identity', 'linear'",
        ),
        ({"kind": "lax", "crossing_base": "full_rank"}, r"crossing_base \('full_rank'\) must be one of 'svd', 'cola'"),
        (
            {"kind": "lax", "crossing_projections": []},
            r"crossing_projections \(\[\]\) must name at least one of q_proj",
        ),
        ({"kind": "lax", "crossing_projections": ["qkv"]}, r"crossing_projections \(\['qkv'\]\) must name"),
        ({"kind": "cola", "crossing_gate": "linear"}, r"crossing_gate \('linear'\) means nothing with kind 'cola'"),
        ({"kind": "svd", "crossing_projections": ["q_proj"]}, r"\(\['q_proj'\]\) means nothing with kind 'svd'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LowRankConfig(**options)


def test_models_that_differ_in_what_crosses_have_another_structure():
    configs = [
        small_config(num_hidden_layers=3),
        lax(),
        lax(crossing_gate="linear"),
        lax(crossing_projections=["q_proj"]),
    ]
    structures = [structure(config) for config in configs]
    assert all(structures[i] != structures[j] for i in range(4) for j in range(i))


def test_a_configuration_of_plain_types_is_read():
    config = llama_config({"low_rank": {"kind": "lax", "crossing_base": "svd", "crossing_projections": ["q_proj"]}})
    assert config == LlamaConfig(
        low_rank=LowRankConfig(kind="lax", crossing_base="svd", crossing_projections=["q_proj"])
    )
    assert config.low_rank.latent_activation is None
    assert config.low_rank.has_outer_activation


def test_generation_with_a_cache_is_that_without():
    """Latents are of single positions: with a cache those of the new tokens are all there is need of."""
    model, prompt = one_process_model(lax()), masked_batch(131)["input_ids"]
    plain = torch.cat(list(generate(model, prompt, 6)), -1)
    cached = torch.cat(list(generate(model, prompt, 6, cache=KeyValueCache(3))), -1)
    assert torch.equal(plain, cached)
