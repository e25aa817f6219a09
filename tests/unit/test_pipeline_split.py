"""Layers on stages, and batches in micro-batches."""

from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import NamedTuple

import pytest
import torch

from lightning_boost.config import IGNORED_LABEL
from lightning_boost.layout import find_decoder
from lightning_boost.model.loss import loss_of, with_loss
from lightning_boost.pipeline_parallel.microbatches import bind, cut_batch
from lightning_boost.pipeline_parallel.options import PipelineOptions
from lightning_boost.pipeline_parallel.outputs import LossOutput, merge_outputs
from lightning_boost.pipeline_parallel.split import check_pipeline, given_layers, layer_costs, split_layers
from lightning_boost.pipeline_parallel.trees import map_tensors
from tests.models import masked_batch, meta_model, small_config


def _dearest(costs, borders):
    return max(sum(costs[start:stop]) for start, stop in pairwise(borders))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 7])
def test_no_cut_has_a_cheaper_dearest_stage(num_stages):
    costs = [1.0, 1.0, 3.0, 1.0, 2.0, 1.0, 5.0]
    stages = split_layers(costs, num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(7))
    found = max(sum(costs[layer] for layer in stage) for stage in stages)
    cuts = combinations(range(1, 7), num_stages - 1)
    assert found == min(_dearest(costs, [0, *cut, 7]) for cut in cuts)


def test_equal_layers_are_spread_evenly():
    assert sorted(map(len, split_layers([1.0] * 10, 4))) == [2, 2, 3, 3]


def test_the_head_counts_with_the_last_layer():
    costs = layer_costs(find_decoder(meta_model(small_config(num_hidden_layers=4, vocab_size=1000))))
    assert costs[0] == costs[1] == costs[2]
    assert costs[3] == costs[0] + 64 * 1000
    assert [len(stage) for stage in split_layers(costs, 2)] == [3, 1]


def test_given_layers_are_taken_or_refused():
    assert given_layers([1, 3], 4, 2) == [range(1), range(1, 4)]
    for counts in ([2, 1], [1, 2, 1], [0, 4], [4]):
        with pytest.raises(ValueError, match=r"layers_per_stage .* for each of 2 stages, .* model's 4 layers"):
            given_layers(counts, 4, 2)
    with pytest.raises(ValueError, match=r"pipeline stages \(3\) must be no more than the layers \(2\)"):
        split_layers([1.0, 1.0], 3)


def _share_down(layers):
    layers[1].mlp.down_proj.factor_a.weight = layers[0].mlp.down_proj.factor_a.weight


def _share_layer(layers):
    layers[1] = layers[0]


@pytest.mark.parametrize("share", [_share_down, _share_layer])
def test_a_weight_in_two_layers_is_refused(share):
    model = meta_model(small_config(num_hidden_layers=3))
    share(model.model.layers)
    with pytest.raises(ValueError, match=r"layers\.0\..* and model\.layers\.1\..* are one parameter, in two parts"):
        check_pipeline(find_decoder(model), 2, PipelineOptions())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "zero_bubble"}, "zero-bubble schedules would run each fused backward twice"),
        ({"num_microbatches": 2.5}, r"num_microbatches \(2\.5\) must be a whole number"),
        ({"virtual_stages": True}, r"virtual_stages \(True\) must be a whole number"),
        ({"layers_per_stage": [2, "2"]}, r"each of layers_per_stage \('2'\) must be a whole number"),
        ({"layers_per_stage": 2}, r"layers_per_stage \(2\) must be a list of whole numbers, one for each stage"),
        ({"layers_per_stage": "22"}, r"layers_per_stage \('22'\) must be a list of whole numbers"),
        ({"schedule": "fast"}, "must be one of '1f1b', 'gpipe', 'interleaved_1f1b'"),
        ({"virtual_stages": 2}, r"virtual_stages \(2\) must be at least 2 with .* 'interleaved_1f1b', and 1 with"),
        ({"schedule": "interleaved_1f1b"}, r"virtual_stages \(1\) must be at least 2"),
        ({"num_microbatches": 3}, r"num_microbatches \(3\) must be at least pipeline_parallel_size \(4\)"),
        (
            {"num_microbatches": 6, "schedule": "interleaved_1f1b", "virtual_stages": 2},
            r"num_microbatches \(6\) must be a multiple of pipeline_parallel_size \(4\) .* nearest is 8",
        ),
    ],
)
def test_what_a_pipeline_cannot_be_is_refused(options, message):
    """known_failures A13."""
    with pytest.raises(ValueError, match=message):
        PipelineOptions(**options).check(4)


def test_layers_are_the_same_however_their_numbers_are_written():
    assert PipelineOptions(layers_per_stage=[2, 2]) == PipelineOptions(layers_per_stage=(2, 2))


@pytest.mark.parametrize(
    ("given", "num_samples", "expected"),
    [(None, 16, 8), (None, 12, 6), (None, 7, 7), (None, 11, 2), (None, 1, 2), (8, 16, 8), (8, 5, 5), (8, 1, 2)],
)
def test_how_many_microbatches_a_batch_makes(given, num_samples, expected):
    assert PipelineOptions(num_microbatches=given).count_for(num_samples, 2) == expected


@pytest.mark.parametrize(("given", "num_samples", "expected"), [(8, 16, 8), (8, 5, 4), (None, 6, 6), (None, 7, 2)])
def test_interleaved_microbatches_come_in_rounds(given, num_samples, expected):
    options = PipelineOptions(schedule="interleaved_1f1b", virtual_stages=2, num_microbatches=given)
    assert options.count_for(num_samples, 2) == expected


def _forward(input_ids, labels=None, scale=1.0, **others):
    return input_ids


