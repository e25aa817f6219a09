"""The comparison of low rank with full rank: its recipe, and the figures of its page that can be counted."""

from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from lightning_boost.cli import main
from lightning_boost.config import LlamaConfig, LowRankConfig
from lightning_boost.cost import count_parameters
from lightning_boost.model.llama import LlamaForCausalLM

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
KINDS = ROOT / "recipes" / "compare" / "kinds.yaml"
PAGE = ROOT / "docs" / "low_rank_against_full_rank.md"


def _composed(capsys, *recipes):
    with pytest.raises(SystemExit) as exit_info:
        main(["fit", *(f"--config={recipe}" for recipe in recipes), "--print_config"])
    assert exit_info.value.code in (0, None)
    return yaml.safe_load(capsys.readouterr().out)


def test_the_model_and_its_training_are_the_quickstart_s(capsys):
    quickstart, compared = _composed(capsys, QUICKSTART), _composed(capsys, QUICKSTART, KINDS)
    assert compared["model"] == quickstart["model"]
    changed = {name for name, value in compared["trainer"].items() if value != quickstart["trainer"][name]}
    assert changed == {
        "devices",
        "num_sanity_val_steps",
        "val_check_interval",
        "enable_checkpointing",
        "logger",
        "callbacks",
    }
    assert compared["trainer"]["devices"] == 1
    assert compared["trainer"]["val_check_interval"] == compared["trainer"]["max_steps"]
    assert {name for name, value in compared["data"].items() if value != quickstart["data"][name]} == {
        "sequence_length"
    }


@pytest.mark.parametrize("kind", ["full_rank", "svd", "cola"])
def test_parameters_and_flops_are_those_of_the_page(kind, capsys):
    given = dict(_composed(capsys, QUICKSTART, KINDS)["model"]["config"])
    low_rank = LowRankConfig(**{**given.pop("low_rank"), "kind": kind})
    config = LlamaConfig(**given, low_rank=low_rank)
    model, token_ids = LlamaForCausalLM(config), torch.zeros(1, 128, dtype=torch.int64)
    with FlopCounterMode(display=False) as counted:
        model(token_ids, labels=token_ids).backward()
    products = sum(flops for operator, flops in counted.get_flop_counts()["Global"].items() if "mm" in str(operator))
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{kind}`"))
    assert f"| {count_parameters(config):,} | {products / 128 / 1e6:.1f} million |" in row
