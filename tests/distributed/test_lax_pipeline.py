"""Latents that cross the borders of a pipeline's stages: gradients, what borders carry, and planted defects."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from lightning_boost.collectives import count_collectives
from lightning_boost.cost import TensorAxis, add_up, border_moves
from lightning_boost.mesh import DATA_AXIS
from lightning_boost.model.crossing import LayerLatents
from lightning_boost.pipeline_parallel import latents
from lightning_boost.recompute import RecomputeOptions
from tests.distributed import test_pipeline_trainer
from tests.distributed.test_lax import UNEVEN, lax
from tests.distributed.test_pipeline import _evaluated, _Traffic
from tests.models import gradient_errors, masked_batch, one_process_model
from tests.processes import run_processes
from tests.recomputed import LOW_RANK, recomputed_model

NO_RECOMPUTE = RecomputeOptions()
INTERLEAVED = {"schedule": "interleaved_1f1b", "virtual_stages": 2}
LAYOUTS = {
    "pipeline 2": (2, {"pipeline": 2}, {}),
    "pipeline 2, gpipe": (2, {"pipeline": 2}, {"schedule": "gpipe"}),
    "pipeline 2, three micro-batches": (2, {"pipeline": 2}, {"num_microbatches": 3}),
    "pipeline 2, interleaved": (2, {"pipeline": 2}, INTERLEAVED),
    "pipeline 2, tensor 2": (4, {"pipeline": 2, "tensor": 2}, {}),
    "pipeline 2, tensor 2, interleaved": (4, {"pipeline": 2, "tensor": 2}, INTERLEAVED),
}


def _errors(config, sizes, options, recompute=NO_RECOMPUTE, plant=None):
    reference = one_process_model(config)
    batch = masked_batch(config.vocab_size, rows=8, tokens=11)
    expected = reference(**batch)
    expected.backward()
    if plant is not None:
        plant()
    model, mesh = recomputed_model(config, recompute, options=options, **sizes)
    replicas, replica = mesh[DATA_AXIS].size(), mesh[DATA_AXIS].get_local_rank()
    loss = model(**{name: tensor[replica::replicas] for name, tensor in batch.items()})
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return {
        "loss": abs(total.item() / dist.get_world_size() - expected.item()),
        **gradient_errors(model, reference, is_stage=True),
    }


def _assert_exact(results, config):
    names = set()
    for errors in results:
        assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])
        names |= errors.keys()
    assert names - {"loss"} == {name for name, _ in one_process_model(config).named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_one_process(layout):
    """11 tokens: shares of a micro-batch's tokens are uneven."""
    processes, sizes, options = LAYOUTS[layout]
    config = lax(num_hidden_layers=4)
    _assert_exact(run_processes(_errors, processes, config, sizes, options), config)


@pytest.mark.parametrize(
    "low_rank",
    [
        {"crossing_gate": "linear", **UNEVEN},
        {"crossing_projections": ["up_proj", "k_proj"]},
        {"other_bottleneck_sizes": {"layers.2": "dense"}},
    ],
)
def test_a_border_carries_what_the_layer_behind_it_receives(low_rank):
    config = lax(low_rank=low_rank, num_hidden_layers=4)
    options = {"layers_per_stage": [2, 2]}
    _assert_exact(run_processes(_errors, 2, config, {"pipeline": 2}, options), config)


@pytest.mark.parametrize("layout", ["pipeline 2", "pipeline 2, tensor 2"])
def test_with_recompute_as_well(layout):
    processes, sizes, options = LAYOUTS[layout]
    config = lax(num_hidden_layers=4)
    _assert_exact(run_processes(_errors, processes, config, sizes, options, LOW_RANK), config)


@pytest.mark.slow
@pytest.mark.parametrize("data_axis", ["replicate", "shard"])
def test_all_axes_at_once(data_axis):
    config = lax(num_hidden_layers=4)
    sizes = {"pipeline": 2, "tensor": 2, "data": 2, "data_axis": data_axis}
    _assert_exact(run_processes(_errors, 8, config, sizes, {}, LOW_RANK), config)


@pytest.mark.parametrize("tensor", [1, 2])
def test_losses_and_logits_without_gradients(tensor):
    config = lax(num_hidden_layers=4)
    for loss, logits in run_processes(_evaluated, 2 * tensor, config, 4, 11, {"pipeline": 2, "tensor": tensor}, {}):
        assert loss < 1e-5
        assert logits < 1e-4


def _loss_under_autocast(config, sizes):
    batch = masked_batch(config.vocab_size, rows=8, tokens=11)
    reference, (model, _) = one_process_model(config), recomputed_model(config, NO_RECOMPUTE, **sizes)
    with torch.autocast("cpu", torch.bfloat16):
        expected, loss = reference(**batch), model(**batch)
    expected.backward()
    loss.backward()
    return loss.item(), expected.item(), max(gradient_errors(model, reference, is_stage=True).values())


@pytest.mark.parametrize("tensor", [1, 2])
def test_under_autocast_latents_cross_in_its_dtype(tensor):
    config, sizes = lax(num_hidden_layers=4), {"pipeline": 2, "tensor": tensor}
    for loss, expected, error in run_processes(_loss_under_autocast, 2 * tensor, config, sizes):
        assert loss == pytest.approx(expected, rel=2e-3)
        assert error < 0.2


