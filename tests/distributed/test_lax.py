"""Latent crossing on the axes against one process: gradients, training, counts, and planted defects."""

import json
import subprocess

import pytest
import torch
import torch.distributed as dist

from lightning_boost import gradients
from lightning_boost.collectives import count_collectives
from lightning_boost.commands import parity
from lightning_boost.cost import TensorAxis, add_up, layer_moves
from lightning_boost.gradients import global_gradient_norm
from lightning_boost.layout import find_decoder
from lightning_boost.mesh import DATA_AXIS, ParallelSizes, build_mesh
from lightning_boost.model.cache import KeyValueCache
from lightning_boost.model.crossing import Crossing, LayerLatents
from lightning_boost.model.generation import generate
from lightning_boost.model.llama import CrossingDecoderLayer
from lightning_boost.optimization import choose_trained
from lightning_boost.parallelize import parallelize
from lightning_boost.parity import check_parity
from lightning_boost.recompute import RecomputeOptions
from lightning_boost.tensor_parallel.bottleneck import ReplicatedCrossing
from tests.models import (
    CPU,
    SEED,
    gradient_errors,
    masked_batch,
    meta_model,
    one_process_model,
    parallel_model,
    relative_error,
    small_config,
    whole,
)
from tests.processes import run_processes
from tests.recomputed import BLOCK, CHUNKS, LOW_RANK, MIXED, SHARDED, recomputed_model

UNEVEN = {
    "attention_bottleneck_size": 11,
    "mlp_bottleneck_size": 23,
    "other_bottleneck_sizes": {"k_proj": 7, "layers.1.up_proj": 30, "layers.0": 13},
}
FORMS = {
    "identity": {"low_rank": {"crossing_gate": "identity"}},
    "linear": {"low_rank": {"crossing_gate": "linear"}},
    "tensor": {},
    "svd, tensor": {"low_rank": {"crossing_base": "svd"}},
    "linear, uneven bottlenecks": {"low_rank": {"crossing_gate": "linear", **UNEVEN}},
    "some projections": {"low_rank": {"crossing_projections": ["v_proj", "down_proj", "gate_proj"]}},
    "dense among low-rank": {"low_rank": MIXED | {"crossing_gate": "linear"}},
    "biases and grouped queries": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "one key/value head": {"num_key_value_heads": 1, "low_rank": {"bottleneck_size": 8}},
    "tied embeddings": {"tie_word_embeddings": True},
}


def lax(form="tensor", **others):
    options = {"num_hidden_layers": 3, **FORMS[form], **others}
    return small_config(**{**options, "low_rank": {"kind": "lax", **options.get("low_rank", {})}})


def _errors(config, scheme="auto", dtype=torch.float32):
    batch, size = masked_batch(config.vocab_size), dist.get_world_size()
    reference, model = one_process_model(config, dtype), parallel_model(config, size, dtype, scheme)
    expected, loss = reference(**batch), model(**batch)
    expected.backward()
    loss.backward()
    norms = [global_gradient_norm(each.parameters()).item() for each in (model, reference)]
    return {
        "loss": abs(loss.item() - expected.item()) / expected.item(),
        "norm": abs(norms[0] - norms[1]) / norms[1],
        **gradient_errors(model, reference),
    }


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_one_process(form, size):
    for errors in run_processes(_errors, size, lax(form)):
        assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("gate", ["identity", "linear", "tensor"])
def test_in_fp64_gradients_are_those_of_one_process_to_its_rounding(gate):
    """A layer norm of few features makes fp32 noisier than it is without."""
    for errors in run_processes(_errors, 2, lax(gate, num_hidden_layers=4), "auto", torch.float64):
        assert max(errors.values()) < 1e-12, max(errors.items(), key=lambda item: item[1])


def test_ungrouped_projections_cross_as_well():
    for errors in run_processes(_errors, 2, lax(), "bottleneck_ungrouped"):
        assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("scheme", ["vanilla", "vanilla_sharded"])
