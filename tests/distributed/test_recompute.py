"""Recompute beside no recompute: the same gradients bit for bit, no collective twice, and what is kept, counted."""

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_boost import random_streams
from lightning_boost.collectives import count_collectives
from lightning_boost.mesh import DATA_AXIS
from lightning_boost.model.cache import KeyValueCache
from lightning_boost.model.llama import DecoderLayer
from lightning_boost.recompute import RecomputeOptions, layers
from lightning_boost.tensor_parallel.library import COMMUNICATING
from tests.models import masked_batch, small_config
from tests.processes import run_processes
from tests.recomputed import BLOCK, CHUNKS, DROPOUT, LOW_RANK, SHAPES, SHARDED, WITH_ATTENTION, recomputed_model

LAYOUTS = {
    "pipeline 2": (2, {"pipeline": 2}),
    "pipeline 2, tensor 2": (4, {"pipeline": 2, "tensor": 2}),
    "pipeline 2, tensor 2, gpipe": (4, {"pipeline": 2, "tensor": 2, "options": {"schedule": "gpipe"}}),
    "pipeline 2, tensor 2, interleaved": (
        4,
        {"pipeline": 2, "tensor": 2, "options": {"schedule": "interleaved_1f1b", "virtual_stages": 2}},
    ),
    "pipeline 2, data 2, sharded": (4, {"pipeline": 2, "data": 2, "data_axis": "shard"}),
    "data 2": (2, {"data": 2}),
    "data 2, sharded": (2, {"data": 2, "data_axis": "shard"}),
    "tensor 2, data 2": (4, {"tensor": 2, "data": 2}),
    "tensor 2, data 2, sharded": (4, {"tensor": 2, "data": 2, "data_axis": "shard"}),
}


def _own(parameter):
    """Return this process's share of a gradient."""
    return getattr(parameter.grad, "_local_tensor", parameter.grad).clone()


def _trained(config, recompute, **layout):
    """Return gradients and losses of two steps, what is drawn behind them, and collectives."""
    model, mesh = recomputed_model(config, recompute, **layout)
    replicas, replica = mesh[DATA_AXIS].size(), mesh[DATA_AXIS].get_local_rank()
    batch = {name: tensor[replica::replicas] for name, tensor in masked_batch(config.vocab_size, rows=8).items()}
    torch.manual_seed(1)
    exact = {}
    with count_collectives() as log:
        for step in range(2):
            loss = model(**batch)
            loss.backward()
            exact[f"loss {step}"] = loss.detach()
    exact["drawn"] = torch.rand(1)
    exact |= {name: _own(parameter) for name, parameter in model.named_parameters()}
    return exact, {tuple(key): traffic.launches for key, traffic in log.traffic.items()}


def _unequal(expected, found):
    assert expected.keys() == found.keys()
    assert max(tensor.abs().max() for tensor in expected.values()) > 0
    return [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]


def _compared(config, kinds, layout, plant=None):
    """Return the collectives without recompute, and with each kind, beside the names of what is not bit-equal."""
    expected, counts = _trained(config, RecomputeOptions(), **layout)
    if plant is not None:
        plant()
    found = [_trained(config, recompute, **layout) for recompute in kinds]
    return counts, [(_unequal(expected, exact), other_counts) for exact, other_counts in found]


def _with_gathers(counts):
    """Add one gather in backward for each collective that gives all processes the same in forward."""
    total = Counter(counts)
    for (operation, chunk, pass_), launches in counts.items():
        if chunk in CHUNKS and pass_ == "forward" and operation != "reduce_scatter":
            total["all_gather", chunk, "backward"] += launches
    return dict(total)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_are_bit_equal_and_no_collective_runs_twice(shape, size):
    kinds = [LOW_RANK, WITH_ATTENTION, SHARDED, BLOCK]
    for plain, found in run_processes(_compared, size, small_config(**SHAPES[shape]), kinds, {"tensor": size}):
        assert [unequal for unequal, _ in found] == [[], [], [], []]
        *low_rank, sharded, block = (counts for _, counts in found)
        assert low_rank == [plain, plain]
        assert sharded == _with_gathers(plain)
        assert (block != plain) == (size > 1)


