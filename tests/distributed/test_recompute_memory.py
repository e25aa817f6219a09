"""What recompute keeps of a block, and what its second run moves, counted beside the formulas."""

import gc
from dataclasses import replace
from functools import partial
from math import ceil

import pytest

from lightning_boost.benchmark.live_memory import LiveMemory
from lightning_boost.cost import kept_values
from lightning_boost.recompute import RecomputeOptions
from tests.models import masked_batch, small_config
from tests.processes import run_processes
from tests.recomputed import BLOCK, LOW_RANK, SHARDED, WITH_ATTENTION, recomputed_model


def _values_of_a_block(config, recompute, size, **shape):
    """Return how many values a block keeps for a batch."""
    kept = []
    for layers in (2, 3):
        model, _ = recomputed_model(replace(config, num_hidden_layers=layers), recompute, tensor=size)
        with LiveMemory() as live:
            loss = model(**masked_batch(config.vocab_size, **shape))
            kept.append(live.settled() / 4)
            loss.backward()
    return kept[1] - kept[0]


def _values_kept(config, recompute, size):
    """Return how many values a block keeps for each token, and how many beside: of one size or another, by tokens."""
    short, long = (_values_of_a_block(config, recompute, size, rows=rows) for rows in (4, 8))
    per_token = (long - short) / (4 * 12)
    return per_token, short - per_token * 4 * 12


@pytest.mark.parametrize(
    ("kind", "options", "values"),
    [
        ("cola", LOW_RANK, {1: 7 * 15 + 64, 2: 7 * 15 + 2 + 32, 4: 7 * 15 + 2 + 16}),
        ("cola", WITH_ATTENTION, {1: 7 * 15 + 64 + 72, 2: 7 * 15 + 2 + 32 + 36, 4: 7 * 15 + 2 + 16 + 18}),
        ("cola", SHARDED, {1: 7 * 15 + 64, 2: 7 * 15 / 2 + 2 + 32, 4: 7 * 15 / 4 + 2 + 16}),
        ("cola", BLOCK, {1: 64, 2: 32, 4: 16}),
        ("lax", LOW_RANK, {1: 14 * 15 + 64, 2: 14 * 15 + 2 + 32, 4: 14 * 15 + 2 + 16}),
        ("lax", SHARDED, {1: 14 * 15 + 64, 2: 10.5 * 15 + 2 + 32, 4: 8.75 * 15 + 2 + 16}),
        ("cola", RecomputeOptions(), {1: 1376, 2: 666, 4: 439}),
        ("full_rank", LOW_RANK, {1: 64, 2: 3 * 64, 4: 3 * 64}),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_a_block_keeps_is_its_input_the_latents_and_the_norms_scales(kind, options, values, size):
    """D 64, R 15, 8 heads; attention's output is D/tp and one number for each head. Parameters are not counted."""
    config = small_config(intermediate_size=172, low_rank={"kind": kind})
    assert run_processes(_values_kept, size, config, options, size) == [(values[size], 0)] * size


DENSE = {"other_bottleneck_sizes": {"q_proj": "dense", "down_proj": "dense", "up_proj": 30}}


@pytest.mark.parametrize(
    ("low_rank", "options"),
    [
        *(
            ({}, options)
            for options in (LOW_RANK, WITH_ATTENTION, SHARDED, replace(SHARDED, keep_attention=True), BLOCK)
        ),
        *(({"kind": "full_rank"}, options) for options in (LOW_RANK, SHARDED, BLOCK)),
        *((DENSE, options) for options in (LOW_RANK, SHARDED)),
        *((DENSE | {"kind": "lax"}, options) for options in (LOW_RANK, SHARDED, BLOCK)),
        ({"kind": "lax", "crossing_projections": ["v_proj", "down_proj"]}, LOW_RANK),
    ],
)
def test_what_a_block_keeps_is_what_the_formula_says(low_rank, options):
    config = small_config(num_hidden_layers=3, intermediate_size=172, low_rank=low_rank)
    given = {"recompute": options.kind, "store_latents": options.store_latents}
    formula = kept_values(config, 2, **given, keep_attention=options.keep_attention, tensor_parallel_size=2)
    for per_token, _ in run_processes(_values_kept, 2, config, options, 2):
        assert per_token == formula.values + formula.scales


@pytest.mark.parametrize("size", [2, 4])
def test_what_tokens_that_do_not_divide_keep_is_padded_by_less_than_a_value_for_each_process(size):
    """21 tokens; latents are cut by values: those of each chunk in equal parts, rounded up."""
    config, tokens = small_config(intermediate_size=172), 3 * 7
    shares = sum(ceil(tokens * width / size) for width in (45, 15, 30, 15))
    for found in run_processes(partial(_values_of_a_block, rows=3, tokens=7), size, config, SHARDED, size):
        assert found == shares + tokens * (2 + 64 // size)


def test_on_four_processes_a_block_keeps_several_times_less():
    """The proportions of BOOST's 7B, D = 4R and F = 2.7D: what there is room for is an aim of this package."""
    config = small_config(hidden_size=256, intermediate_size=688, low_rank={"bottleneck_size": 64})
    plain, whole, sharded = (
        run_processes(_values_kept, 4, config, options, 4)[0][0] for options in (RecomputeOptions(), LOW_RANK, SHARDED)
    )
    assert (whole, sharded) == (7 * 64 + 2 + 64, 7 * 16 + 2 + 64)
    assert plain >= 3.5 * whole
    assert plain >= 9 * sharded


def _left_over(recompute):
    """Return what is alive once a loss is dropped without a backward."""
    model, _ = recomputed_model(small_config(), recompute, tensor=2)
    gc.disable()
    with LiveMemory() as live:
        loss = model(**masked_batch(131))
        kept = live.bytes
        del loss
        return kept, live.settled()


@pytest.mark.parametrize("options", [LOW_RANK, SHARDED])
def test_what_was_kept_goes_with_the_loss(options):
    """No cycle holds it, which would stay until Python looks for cycles."""
    for kept, left_over in run_processes(_left_over, 2, options):
        assert kept > 0
        assert left_over == 0