@pytest.mark.parametrize("form", ["tensor", "linear, uneven bottlenecks", "some projections"])
def test_latents_that_are_split_are_gathered_to_cross(form, scheme):
    for errors in run_processes(_errors, 2, lax(form), scheme):
        assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("scheme", ["vanilla", "vanilla_sharded"])
def test_the_gathers_are_those_of_the_formula(scheme):
    """7 all-gathers of 8 of 15 features more in each pass of a block."""
    config, tokens = lax(), 4 * 12
    axis = TensorAxis(size=2, gemm_columns=8, stream_columns=8)
    moves = [move for layer in range(3) for move in layer_moves(config, layer, axis, scheme=scheme)]
    plain = run_processes(_counts, 2, small_config(num_hidden_layers=3), scheme)
    for counted, before in zip(run_processes(_counts, 2, config, scheme), plain, strict=True):
        expected = {key: (volume.launches, volume.values) for key, volume in add_up(moves, tokens).items()}
        assert {key: value for key, value in counted.items() if key[1] in CHUNKS} == expected
        for pass_ in ("forward", "backward"):
            more = [
                sum(value[part] for key, value in counts.items() if key[0] == "all_gather" and key[2] == pass_)
                for counts in (counted, before)
                for part in (0, 1)
            ]
            assert (more[0] - more[2], more[1] - more[3]) == (3 * 7, 3 * 7 * 8 * tokens)


def _counts(config, scheme="auto"):
    model = parallel_model(config, dist.get_world_size(), scheme=scheme)
    with count_collectives() as log:
        model(**masked_batch(config.vocab_size)).backward()
    return {tuple(key): (traffic.launches, traffic.values) for key, traffic in log.traffic.items()}


@pytest.mark.parametrize("gate", ["identity", "linear", "tensor"])
def test_nothing_more_is_moved_than_without_crossing(gate):
    plain = run_processes(_counts, 2, small_config(num_hidden_layers=3))
    assert run_processes(_counts, 2, lax(gate)) == plain
    launches = {key: launches for key, (launches, _) in plain[0].items() if key[1] in CHUNKS}
    assert launches == {("all_reduce", chunk, pass_): 3 for chunk in CHUNKS for pass_ in ("forward", "backward")}


def _report(config, precision="32-true", plant=None, **options):
    if plant is not None:
        plant()
    return check_parity(config, num_processes=dist.get_world_size(), precision=precision, **options)


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("gate", ["identity", "linear", "tensor"])
def test_training_is_that_of_one_process(gate, size):
    """Two layers: with three, one process in fp32 is as far from one in fp64 as 1e-5 after three steps."""
    report = run_processes(_report, size, lax(gate, num_hidden_layers=2))[0]
    assert report.passed, report


@pytest.mark.parametrize("gate", ["identity", "linear", "tensor"])
def test_in_fp64_training_is_that_of_one_process_to_its_rounding(gate):
    """Three layers, and heads of a size of their own, where fp32 is noisiest."""
    report = run_processes(_report, 2, lax(gate, head_dim=12), "64-true")[0]
    assert report.passed, report
    assert report.gradient_tolerance == report.weight_tolerance == 1e-10


def _frozen_errors(config, trained, frozen):
    """Return the errors of the gradients that there are; all others must have none on the layout, too."""
    reference, model = one_process_model(config), meta_model(config)
    for each in (reference, model):
        choose_trained(each, trained, frozen)
    mesh = build_mesh(ParallelSizes(tensor_parallel_size=dist.get_world_size()), "cpu")
    parallelize(find_decoder(model), mesh, device=CPU, seed=SEED)
    for each in (reference, model):
        each(**masked_batch(config.vocab_size)).backward()
    expected = {name: each.grad for name, each in reference.named_parameters()}
    found = {name: each.grad for name, each in model.named_parameters()}
    assert [name for name in found if (found[name] is None) != (expected[name] is None)] == []
    return {name: relative_error(whole(found[name]), value) for name, value in expected.items() if value is not None}