@pytest.mark.parametrize("scheme", ["vanilla", "vanilla_sharded", "bottleneck_ungrouped"])
def test_schemes_to_compare_with_are_recomputed_as_exactly(scheme):
    layout = {"tensor": 2, "scheme": scheme}
    for plain, ((unequal, counts), (sharded_unequal, sharded)) in run_processes(
        _compared, 2, small_config(), [LOW_RANK, SHARDED], layout
    ):
        assert unequal == sharded_unequal == []
        assert counts == plain
        assert {key for key in sharded if key not in plain} <= {("all_gather", chunk, "backward") for chunk in CHUNKS}


@pytest.mark.parametrize(
    ("layout", "shape"), [*((layout, "dropout") for layout in LAYOUTS), ("pipeline 2, tensor 2", "full rank")]
)
def test_all_axes(layout, shape):
    processes, sizes = LAYOUTS[layout]
    config = small_config(num_hidden_layers=4, **SHAPES[shape])
    kinds = [LOW_RANK, SHARDED, BLOCK]
    for plain, ((unequal, counts), (sharded_unequal, sharded), (block_unequal, _)) in run_processes(
        _compared, processes, config, kinds, sizes
    ):
        assert unequal == sharded_unequal == block_unequal == []
        assert counts == plain
        assert sharded == _with_gathers(plain)


def _forgotten(operator):
    def forget():
        COMMUNICATING.remove(getattr(torch.ops.lightning_boost, operator).default)

    return forget


def _other_masks():
    layers.checkpoint = partial(checkpoint, preserve_rng_state=False)


def _counted_twice():
    random_streams._is_second_run = lambda: False


@pytest.mark.parametrize("operator", ["norm_project_reduce", "project_reduce"])
def test_an_operator_that_is_not_kept_is_seen(operator):
    for plain, ((unequal, counts),) in run_processes(
        _compared, 2, small_config(), [LOW_RANK], {"tensor": 2}, _forgotten(operator)
    ):
        assert unequal == []
        assert counts != plain


@pytest.mark.parametrize(
    ("plant", "shape", "processes", "sizes"),
    [
        (_other_masks, "dropout", 2, {"tensor": 2}),
        (_counted_twice, "full rank", 4, {"tensor": 2, "pipeline": 2}),
    ],
)
def test_a_planted_defect_is_seen(plant, shape, processes, sizes):
    for _, ((unequal, _),) in run_processes(
        _compared, processes, small_config(**SHAPES[shape]), [LOW_RANK], sizes, plant
    ):
        assert unequal


def _forward_and_backward(recompute, num_layers):
    _, counts = _trained(small_config(num_hidden_layers=num_layers), recompute, tensor=2)
    layers = {key: number for key, number in counts.items() if key[1] in CHUNKS}
    wanted = [("all_reduce", "forward"), ("all_reduce", "backward"), ("all_gather", "backward")]
    found = [sum(number for key, number in layers.items() if (key[0], key[2]) == each) for each in wanted]
    assert sum(found) == sum(layers.values())
    return found


@pytest.mark.parametrize(
    ("options", "again", "gathering"),
    [
        ({"kind": "none"}, 0, 0),
        ({"kind": "low_rank"}, 0, 0),
        ({"kind": "low_rank", "store_latents": "sharded"}, 0, 5),
        ({"kind": "low_rank", "store_latents": "sharded", "every": 2}, 0, 3),
        ({"kind": "block"}, 5, 0),
        ({"kind": "block", "every": 2}, 3, 0),
        ({"kind": "block", "every": 0.4}, 2, 0),
    ],
)
def test_a_block_has_four_collectives_forward_and_four_backward(options, again, gathering):
    """Over two steps; with kind block the forward ones of the chosen blocks run again, which the count tells."""
    for found in run_processes(_forward_and_backward, 2, RecomputeOptions(**options), 5):
        assert found == [2 * 4 * (5 + again), 2 * 4 * 5, 2 * 4 * gathering]


def _copied(kind):
    model, _ = recomputed_model(small_config(), RecomputeOptions(kind=kind), tensor=2)
    copy = deepcopy(model)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.mul_(0.5)
    batch = masked_batch(131)
    losses = [each(**batch) for each in (model, copy)]
    losses[1].backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(isinstance(layer, DecoderLayer) for layer in copy.model.layers)
    return [loss.item() for loss in losses]


def test_a_copy_of_a_model_runs_its_own_weights():
    expected = run_processes(_copied, 2, "none")
    assert expected[0][0] != expected[0][1]
    assert run_processes(_copied, 2, "low_rank") == expected


