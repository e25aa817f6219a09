"""The model on the tensor axis against the one-process model, without a Trainer: values, gradients, counts."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from lightning_boost.collectives import count_collectives
from lightning_boost.config import RopeScaling
from lightning_boost.cost import layer_traffic
from lightning_boost.gradients import clip_gradients_by_norm, global_gradient_norm
from lightning_boost.kernels.statistic import statistic_columns
from lightning_boost.model.loss import next_tokens
from lightning_boost.tensor_parallel.vocabulary import CHUNK_TOKENS
from tests.models import gradient_errors, masked_batch, one_process_model, parallel_model, small_config, whole
from tests.processes import run_processes

TOLERANCE = 1e-5

SHAPES = {
    "cola": {},
    "cola keeping the outer SiLU": {"low_rank": {"keep_outer_activation": True}},
    "svd": {"low_rank": {"kind": "svd"}},
    "svd dropping the outer SiLU": {"low_rank": {"kind": "svd", "keep_outer_activation": False}},
    "biases and grouped queries": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "fewer tokens than processes can share": {"vocab_size": 5, "intermediate_size": 66},
    "one key/value head": {"attention_bias": True, "num_key_value_heads": 1, "low_rank": {"bottleneck_size": 8}},
    "tied embeddings": {"tie_word_embeddings": True},
    "tied embeddings of few tokens": {"tie_word_embeddings": True, "vocab_size": 5},
    "label smoothing": {"label_smoothing": 0.1, "vocab_size": 50},
    "head size apart": {"head_dim": 12, "num_key_value_heads": 2},
    "uneven bottlenecks": {
        "low_rank": {
            "attention_bottleneck_size": 11,
            "mlp_bottleneck_size": 23,
            "other_bottleneck_sizes": {"k_proj": 7, "layers.1.up_proj": 30, "layers.0": 13},
        }
    },
    "dense among low-rank": {
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 1,
        "low_rank": {
            "bottleneck_size": 8,
            "other_bottleneck_sizes": {
                "layers.0.q_proj": "dense",
                "layers.0.v_proj": "dense",
                "layers.0.down_proj": "dense",
                "layers.1.gate_proj": "dense",
                "layers.1.up_proj": "dense",
                "layers.1.o_proj": "dense",
            },
        },
    },
    "full rank": {"low_rank": {"kind": "full_rank"}},
    "full rank, biases, one key/value head, tied": {
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "low_rank": {"kind": "full_rank"},
    },
}


def _loss_from_logits(model, batch):
    logits = model(batch["input_ids"])
    return cross_entropy(logits.flatten(0, 1), next_tokens(batch["labels"]).flatten())


def _errors(config, through_logits, documents=None):
    batch = masked_batch(config.vocab_size)
    if documents is not None:
        batch["document_ids"] = torch.tensor([documents]).expand(len(batch["labels"]), -1)
    reference, model = one_process_model(config), parallel_model(config, dist.get_world_size())
    expected_loss = reference(**batch)
    loss = _loss_from_logits(model, batch) if through_logits else model(**batch)
    expected_loss.backward()
    loss.backward()
    norms = [global_gradient_norm(each.parameters()).item() for each in (model, reference)]
    shapes_kept = all(
        name == other and parameter.shape == expected.shape
        for (name, parameter), (other, expected) in zip(
            model.named_parameters(), reference.named_parameters(), strict=True
        )
    )
    return {
        "loss": abs(loss.item() - expected_loss.item()) / expected_loss.item(),
        "norm": abs(norms[0] - norms[1]) / norms[1],
        "shapes kept": shapes_kept,
        **gradient_errors(model, reference),
    }


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_one_process(shape, size):
    config = small_config(**SHAPES[shape])
    for errors in run_processes(_errors, size, config, False):
        assert errors.pop("shapes kept")
        assert max(errors.values()) < TOLERANCE, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("size", [2, 4])
def test_a_module_s_own_loss_from_whole_logits_is_exact(size):
    for errors in run_processes(_errors, size, small_config(vocab_size=5), True):
        assert errors.pop("shapes kept")
        assert max(errors.values()) < TOLERANCE, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("kind", ["cola", "full_rank"])
def test_documents_of_one_sequence_see_only_themselves(kind):
    scaling = RopeScaling(rope_type="dynamic", factor=2.0, original_max_position_embeddings=4)
    config = small_config(low_rank={"kind": kind}, num_key_value_heads=4, rope_scaling=scaling)
    documents = [0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2]
    for errors in run_processes(_errors, 2, config, False, documents):
        assert errors.pop("shapes kept")
        assert max(errors.values()) < TOLERANCE, max(errors.items(), key=lambda item: item[1])


def _weights_and_logits(config):
    reference, model = one_process_model(config), parallel_model(config, dist.get_world_size())
    weights_equal = all(
        torch.equal(whole(parameter), reference.get_parameter(name)) for name, parameter in model.named_parameters()
    )
    input_ids = masked_batch(config.vocab_size)["input_ids"]
    with torch.inference_mode():
        logits = model(input_ids)
    return weights_equal, (logits - reference(input_ids)).abs().max().item(), logits.numpy()


@pytest.mark.parametrize("size", [2, 4])
def test_initial_weights_are_bit_equal_and_logits_agree_on_all_processes(size):
    """known_failures A51."""
    results = run_processes(_weights_and_logits, size, small_config())
    for weights_equal, difference, logits in results:
        assert weights_equal
        assert difference < 1e-5
        assert (logits == results[0][2]).all()


def _counts(config, dtype, rows):
    model = parallel_model(config, dist.get_world_size(), dtype)
    batch = masked_batch(config.vocab_size, rows=rows)
    with count_collectives() as log:
        model(**batch).backward()
    return {tuple(key): (traffic.launches, traffic.values, traffic.bytes) for key, traffic in log.traffic.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4])
def test_collectives_are_exactly_those_of_the_formula(size, dtype):
    config, rows, tokens = small_config(), 90, 12
    num_rows, layers, width = rows * tokens, config.num_hidden_layers, dtype.itemsize
    columns = statistic_columns(dtype, size)
    formula = layer_traffic(config, 0, tensor_parallel_size=size, statistic_columns=columns)
    expected = {
        key: (layers, layers * values * num_rows, layers * values * num_rows * width) for key, values in formula.items()
    }
    share = config.hidden_size // size
    gathered = (num_rows + 1) * share
    expected["all_gather", "head", "forward"] = (1, gathered, gathered * width)
    scattered = num_rows * size * (share + columns)
    expected["reduce_scatter", "head", "backward"] = (1, scattered, scattered * width)
    chunks = -(-num_rows // CHUNK_TOKENS)
    assert chunks == 2
    expected["all_gather", "loss", "forward"] = (chunks, 3 * num_rows, 3 * num_rows * 4)
    for counted in run_processes(_counts, size, config, dtype, rows):
        assert counted == expected


@pytest.mark.parametrize(
    ("kind", "launches", "forward", "backward"),
    [("cola", 4, 7 * 15 + 2 * 8, 7 * 15), ("svd", 4, 7 * 15 + 2 * 8, 7 * 15), ("full_rank", 2, 2 * 64, 2 * 64)],
)
def test_the_formula_is_that_of_the_paper(kind, launches, forward, backward):
    """Forward and backward 7R (and the statistic's columns) in 4 launches each; full rank 2D in 2."""
    config = small_config(low_rank={"kind": kind})
    traffic = layer_traffic(config, 0, tensor_parallel_size=2, statistic_columns=8)
    for pass_, expected in (("forward", forward), ("backward", backward)):
        values = [values for key, values in traffic.items() if key[2] == pass_]
        assert len(values) == launches
        assert sum(values) == expected


def _layer_counts(config):
    model = parallel_model(config, dist.get_world_size())
    batch = masked_batch(config.vocab_size)
    with count_collectives() as log:
        model(**batch).backward()
    return {tuple(key): traffic.values / batch["input_ids"].numel() for key, traffic in log.traffic.items()}


@pytest.mark.parametrize("shape", ["dense among low-rank", "uneven bottlenecks", "full rank"])
def test_mixed_layers_move_what_the_formula_says(shape):
    config = small_config(**{**SHAPES[shape], "num_key_value_heads": 8})
    expected = Counter()
    for layer in range(config.num_hidden_layers):
        expected += layer_traffic(config, layer, tensor_parallel_size=2, statistic_columns=8)
    for counted in run_processes(_layer_counts, 2, config):
        for key, values in expected.items():
            # a gather in front of a dense projection carries γ as one more row
            assert counted[key] == pytest.approx(values, rel=0.03 if key[0] == "all_gather" else 1e-12), key


def _clipped():
    config = small_config()
    batch = masked_batch(config.vocab_size)
    results = []
    for model in (one_process_model(config), parallel_model(config, dist.get_world_size())):
        model(**batch).backward()
        norm = clip_gradients_by_norm(model.parameters(), 0.1)
        results.append((norm.item(), global_gradient_norm(model.parameters()).item()))
    return results


def test_clipping_takes_the_norm_of_all_processes():
    for (expected, clipped), (found, found_clipped) in run_processes(_clipped, 2):
        assert expected > 0.2
        assert found == pytest.approx(expected, rel=1e-6)
        assert clipped == pytest.approx(0.1, rel=1e-4)
        assert found_clipped == pytest.approx(clipped, rel=1e-6)
