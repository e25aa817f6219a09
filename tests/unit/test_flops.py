"""The formulas of floating-point operations beside torch's own counter, on the one-process model."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_boost.config import LlamaConfig
from lightning_boost.cost import count_parameters, forward_flops, recompute_flops, training_flops
from lightning_boost.layout import find_decoder
from lightning_boost.recompute import RecomputeOptions, recompute_layers
from tests.models import masked_batch, one_process_model, small_config

ROWS, TOKENS = 3, 10

MODELS = {
    "cola": {},
    "svd": {"low_rank": {"kind": "svd"}},
    "full_rank": {"low_rank": {"kind": "full_rank"}},
    "dense among low-rank": {
        "low_rank": {"other_bottleneck_sizes": {"q_proj": "dense", "layers.1.down_proj": "dense", "up_proj": 11}}
    },
    "grouped queries": {"num_key_value_heads": 2},
    "lax": {"low_rank": {"kind": "lax"}},
    "lax, linear, uneven": {
        "low_rank": {"kind": "lax", "crossing_gate": "linear", "other_bottleneck_sizes": {"layers.0": 11}}
    },
    "heads of their own size, tied": {"head_dim": 12, "tie_word_embeddings": True},
}


def _counted(config, recompute=None):
    """Return what torch counts forward, and forward and backward, for one token; attention apart and whole."""
    model = one_process_model(config)
    if recompute is not None:
        recompute_layers(find_decoder(model), recompute, (), ())
    batch = masked_batch(config.vocab_size, ROWS, TOKENS)
    counts = []
    # torch counts the products of this form; it has no formula for its fused attention on CPUs
    with sdpa_kernel(SDPBackend.MATH):
        for is_trained in (False, True):
            with FlopCounterMode(display=False) as counter:
                loss = model(**batch)
                loss.backward() if is_trained else None
            by_operator = counter.get_flop_counts()["Global"]
            attention = by_operator.pop(torch.ops.aten.bmm, 0) + by_operator.pop(torch.ops.aten.baddbmm, 0)
            counts.append((sum(by_operator.values()), attention))
    return [(linear / (ROWS * TOKENS), attention / (ROWS * TOKENS)) for linear, attention in counts]


def _attention(config):
    """Return the operations of whole attention for one token, twice those of its causal half."""
    return config.num_hidden_layers * 4 * config.num_attention_heads * config.head_size * TOKENS


@pytest.mark.parametrize("name", MODELS)
def test_products_are_those_that_torch_counts(name):
    config = small_config(**MODELS[name])
    forward, trained = _counted(config)
    attention = _attention(config)
    assert forward == (forward_flops(config, TOKENS) - attention / 2, attention)
    assert trained == (training_flops(config, TOKENS) - 3 * attention / 2, 3 * attention)


@pytest.mark.parametrize("options", [{"kind": "block"}, {"kind": "block", "every": 2}, {"kind": "low_rank"}])
@pytest.mark.parametrize("name", MODELS)
def test_what_runs_again_is_what_torch_counts_more(name, options):
    config, recompute = small_config(**MODELS[name]), RecomputeOptions(**options)
    layers = recompute.choose(config.num_hidden_layers)
    (_, (linear, attention)), (_, (again, attention_again)) = _counted(config), _counted(config, recompute)
    expected = recompute_flops(config, TOKENS, kind=recompute.kind, layers=layers)
    half = _attention(config) / 2 * len(layers) / config.num_hidden_layers
    assert again - linear == expected - half
    assert attention_again - attention == 2 * half


def test_attention_that_is_kept_is_not_run_again():
    config = small_config()
    kept, again = (
        recompute_flops(config, TOKENS, kind="low_rank", layers=[0, 1], keep_attention=keep) for keep in (True, False)
    )
    assert again - kept == _attention(config) / 2


def test_six_times_the_matrices_for_each_token_is_the_usual_estimate():
    """At short contexts, where attention is small: 6 operations for each parameter outside the embedding."""
    config = LlamaConfig(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32)
    matrices = count_parameters(config) - config.vocab_size * config.hidden_size - 65 * config.hidden_size
    assert training_flops(config, 1) == pytest.approx(6 * matrices, rel=1e-3)