def _fit(*arguments):
    test_pipeline_trainer.CONFIG = lax()
    return test_pipeline_trainer._fit(*arguments)


@pytest.mark.parametrize(
    ("saved_on", "loaded_on"),
    [
        ("tensor 2, pipeline 2", "one process"),
        pytest.param("one process", "tensor 2, pipeline 2", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_goes_on_on_another_layout(tmp_path, saved_on, loaded_on):
    uninterrupted = run_processes(_fit, 1, tmp_path / "whole.ckpt", "one process", 4, False)[0]
    processes = {"one process": 1, "tensor 2, pipeline 2": 4}
    run_processes(_fit, processes[saved_on], tmp_path / "half.ckpt", saved_on, 2, False)
    for losses in run_processes(_fit, processes[loaded_on], tmp_path / "half.ckpt", loaded_on, 4, True):
        assert losses == pytest.approx(uninterrupted[4:], rel=1e-5)


def _traffic(config, sizes, options):
    batch = masked_batch(config.vocab_size, rows=8, tokens=11)
    model, _ = recomputed_model(config, NO_RECOMPUTE, options=options, **sizes)
    # the first step also makes buffers and warms connections up
    for _ in range(2):
        with _Traffic() as traffic, count_collectives() as log:
            model(**batch).backward()
    sent = Counter(values for name, values in traffic.calls if name == "send")
    received = Counter(values for name, values in traffic.calls if name == "recv_")
    gathers = {tuple(key): (each.launches, each.values) for key, each in log.traffic.items() if key.chunk == "latents"}
    return dict(sent), dict(received), gathers


@pytest.mark.parametrize("options", [{}, INTERLEAVED])
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_border_carries_a_share_of_the_latents_beside_the_hidden_stream(tensor, options):
    """8 rows of 11 tokens in 4 micro-batches: 22 tokens, ``D/tp`` of each and ``7 R`` of ``⌈22/tp⌉``, both ways."""
    config, sizes = lax(num_hidden_layers=4), {"pipeline": 2, "tensor": tensor}
    results = run_processes(_traffic, 2 * tensor, config, sizes, {"num_microbatches": 4, **options})
    # of 2 or 4 stages in turn on two processes each border is between both
    borders = 3 if options else 1
    share = 22 // tensor * 7 * 15
    expected = {22 * 64 // tensor: 4 * borders, share: 4 * borders}
    # borders that end at a stage of the first process and of the last
    behind = (1, 2) if options else (0, 1)
    for index, (sent, received, gathers) in enumerate(results):
        assert sent == received == expected
        is_last = index >= tensor
        counts = {"forward": behind[is_last], "backward": behind[not is_last]}
        assert gathers == {
            ("all_gather", "latents", pass_): (4 * count, 4 * count * share)
            for pass_, count in counts.items()
            if count and tensor > 1
        }
        layers = range(is_last, 4, 2) if options else range(2 * is_last, 2 * is_last + 2)
        axis = TensorAxis(size=tensor, gemm_columns=8, stream_columns=8)
        formula = add_up(border_moves(config, axis, layers, 22), 22)
        assert tensor == 1 or gathers == {key: (4 * each.launches, 4 * each.values) for key, each in formula.items()}


# ---- planted defects


def shares_swapped():
    """Take the neighbour's share of the tokens."""
    latents.group_index = lambda group: 1 - dist.get_rank() % 2


def gradient_not_gathered():
    original = latents._gather

    def gather(share, group, num_tokens, pass_):
        whole = original(share, group, num_tokens, pass_)
        return whole if pass_ == "forward" else torch.zeros_like(whole)

    latents._gather = gather


def gradient_of_every_process_summed():
    original = latents._gather
    latents._gather = lambda share, group, num_tokens, pass_: (
        original(share, group, num_tokens, pass_) * (2 if pass_ == "backward" else 1)
    )


def kept_on_the_layer():
    """Read the latents that the layer before gave on last, as one that keeps them would: of another micro-batch."""
    given = {}
    original = LayerLatents.give
    receive = LayerLatents.receive

    def give(self, name, z):
        original(self, name, z)
        given.setdefault(name, []).append(z)

    def receive_latest(self, name, a):
        if name in self._before and len(given.get(name, [])) > 2:
            self._before = {**self._before, name: given[name][-1].detach()}
        return receive(self, name, a)

    LayerLatents.give, LayerLatents.receive = give, receive_latest


@pytest.mark.parametrize(
    ("plant", "layout"),
    [
        (shares_swapped, "pipeline 2, tensor 2"),
        (gradient_not_gathered, "pipeline 2, tensor 2"),
        (gradient_of_every_process_summed, "pipeline 2, tensor 2"),
        (kept_on_the_layer, "pipeline 2"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_planted_defect_is_seen(plant, layout):
    processes, sizes, options = LAYOUTS[layout]
    results = run_processes(_errors, processes, lax(num_hidden_layers=4), sizes, options, NO_RECOMPUTE, plant)
    assert max(max(errors.values()) for errors in results) > 1e-3
