from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest
import torch
import yaml

from lightning_boost import LowRankLanguageModel, TextDataModule
from lightning_boost.config import LlamaConfig, LowRankConfig, RopeScaling
from lightning_boost.data.streams import StreamSource
from lightning_boost.options import differences, flat, plain


class _Color(Enum):
    RED = "red"


@dataclass
class _Outer:
    inner: RopeScaling
    sizes: tuple[int, int] = (1, 2)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        ((0.9, [1]), [0.9, [1]]),
        (Path("a/b"), "a/b"),
        (torch.bfloat16, "torch.bfloat16"),
        (_Color.RED, "red"),
        ({1: (2,)}, {"1": [2]}),
        (torch.nn.Linear, "Linear"),
        (torch.nn.Identity(), "Identity"),
        (lambda: 0, "<lambda>"),
        (_Outer(RopeScaling(rope_type="linear", factor=2.0)), {"sizes": [1, 2]}),
    ],
)
def test_options_become_plain(value, expected):
    found = plain(value)
    if isinstance(found, dict) and "inner" in found:
        assert found.pop("inner")["factor"] == 2.0
    assert found == expected


def test_names_are_dotted_and_lists_of_plain_values_stay():
    options = {"model": {"betas": [0.9, 0.95], "streams": [{"weight": 1.0}, {"weight": 2.0}], "none": {}}, "seed": 0}
    assert flat(options) == {
        "model.betas": [0.9, 0.95],
        "model.streams.0.weight": 1.0,
        "model.streams.1.weight": 2.0,
        "seed": 0,
    }


def test_what_differs_is_told_in_words():
    before = {"same": 1, "rate": 0.003, "gone": "x", "none": None}
    assert differences(before, {"same": 1, "rate": 0.001, "new": [1]}) == {
        "gone": ("'x'", "not given"),
        "new": ("not given", "[1]"),
        "rate": ("0.003", "0.001"),
    }


def test_the_model_and_the_data_keep_their_options_as_plain_types():
    """So loggers and checkpoints hold them without a class of this package; known_failures A02."""
    config = LlamaConfig(vocab_size=257, low_rank=LowRankConfig(other_bottleneck_sizes={"layers.0": 3}), hidden_size=64)
    model = LowRankLanguageModel(config, learning_rate=0.5, betas=(0.8, 0.9))
    data = TextDataModule(train_streams=[StreamSource(dataset="allenai/c4", name="en", weight=2.0)], batch_size=3)
    options = {"model": dict(model.hparams), "data": dict(data.hparams)}
    assert yaml.safe_load(yaml.safe_dump(options)) == options
    found = flat(options)
    assert found["model.learning_rate"] == 0.5
    assert found["model.betas"] == [0.8, 0.9]
    assert found["model.config.low_rank.other_bottleneck_sizes.layers.0"] == 3
    assert found["data.train_streams.0.weight"] == 2.0
    assert found["data.batch_size"] == 3