def test_every_sample_is_in_one_microbatch_and_filled_rows_have_no_label():
    batch = masked_batch(50, rows=5)
    arguments = bind(
        _forward, (batch["input_ids"],), {"labels": batch["labels"], "mask": torch.arange(5), "scale": 2.0}
    )
    microbatches = cut_batch(arguments, 3)
    assert microbatches.rows == 2
    parts = microbatches.arguments
    for name in ("input_ids", "labels", "mask"):
        torch.testing.assert_close(torch.cat([part[name] for part in parts])[:5], arguments[name])
    assert (parts[2]["labels"][1] == IGNORED_LABEL).all()
    assert [part["scale"] for part in parts] == [2.0] * 3
    valid = (batch["labels"][:, 1:] != IGNORED_LABEL).sum().item()
    assert sum(count.item() for count in microbatches.num_valid) == valid
    outputs = [{"logits": part["input_ids"] * 2, "extra": (part["mask"], None)} for part in parts]
    merged = merge_outputs(outputs, microbatches)
    torch.testing.assert_close(merged["logits"], batch["input_ids"] * 2)
    torch.testing.assert_close(merged["extra"][0], torch.arange(5))


def test_tensors_in_dicts_are_cut():
    mask = {"full_attention": torch.arange(4.0)[:, None], "others": (torch.zeros(1, 3), None)}
    first, second = cut_batch({"input_ids": torch.zeros(4, 3), "attention_mask": mask}, 2).arguments
    assert first["attention_mask"]["full_attention"].tolist() == [[0.0], [1.0]]
    assert second["attention_mask"]["full_attention"].tolist() == [[2.0], [3.0]]
    assert second["attention_mask"]["others"][0].shape == (1, 3)


@pytest.mark.parametrize("holder", [lambda cache: cache, lambda cache: {"cache": cache}])
def test_an_object_that_micro_batches_would_share_is_refused(holder):
    """Each would add its keys and values to those of the one before."""
    cache = type("DynamicCache", (), {})()
    with pytest.raises(TypeError, match=r"past \(DynamicCache\) must be a tensor or a plain value"):
        cut_batch({"input_ids": torch.zeros(4, 3), "past": holder(cache)}, 2)


class _Output(dict):
    """Is made from keyword arguments and read by attribute, as Hugging Face's are."""

    def __init__(self, *, logits, cache=None):
        super().__init__(logits=logits, **({} if cache is None else {"cache": cache}))
        self.logits = logits


class _Pair(NamedTuple):
    first: torch.Tensor
    second: _Output


def test_outputs_keep_their_classes():
    rows = torch.arange(4.0)[:, None]
    microbatches = cut_batch({"input_ids": torch.zeros(4, 3)}, 2)
    merged = merge_outputs([_Pair(each, _Output(logits=2 * each)) for each in rows.split(2)], microbatches)
    for pair, factor in ((merged, 1), (map_tensors(lambda tensor: 3 * tensor, merged), 3)):
        torch.testing.assert_close(pair.first, factor * rows)
        torch.testing.assert_close(pair.second.logits, 2 * factor * rows)


@pytest.mark.parametrize("shape", [(), (3,), (1, 2)])
def test_an_output_that_is_no_rows_is_refused(shape):
    microbatches = cut_batch({"input_ids": torch.zeros(4, 3)}, 2)
    with pytest.raises(ValueError, match="has no row for each of the 2 samples"):
        merge_outputs([{"loss": torch.zeros(shape)}] * 2, microbatches)


def test_a_tensor_that_may_be_of_samples_or_tokens_is_refused():
    arguments = {"input_ids": torch.zeros(4, 4), "position_ids": torch.arange(4)}
    with pytest.raises(ValueError, match=r"position_ids \(\[4\]\) may be .* Pass it as \[B, T\] or \[1, T\]"):
        cut_batch(arguments, 2)
    parts = cut_batch({**arguments, "position_ids": torch.arange(4)[None]}, 2).arguments
    assert [part["position_ids"].tolist() for part in parts] == [[[0, 1, 2, 3]]] * 2


def test_what_is_no_batch_of_tokens_is_refused():
    with pytest.raises(ValueError, match=r"must be token ids \[B, T\]"):
        bind(_forward, (torch.arange(3),), {})
    with pytest.raises(TypeError, match="must return tensors"):
        merge_outputs([object()], cut_batch({"input_ids": torch.zeros(2, 3)}, 1))


@dataclass(frozen=True)
class _FrozenOutput:
    loss: torch.Tensor
    logits: torch.Tensor


@pytest.mark.parametrize("holder", [lambda loss: loss, lambda loss: (loss, 1), lambda loss: {"loss": loss}, LossOutput])
def test_a_loss_is_found_where_models_return_it(holder):
    loss = torch.tensor(2.0)
    assert loss_of(holder(loss)) is loss
    assert loss_of(holder(torch.zeros(3))) is None


def test_another_loss_stands_in_an_output_that_cannot_be_changed():
    output, loss = _FrozenOutput(torch.tensor(2.0), torch.zeros(3)), torch.tensor(5.0)
    assert with_loss(output, loss) == _FrozenOutput(loss, output.logits)
    assert loss_of(output) == 2


def test_a_loss_is_all_that_an_output_with_labels_holds():
    output = LossOutput(torch.tensor(2.0))
    assert output.loss is output["loss"] is output[0]
    assert not hasattr(output, "logits")
    with pytest.raises(RuntimeError, match=r"gives its loss alone .* 'logits' was asked for\. Call it without labels"):
        output["logits"]
    with pytest.raises(RuntimeError, match="gives its loss alone"):
        _loss, _logits = output
