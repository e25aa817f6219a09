"""The formula of the tensor axis beside what is counted: every launch, value and byte of a step."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from lightning_boost.collectives import count_collectives
from lightning_boost.cost import TensorAxis, add_up, end_moves, layer_moves
from lightning_boost.kernels.statistic import statistic_columns
from lightning_boost.layout import find_decoder
from lightning_boost.mesh import ParallelSizes, build_mesh
from lightning_boost.model.loss import next_tokens
from lightning_boost.parallelize import parallelize
from lightning_boost.recompute import RecomputeOptions
from lightning_boost.tensor_parallel.vocabulary import CHUNK_TOKENS
from tests.models import CPU, SEED, masked_batch, meta_model, small_config
from tests.processes import run_processes

TOKENS = 12
BF16, FP32 = torch.bfloat16, torch.float32

DENSE = {"layers.0.q_proj": "dense", "layers.0.v_proj": "dense", "layers.1.o_proj": "dense", "down_proj": "dense"}
SHAPES = {
    "cola": {},
    "one key/value head, biases": {
        "attention_bias": True,
        "num_key_value_heads": 1,
        "low_rank": {"bottleneck_size": 8},
    },
    "tied, uneven": {
        "tie_word_embeddings": True,
        "low_rank": {"other_bottleneck_sizes": {"k_proj": 7, "layers.0": 13}},
    },
    "dense among low-rank": {
        "attention_bias": True,
        "num_key_value_heads": 1,
        "low_rank": {"bottleneck_size": 8, "other_bottleneck_sizes": DENSE},
    },
    "all of svd dense": {
        "low_rank": {"kind": "svd", "other_bottleneck_sizes": {"layers.0": "dense", "layers.1": "dense"}}
    },
    "full rank": {"low_rank": {"kind": "full_rank"}},
    "full rank, tied, one key/value head": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "num_key_value_heads": 1,
        "low_rank": {"kind": "full_rank"},
    },
}
PRECISIONS = {"32-true": (FP32, FP32), "bf16-true": (BF16, BF16), "bf16-mixed": (BF16, FP32)}
DROPOUT = {"hidden_dropout": 0.2}


def _counted(config, recompute, precision, rows, output, scheme):
    gemm, stream = PRECISIONS[precision]
    model = meta_model(config).to(stream)
    mesh = build_mesh(ParallelSizes(tensor_parallel_size=dist.get_world_size()), "cpu")
    parallelize(find_decoder(model), mesh, device=CPU, seed=SEED, recompute=recompute, scheme=scheme)
    batch = masked_batch(config.vocab_size, rows, TOKENS)
    autocast = nullcontext() if gemm is stream else torch.autocast("cpu", dtype=gemm)
    with count_collectives() as log:
        with autocast:
            if output == "loss":
                loss = model(**batch)
            else:
                targets = next_tokens(batch["labels"])
                loss = torch.nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), targets.flatten())
        loss.backward()
    return {tuple(key): (traffic.launches, traffic.values, traffic.bytes) for key, traffic in log.traffic.items()}


def _expected(config, size, recompute, precision, rows, output, scheme):
    gemm, stream = PRECISIONS[precision]
    axis = TensorAxis(
        size=size,
        gemm_dtype=gemm,
        stream_dtype=stream,
        gemm_columns=statistic_columns(gemm, size),
        stream_columns=statistic_columns(stream, size),
    )
    chosen = recompute.choose(config.num_hidden_layers)
    scheme, again = (None if scheme == "auto" else scheme), {"store_latents": recompute.store_latents}
    moves = []
    for layer in range(config.num_hidden_layers):
        kind = recompute.kind if layer in chosen else "none"
        moves += layer_moves(config, layer, axis, recompute=kind, scheme=scheme, **again)
    moves += end_moves(config, axis, tokens=rows * TOKENS, output=output, loss_tokens=CHUNK_TOKENS, scheme=scheme)
    return add_up(moves, rows * TOKENS)


def _check(config, *, size=2, precision="32-true", rows=4, output="loss", scheme="auto", **recompute):
    options = RecomputeOptions(**recompute)
    expected = _expected(config, size, options, precision, rows, output, scheme)
    for counted in run_processes(_counted, size, config, options, precision, rows, output, scheme):
        assert counted == expected


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_byte_of_a_step_is_in_the_formula(shape, precision):
    _check(small_config(**SHAPES[shape]), precision=precision)


@pytest.mark.parametrize(
    "recompute",
    [
        {"kind": "block"},
        {"kind": "block", "every": 2},
        {"kind": "low_rank"},
        {"kind": "low_rank", "store_latents": "sharded"},
    ],
)
@pytest.mark.parametrize("dropout", [{}, DROPOUT], ids=["", "dropout"])
@pytest.mark.parametrize("shape", ["one key/value head, biases", "dense among low-rank", "full rank"])
def test_recompute_is_in_the_formula(shape, dropout, recompute):
    _check(small_config(**SHAPES[shape], **dropout), **recompute)


@pytest.mark.parametrize(
    "recompute", [{}, {"kind": "block"}, {"kind": "low_rank", "store_latents": "sharded"}], ids=str
)
@pytest.mark.parametrize("shape", ["one key/value head, biases", "tied, uneven"])
@pytest.mark.parametrize("scheme", ["vanilla", "vanilla_sharded", "bottleneck_ungrouped"])
def test_schemes_to_compare_with_are_in_the_formula(scheme, shape, recompute):
    _check(small_config(**SHAPES[shape]), precision="bf16-mixed", scheme=scheme, **recompute)


@pytest.mark.parametrize("rows", [1, 3])
def test_shares_of_latents_are_rounded_up(rows):
    _check(small_config(), size=4, rows=rows, kind="low_rank", store_latents="sharded")


@pytest.mark.parametrize("shape", ["one key/value head, biases", "dense among low-rank"])
def test_four_processes(shape):
    _check(small_config(**SHAPES[shape]), size=4, precision="bf16-mixed")


@pytest.mark.parametrize("shape", ["cola", "full rank"])
def test_logits_are_in_the_formula(shape):
    _check(small_config(**SHAPES[shape]), precision="bf16-mixed", output="logits")


def test_a_loss_over_several_slices_is_in_the_formula():
    _check(small_config(), rows=90)