def _with_a_cache():
    """Return the logits of a sequence given in two parts; the gradients of the second part go through the cache."""
    model, _ = recomputed_model(small_config(), LOW_RANK, tensor=2)
    input_ids, cache = masked_batch(131)["input_ids"], KeyValueCache(2)
    with torch.no_grad():
        whole = model(input_ids)
        model(input_ids[:, :8], cache=cache)
    rest = model(input_ids[:, 8:], cache=cache)
    rest.sum().backward()
    return (whole[:, 8:] - rest).abs().max().item(), cache.num_tokens


def test_a_cache_is_extended_once():
    for difference, num_tokens in run_processes(_with_a_cache, 2):
        assert difference < 1e-5
        assert num_tokens == 12


def _under_autocast(kinds):
    found = []
    for kind in kinds:
        with torch.autocast("cpu", torch.bfloat16):
            found.append(_trained(small_config(**DROPOUT), kind, tensor=2)[0])
    return [_unequal(found[0], other) for other in found[1:]]


def test_gradients_are_bit_equal_under_autocast():
    kinds = [RecomputeOptions(), LOW_RANK, SHARDED, replace(SHARDED, keep_attention=True)]
    for unequal in run_processes(_under_autocast, 2, kinds):
        assert unequal == [[], [], []]


def _backward_twice(recompute):
    model, _ = recomputed_model(small_config(), recompute, tensor=2)
    loss = model(**masked_batch(131))
    loss.backward(retain_graph=True)
    loss.backward()


def test_a_second_backward_is_refused_where_shares_are_gone():
    with pytest.raises(RuntimeError, match="backward goes twice through a block"):
        run_processes(_backward_twice, 2, SHARDED)


def _twice_under_autocast(size, recompute):
    """Return what is unequal of two calls' gradients, beside a model whose weights are cast for each call too.

    A weight that autocast has cast for the first call is found cast in the second call's first run only.
    """
    batch, gradients = masked_batch(131), []
    for options, is_cached in ((RecomputeOptions(), False), (recompute, True)):
        model, _ = recomputed_model(small_config(), options, tensor=size)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=is_cached):
            loss = model(**batch) + model(**batch)
        loss.backward()
        gradients.append({name: _own(parameter) for name, parameter in model.named_parameters()})
    return _unequal(*gradients)


@pytest.mark.parametrize(("size", "recompute"), [(1, LOW_RANK), (1, BLOCK), (2, LOW_RANK), (2, SHARDED)])
def test_a_model_may_be_called_twice_under_autocast(size, recompute):
    assert not any(run_processes(_twice_under_autocast, size, size, recompute))


def _stepped_before_backward(recompute, layout):
    """Step the layers between two backwards; return the error of the second."""
    model, _ = recomputed_model(small_config(), recompute, **layout)
    optimizer = torch.optim.AdamW(model.model.layers.parameters())
    losses = [model(**masked_batch(131)) for _ in range(2)]
    losses[0].backward()
    optimizer.step()
    with pytest.raises(RuntimeError) as error:
        losses[1].backward()
    return str(error.value)


@pytest.mark.parametrize("recompute", [LOW_RANK, SHARDED, BLOCK])
def test_weights_that_were_stepped_before_backward_are_refused(recompute):
    """On all processes, before any of them gathers."""
    for message in run_processes(_stepped_before_backward, 2, recompute, {"tensor": 2}):
        assert "of a DecoderLayer was changed between forward and backward" in message


def _changed_in_place(recompute):
    """Double what the MLP gives, which with kind full_rank a collective has summed; return what is unequal."""
    gradients = []
    for options in (RecomputeOptions(), recompute):
        model, _ = recomputed_model(small_config(low_rank={"kind": "full_rank"}), options, tensor=2)
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(lambda _, __, output: output.mul_(2))
        model(**masked_batch(131)).backward()
        gradients.append({name: _own(parameter) for name, parameter in model.named_parameters()})
    return _unequal(*gradients)


def test_what_a_collective_gave_may_be_changed_in_place_only_where_it_is_not_kept():
    for recompute in (SHARDED, BLOCK):
        assert not any(run_processes(_changed_in_place, 2, recompute))
    with pytest.raises(RuntimeError, match="must not change in place what recompute 'low_rank' keeps"):
        run_processes(_changed_in_place, 2, LOW_RANK)
