"""Recompute beside no recompute: the same gradients bit for bit, no collective twice, and what is kept, counted."""

import copy

import pytest
import torch
import torch.distributed as dist

from lightning_boost import random_streams
from lightning_boost.collectives import count_collectives
from lightning_boost.layout import find_decoder
from lightning_boost.mesh import ParallelSizes, build_mesh
from lightning_boost.parallelize import parallelize
from lightning_boost.pipeline_parallel.options import PipelineOptions
from lightning_boost.recompute import RecomputeOptions
from lightning_boost.tensor_parallel.library import COMMUNICATING
from tests.live_memory import LiveMemory
from tests.models import CPU, SEED, masked_batch, meta_model, small_config
from tests.processes import run_processes

DROPOUT = {"attention_dropout": 0.3, "hidden_dropout": 0.3}
MIXED = {"other_bottleneck_sizes": {"layers.0.q_proj": "dense", "layers.0.down_proj": "dense", "layers.1.up_proj": 30}}
SHAPES = {
    "cola": {},
    "dropout": DROPOUT,
    "biases and grouped queries": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "one key/value head, dropout": {"num_key_value_heads": 1, "low_rank": {"bottleneck_size": 8}, **DROPOUT},
    "svd": {"low_rank": {"kind": "svd"}},
    "dense among low-rank": {"low_rank": MIXED},
    "full rank, dropout": {"low_rank": {"kind": "full_rank"}, **DROPOUT},
}
LOW_RANK, BLOCK = RecomputeOptions(kind="low_rank"), RecomputeOptions(kind="block")
WITH_ATTENTION = RecomputeOptions(kind="low_rank", keep_attention=True)


def _model(config, recompute, *, data_axis="replicate", options=None, **sizes):
    model = meta_model(config)
    mesh = build_mesh(ParallelSizes(**{f"{axis}_parallel_size": size for axis, size in sizes.items()}), "cpu")
    pipeline = PipelineOptions(**(options or {}))
    decoder = find_decoder(model)
    parallelize(decoder, mesh, device=CPU, seed=SEED, data_axis=data_axis, pipeline=pipeline, recompute=recompute)
    return model, mesh


def _local(tensor):
    return getattr(tensor, "_local_tensor", tensor).detach().clone()


def _trained(config, recompute, **layout):
    """Return the gradients of two steps, losses and counts, and what is drawn next."""
    model, mesh = _model(config, recompute, **layout)
    replicas, replica = mesh["data_parallel"].size(), mesh["data_parallel"].get_local_rank()
    batch = {name: tensor[replica::replicas] for name, tensor in masked_batch(config.vocab_size, rows=8).items()}
    torch.manual_seed(1)
    losses = []
    with count_collectives() as log:
        for _ in range(2):
            loss = model(**batch)
            loss.backward()
            losses.append(loss.item())
    gradients = {name: _local(parameter.grad) for name, parameter in model.named_parameters()}
    counts = {tuple(key): traffic.launches for key, traffic in log.traffic.items()}
    return gradients, losses, counts, torch.rand(1).item()


def _compared(config, kinds, layout):
    """Return whether gradients, losses and the random stream are bit-equal to those without recompute, and counts."""
    gradients, losses, counts, drawn = _trained(config, RecomputeOptions(), **layout)
    found = [(None, counts)]
    for recompute in kinds:
        others, other_losses, other_counts, other_drawn = _trained(config, recompute, **layout)
        assert gradients.keys() == others.keys()
        assert any(gradient.abs().max() > 0 for gradient in gradients.values())
        unequal = [name for name, gradient in gradients.items() if not torch.equal(gradient, others[name])]
        unequal += ["losses"] if losses != other_losses else []
        unequal += ["the random stream"] if drawn != other_drawn else []
        found.append((unequal, other_counts))
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradients_are_bit_equal_and_no_collective_runs_twice(shape, size):
    config = small_config(**SHAPES[shape])
    kinds = [LOW_RANK, WITH_ATTENTION, BLOCK]
    for (_, plain), *kept, (unequal, again) in run_processes(_compared, size, config, kinds, {"tensor": size}):
        for different, counts in kept:
            assert different == []
            assert counts == plain
        assert unequal == []
        # those of the layers run once more, but for what lies behind the last activation that backward needs
        assert (again != plain) == (size > 1)