@pytest.mark.parametrize(
    ("trained", "frozen"), [(["*crossings*"], []), (["*"], ["*.gate.*weight"]), (["model.layers.0.*factor_a*"], [])]
)
def test_parts_of_what_crosses_may_be_frozen(trained, frozen):
    for errors in run_processes(_frozen_errors, 2, lax(), trained, frozen):
        assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])


def _generated(config, cache):
    model, prompt = parallel_model(config, dist.get_world_size()), masked_batch(config.vocab_size)["input_ids"]
    return torch.cat(list(generate(model, prompt, 6, cache=cache)), -1).tolist()


def test_processes_that_share_layers_generate_with_a_cache_what_one_does_without():
    config = lax()
    expected = torch.cat(list(generate(one_process_model(config), masked_batch(131)["input_ids"], 6)), -1).tolist()
    assert run_processes(_generated, 2, config, KeyValueCache(3)) == [expected, expected]


def test_every_cell_of_the_matrix_has_the_base_and_gate_that_are_asked_for(monkeypatch, capsys):
    report = {"passed": True, "worst_gradient_relative_error": 1e-7, "worst_weight_relative_error": 1e-7}
    cells = []

    def run(command, **_):
        cells.append(command)
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps(report), stderr="")

    monkeypatch.setattr(parity.subprocess, "run", run)
    options = {"crossing_base": "svd", "crossing_gate": "identity", "keep_outer_activation": False}
    assert parity.parity(kind="lax", matrix=True, **options) == 0
    given = {"--kind=lax", "--crossing_base=svd", "--crossing_gate=identity", "--keep_outer_activation=false"}
    assert len(cells) == 97
    assert all(given <= set(command) for command in cells)
    assert "lax, svd, identity, 32-true: worst relative error of a gradient" in capsys.readouterr().out


@pytest.mark.parametrize("data_axis", ["replicate", "shard"])
def test_training_on_two_replicas_is_that_of_one_process(data_axis):
    report = run_processes(_data_report, 2, lax(), data_axis)[0]
    assert report.passed, report


def _data_report(config, data_axis):
    return _report(config, tensor_parallel_size=1, data_parallel_size=2, data_axis=data_axis)


def test_bf16_is_no_farther_from_fp32_than_twice_one_process_in_bf16():
    report = run_processes(_report, 2, lax(), "bf16-true")[0]
    assert report.passed, report
    assert report.gradient_tolerance < 0.3


# ---- recompute


def _trained(config, recompute, sizes):
    model, mesh = recomputed_model(config, recompute, **sizes)
    replicas, replica = mesh[DATA_AXIS].size(), mesh[DATA_AXIS].get_local_rank()
    batch = {name: tensor[replica::replicas] for name, tensor in masked_batch(config.vocab_size, rows=8).items()}
    with count_collectives() as log:
        loss = model(**batch)
        loss.backward()
    found = {name: getattr(each.grad, "_local_tensor", each.grad).clone() for name, each in model.named_parameters()}
    return found | {"loss": loss.detach()}, {tuple(key): traffic.launches for key, traffic in log.traffic.items()}


def _recomputed(config, kinds, sizes):
    expected, counts = _trained(config, RecomputeOptions(), sizes)
    found = [_trained(config, kind, sizes) for kind in kinds]
    return [
        ([name for name, value in expected.items() if not torch.equal(value, gradients_[name])], other == counts)
        for gradients_, other in found
    ]


