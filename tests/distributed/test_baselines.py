"""Schemes that are there to be compared with: the same training, other collectives."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from lightning_boost.benchmark.counts import processes_that_do_nothing
from lightning_boost.collectives import (
    Label,
    count_collectives,
    reduce_scatter,
    register_group,
    start_reduce_scatter,
)
from lightning_boost.commands import parity
from lightning_boost.layout import find_decoder
from lightning_boost.parity import check_parity
from lightning_boost.strategy.boost import BoostParallelStrategy
from lightning_boost.tensor_parallel import full_rank, ops, vanilla, vanilla_sharded
from lightning_boost.tensor_parallel.scheme import scheme_for
from tests.models import (
    gradient_errors,
    masked_batch,
    meta_model,
    one_process_model,
    parallel_model,
    small_config,
    whole,
)
from tests.processes import run_processes

BASELINES = ("vanilla", "vanilla_sharded", "bottleneck_ungrouped")
TOLERANCE = 1e-5

SHAPES = {
    "cola, biases, grouped queries": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "svd, one key/value head": {"num_key_value_heads": 1, "low_rank": {"kind": "svd", "bottleneck_size": 8}},
    "a bottleneck of fewer features than processes": {
        "low_rank": {"attention_bottleneck_size": 3, "mlp_bottleneck_size": 1},
        "tie_word_embeddings": True,
    },
}


def _errors(config, scheme, plant=None, change=None):
    if plant is not None:
        plant()
    reference, model = one_process_model(config), parallel_model(config, dist.get_world_size(), scheme=scheme)
    if change is not None:
        change(reference)
        change(model)
    batch = masked_batch(config.vocab_size)
    expected, found = reference(**batch), model(**batch)
    expected.backward()
    found.backward()
    return {"loss": abs(found.item() - expected.item()) / expected.item(), **gradient_errors(model, reference)}


@pytest.mark.parametrize(
    ("size", "shape"), [(2, shape) for shape in SHAPES] + [(4, list(SHAPES)[1]), (4, list(SHAPES)[2])]
)
@pytest.mark.parametrize("scheme", BASELINES)
def test_gradients_are_those_of_one_process(scheme, size, shape):
    for errors in run_processes(_errors, size, small_config(**SHAPES[shape]), scheme):
        assert max(errors.values()) < TOLERANCE, max(errors.items(), key=lambda item: item[1])


def more_between_norm_and_projections(model):
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            module.register_forward_pre_hook(lambda _, args: (args[0] * 1.5, *args[1:]))


def more_readers_of_a_norm(model):
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            module.register_forward_hook(lambda _, args, output: output + 0.5 * args[0])


@pytest.mark.parametrize("change", [more_between_norm_and_projections, more_readers_of_a_norm])
def test_a_full_rank_layer_may_do_more_with_a_norm_s_output(change):
    config = small_config(low_rank={"kind": "full_rank"}, num_key_value_heads=1, attention_bias=True)
    for errors in run_processes(_errors, 2, config, "full_rank", None, change):
        assert max(errors.values()) < TOLERANCE, max(errors.items(), key=lambda item: item[1])


def _shapes_of_no_rows():
    config, no_rows, shapes = small_config(), torch.zeros(0, 5, dtype=torch.long), []
    for scheme in BASELINES:
        logits = parallel_model(config, dist.get_world_size(), scheme=scheme)(no_rows)
        logits.sum().backward()
        shapes.append(tuple(logits.shape))
    return shapes


def test_a_batch_of_no_rows_goes_through():
    assert run_processes(_shapes_of_no_rows, 2) == [[(0, 5, 131)] * len(BASELINES)] * 2


def _report(scheme, options):
    return check_parity(small_config(), num_processes=dist.get_world_size(), scheme=scheme, **options)


@pytest.mark.parametrize(
    ("scheme", "size", "options"),
    [
        ("vanilla", 2, {"precision": "bf16-true"}),
        ("vanilla_sharded", 2, {"recompute": "low_rank"}),
        pytest.param("vanilla", 4, {"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("vanilla_sharded", 4, {"data_parallel_size": 2, "data_axis": "shard"}, marks=pytest.mark.slow),
        pytest.param("bottleneck_ungrouped", 2, {"recompute": "low_rank"}, marks=pytest.mark.slow),
    ],
)
def test_training_is_that_of_one_process(scheme, size, options):
    report = run_processes(_report, size, scheme, options)[0]
    assert report.passed, report


# ---- what is frozen

PARTS = (
    *("embed_tokens", "input_layernorm", "k_proj", "o_proj", "model.norm", "lm_head"),
    *("gate_proj.factor_a", "gate_proj.factor_b", "down_proj.factor_a", "down_proj.factor_b", "bias"),
)


def _frozen_errors(scheme):
    kind = "full_rank" if scheme == "full_rank" else "cola"
    config = small_config(num_hidden_layers=1, attention_bias=True, mlp_bias=True, low_rank={"kind": kind})
    reference, model = one_process_model(config), parallel_model(config, dist.get_world_size(), scheme=scheme)
    batch, errors = masked_batch(config.vocab_size), {}
    parameters = {name: (model.get_parameter(name), each) for name, each in reference.named_parameters()}
    for part, is_alone in product(PARTS, (False, True)):
        trained = [name for name in parameters if (part in name) == is_alone]
        for name, pair in parameters.items():
            for parameter in pair:
                parameter.requires_grad_(name in trained).grad = None
        if len(trained) in (0, len(parameters)):
            continue  # a model without factors
        for each in (reference, model):
            each(**batch).backward()
        for name, (found, expected) in parameters.items():
            assert (found.grad is not None) == (expected.grad is not None) == (name in trained)
        total = torch.stack([parameters[name][1].grad.norm() for name in trained]).norm()
        errors[part, is_alone] = max(
            ((whole(found.grad) - expected.grad).norm() / expected.grad.norm().clamp(min=1e-6 * total)).item()
            for found, expected in (parameters[name] for name in trained)
        )
    return errors


@pytest.mark.parametrize("scheme", ["full_rank", *BASELINES])
def test_a_part_is_trained_alone_and_frozen_alone(scheme):
    for errors in run_processes(_frozen_errors, 2, scheme):
        assert len(errors) == (14 if scheme == "full_rank" else 22)
        assert max(errors.values()) < TOLERANCE, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("asked", [(True, False), (False, True), (True, True)])
def test_only_gradients_that_are_asked_for_are_computed(asked):
    with processes_that_do_nothing(2), FlopCounterMode(display=False) as counter:
        group = register_group(dist.group.WORLD)
        x, factor = torch.ones(3, 5, requires_grad=asked[0]), torch.ones(2, 5, requires_grad=asked[1])
        ops.ProjectReduce.apply(x, factor, group, "o").sum().backward()
    assert counter.get_total_flops() == (1 + sum(asked)) * 2 * 3 * 5 * 2


# ---- what they move: a block's launches and values per token, by pass


def _block_traffic(config, scheme):
    model = parallel_model(config, dist.get_world_size(), scheme=scheme)
    batch = masked_batch(config.vocab_size)
    with count_collectives() as log:
        model(**batch).backward()
    rows, found = config.num_hidden_layers * batch["input_ids"].numel(), {}
    for operation, chunk, pass_ in log.traffic:
        if chunk in ("qkv", "o", "gate_up", "down"):
            traffic = log.total(operation=operation, pass_=pass_, chunk=chunk)
            launches, values = found.get((operation, pass_), (0, 0))
            found[operation, pass_] = (
                launches + traffic.launches // config.num_hidden_layers,
                values + traffic.values / rows,
            )
    return found


D, F, R = 64, 173, 15
F_PADDED, COLUMNS = 174, 8


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("full_rank", {("all_reduce", "forward"): (2, 2 * D), ("all_reduce", "backward"): (2, 2 * D)}),
        ("vanilla", {("all_reduce", "forward"): (7, 5 * D + 2 * F), ("all_reduce", "backward"): (4, 3 * D + F)}),
        (
            "vanilla_sharded",
            {
                ("reduce_scatter", "forward"): (2, 3 * D + 2 * F_PADDED),
                ("all_gather", "forward"): (2, (D + F_PADDED) / 2),
                ("all_reduce", "forward"): (2, 2 * D),
                ("all_gather", "backward"): (2, (3 * D + 2 * F_PADDED) / 2),
                ("reduce_scatter", "backward"): (2, D + F_PADDED),
                ("all_reduce", "backward"): (2, 2 * D),
            },
        ),
        (
            "bottleneck_ungrouped",
            {("all_reduce", "forward"): (7, 7 * R + 5 * COLUMNS), ("all_reduce", "backward"): (7, 7 * R)},
        ),
    ],
)
def test_collectives_are_exactly_those_of_the_paper_s_count(scheme, expected):
    """Full rank: 2 launches of 2D values forward and backward. Vanilla: 7 of 5D + 2F, 4 of 3D + F; sharded: 6 and 6.

    A width of 173 is padded to be scattered.
    """
    kind = "full_rank" if scheme == "full_rank" else "cola"
    for found in run_processes(_block_traffic, 2, small_config(low_rank={"kind": kind}), scheme):
        assert found == expected


def _scattered(dtype):
    group, index = register_group(dist.group.WORLD), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    tensors = list(torch.randn(3, 3, 2, 5, generator=generator).to(dtype))
    with count_collectives() as log:
        part = reduce_scatter(tensors[index], group, Label("down", "forward"))
        later, in_flight = start_reduce_scatter(tensors[index], group, Label("down", "backward"))
        in_flight.wait()
    counted = {pass_: log.total(operation="reduce_scatter", pass_=pass_).values for pass_ in ("forward", "backward")}
    return torch.equal(part, sum(tensors)[index]), torch.equal(later, part), counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scatter_gives_each_process_its_part_of_the_sum(dtype):
    """Over gloo it is a move of its own, counted as what it stands for; the sum is in the order of the processes."""
    assert run_processes(_scattered, 3, dtype) == [(True, True, {"forward": 30, "backward": 30})] * 3


# ---- planted defects


def no_sum_behind_a_pair():
    ops.all_reduce = lambda *_: None


def no_sum_in_front_of_a_pair():
    start = ops.start_all_reduce
    for module in (ops, vanilla):
        module.start_all_reduce = lambda tensor, *label: start(tensor.clone(), *label)


def no_sum_in_front_of_dense_projections():
    start = full_rank.start_all_reduce
    full_rank.start_all_reduce = lambda tensor, *label: start(tensor.clone(), *label)


def last_projection_left_out_of_the_sum():
    original = full_rank._project_columns_backward

    def backward(grads_y, x, weights, *rest):
        return original(grads_y, x, [*weights[:-1], torch.zeros_like(weights[-1])], *rest)

    full_rank._project_columns_backward = backward


def bias_on_every_process():
    original = vanilla.expand_reduce
    vanilla.expand_reduce = lambda z, pair: original(z, pair) + pair.output_bias().to_local()


def heads_of_the_other_process():
    original = vanilla_sharded.reduce_scatter

    def reduce_scatter(tensor, group, label):
        return original(tensor.flip(0).contiguous() if label.chunk == "qkv" else tensor, group, label)

    vanilla_sharded.reduce_scatter = reduce_scatter


def own_features_only_go_on():
    original = vanilla_sharded.all_gather
    vanilla_sharded.all_gather = lambda tensor, group, label: (
        original(tensor, group, label) * (1.0 if label.pass_ == "forward" else 0.5)
    )


def features_of_the_other_process_in_front_of_a_pair():
    start = vanilla_sharded.start_reduce_scatter
    vanilla_sharded.start_reduce_scatter = lambda tensor, *label: start(tensor.flip(0).contiguous(), *label)


@pytest.mark.parametrize(
    ("scheme", "plant"),
    [
        ("vanilla", no_sum_behind_a_pair),
        ("vanilla", no_sum_in_front_of_a_pair),
        ("vanilla", bias_on_every_process),
        ("full_rank", no_sum_in_front_of_dense_projections),
        ("full_rank", last_projection_left_out_of_the_sum),
        ("vanilla_sharded", heads_of_the_other_process),
        ("vanilla_sharded", own_features_only_go_on),
        ("vanilla_sharded", features_of_the_other_process_in_front_of_a_pair),
        ("bottleneck_ungrouped", no_sum_in_front_of_a_pair),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_planted_defect_is_seen(scheme, plant):
    kind = "full_rank" if scheme == "full_rank" else "cola"
    config = small_config(attention_bias=True, mlp_bias=True, low_rank={"kind": kind})
    errors = run_processes(_errors, 2, config, scheme, plant)[0]
    assert max(errors.values()) > 1e-3


# ---- what is refused


@pytest.mark.parametrize(
    ("scheme", "low_rank", "message"),
    [
        ("vanilla", {"other_bottleneck_sizes": {"layers.1.o_proj": "dense"}}, "layers.1.self_attn.o_proj is dense"),
        ("vanilla_sharded", {"kind": "full_rank"}, "must be a pair of factors with scheme 'vanilla_sharded'"),
        ("full_rank", {}, "is a pair of factors and must be dense with scheme 'full_rank'"),
    ],
)
def test_a_model_that_a_scheme_is_not_for_is_refused(scheme, low_rank, message):
    decoder = find_decoder(meta_model(small_config(low_rank=low_rank)))
    with pytest.raises(ValueError, match=message):
        scheme_for(decoder, scheme).check(decoder)


def test_an_unknown_scheme_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"scheme \('megatron'\) must be one of 'auto', 'bottleneck'"):
        BoostParallelStrategy(scheme="megatron")


def test_the_matrix_of_a_scheme_leaves_out_what_it_is_not_for_and_names_it(monkeypatch, capsys):
    passed = {"passed": True, "worst_gradient_relative_error": 1e-7, "worst_weight_relative_error": 1e-7}
    shapes = []
    monkeypatch.setattr(parity, "_run_cell", lambda _, shape, *__: shapes.append(shape) or passed)
    assert parity.parity(matrix=True, scheme="vanilla") == 0
    assert set(shapes) == parity.SHAPES.keys() - {"mixed"}
    assert "cola, vanilla, 32-true: worst relative error of a gradient" in capsys.readouterr().out