@pytest.mark.parametrize(
    ("processes", "sizes"),
    [
        (1, {}),
        (2, {"tensor": 2}),
        (2, {"tensor": 2, "scheme": "vanilla"}),
        (2, {"data": 2, "data_axis": "shard"}),
    ],
)
@pytest.mark.parametrize("form", ["tensor", "linear, uneven bottlenecks"])
def test_gradients_with_recompute_are_bit_equal(form, processes, sizes):
    for low_rank, sharded, block in run_processes(_recomputed, processes, lax(form), [LOW_RANK, SHARDED, BLOCK], sizes):
        assert low_rank == ([], True)
        assert sharded[0] == block[0] == []


# ---- every process has the same


def _replicas(steps):
    model = parallel_model(lax(), dist.get_world_size())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**masked_batch(131)).backward()
        optimizer.step()
    named = [(name, each) for name, each in model.named_parameters() if ".crossings." in name]
    assert all(each.placements[0].is_replicate() for _, each in named)
    return {name: each._local_tensor.detach().numpy() for name, each in named}


def test_gates_and_norms_stay_bit_equal_on_all_processes():
    first, second = run_processes(_replicas, 2, 4)
    assert len(first) == 2 * 7 * 4
    assert all((first[name] == second[name]).all() for name in first)


# ---- planted defects


def crossing_dropped():
    original = ReplicatedCrossing.forward
    ReplicatedCrossing.forward = lambda self, a, z: a + 0.0 * original(self, a, z)


def gate_dropped():
    original = ReplicatedCrossing.forward
    ReplicatedCrossing.forward = lambda self, a, z: original(self, a, torch.zeros_like(z))


def the_first_layer_s_latents():
    """Give every layer the latents of the first, as a module that keeps the oldest ones would."""
    original, kept = CrossingDecoderLayer.forward, {}

    def forward(self, *args, **kwargs):
        hidden, latents = original(self, *args, **kwargs)
        if not self.crossing_sizes:
            kept["first"] = latents
        is_reference = isinstance(
            next((m for m in self.modules() if isinstance(m, ReplicatedCrossing)), None), type(None)
        )
        return hidden, latents if is_reference else kept["first"]

    CrossingDecoderLayer.forward = forward


def latents_of_another_projection():
    original = LayerLatents.give
    other = {"k_proj": "v_proj", "v_proj": "k_proj"}

    def give(self, name, z):
        is_parallel = any(isinstance(module, ReplicatedCrossing) for module in self._crossings.values())
        original(self, other.get(name, name) if is_parallel else name, z)

    LayerLatents.give = give


def latents_before_the_activation():
    """Give on what σ is applied to."""
    original = LayerLatents.give
    receive = LayerLatents.receive

    def note(self, name, a):
        u = receive(self, name, a)
        self.__dict__.setdefault("before", {})[name] = u
        return u

    def give(self, name, z):
        is_parallel = any(isinstance(module, ReplicatedCrossing) for module in self._crossings.values())
        original(self, name, self.before[name] if is_parallel else z)

    LayerLatents.receive, LayerLatents.give = note, give


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * dist.get_world_size()


def gate_gradient_counted_by_every_process():
    """Sum what is whole already."""
    original = Crossing.forward

    def forward(self, a, z):
        is_parallel = dist.is_initialized() and not isinstance(self.norm.weight, torch.nn.Parameter)
        if is_parallel:
            u = a + _Scaled.apply(self.gate(z))
            return self.norm(u)
        return original(self, a, z)

    Crossing.forward = forward


def norm_counts_replicas_on_every_process():
    gradients._is_counted_elsewhere = lambda gradient: False


@pytest.mark.parametrize(
    "plant",
    [
        crossing_dropped,
        gate_dropped,
        the_first_layer_s_latents,
        latents_of_another_projection,
        latents_before_the_activation,
        gate_gradient_counted_by_every_process,
        norm_counts_replicas_on_every_process,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_defect_is_seen(plant):
    report = run_processes(_report, 2, lax(), "32-true", plant)[0]
    assert not report.passed, report
    assert report.worst_of_tolerance > 3, report
