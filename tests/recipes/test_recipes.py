"""Every recipe composes, parses and builds; those for CPUs train a step."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lightning_boost.cli import main
from lightning_boost.config import LlamaConfig, LowRankConfig
from lightning_boost.cost import count_parameters
from lightning_boost.model.llama import LlamaForCausalLM
from lightning_boost.tensor_parallel.check import legal_sizes
from lightning_boost.tensor_parallel.layout import find_decoder

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
QUICKSTART = RECIPES / "quickstart.yaml"
MODELS = sorted((RECIPES / "model").glob("*.yaml"))
LAYOUTS = sorted((RECIPES / "parallel").glob("*.yaml"))


def _composed(*recipes):
    """Return what the command line makes of several recipes."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as exit_info:
        main(["fit", *(f"--config={recipe}" for recipe in recipes), "--print_config"])
    assert exit_info.value.code in (0, None)
    return yaml.safe_load(output.getvalue())


def _model_config(composed):
    given = dict(composed["model"]["config"])
    return LlamaConfig(**{**given, "low_rank": LowRankConfig(**given["low_rank"])})


@pytest.mark.parametrize("recipe", MODELS, ids=lambda recipe: recipe.stem)
def test_a_model_has_the_parameters_that_its_recipe_says(recipe):
    config = _model_config(_composed(QUICKSTART, recipe))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == count_parameters(config)
    low, low_unit, full, full_unit = re.search(
        r": ([\d.]+) ([MB]) parameters, ([\d.]+) ([MB]) with full-rank", recipe.read_text()
    ).groups()
    scale = {"M": 1e6, "B": 1e9}
    assert counted == pytest.approx(float(low) * scale[low_unit], rel=5e-3)
    assert count_parameters(config, full_rank=True) == pytest.approx(float(full) * scale[full_unit], rel=5e-3)
    assert 4 in legal_sizes(find_decoder(model))


def test_there_is_a_recipe_for_every_published_model():
    assert {recipe.stem for recipe in MODELS} == {
        *(f"cola_{size}" for size in ("60m", "130m", "350m", "1b", "7b")),
        *(f"boost_{size}" for size in ("1b", "3b", "7b", "13b", "30b")),
    }


@pytest.mark.parametrize("recipe", LAYOUTS, ids=lambda recipe: recipe.stem)
def test_a_layout_takes_all_of_its_processes(recipe):
    trainer = _composed(QUICKSTART, recipe)["trainer"]
    sizes = trainer["strategy"]["init_args"]
    data = sizes["data_parallel_size"] if sizes["data_parallel_size"] != "auto" else 1
    assert sizes["tensor_parallel_size"] * data == trainer["devices"] * trainer["num_nodes"]
    assert trainer["devices"] % sizes["tensor_parallel_size"] == 0, "the tensor axis stays inside a node"


@pytest.mark.parametrize("layout", ["two_cpu_processes", "four_cpu_processes"])
def test_a_layout_for_cpus_trains(tmp_path, layout):
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
    arguments = [
        f"--config={QUICKSTART}",
        f"--config={RECIPES / 'parallel' / layout}.yaml",
        "--trainer.max_steps=2",
        "--trainer.num_sanity_val_steps=0",
        "--trainer.limit_val_batches=1",
        "--model.config.num_hidden_layers=1",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "lightning_boost", "fit", *arguments],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "max_steps=2` reached" in done.stderr


def test_recipes_hold_nothing_that_the_command_line_does_not_know(tmp_path):
    """The tests above can fail: a wrong key is not let through."""
    recipe = tmp_path / "wrong.yaml"
    recipe.write_text("model:\n  config:\n    hidden_sise: 3\n")
    with pytest.raises(SystemExit) as exit_info:
        main(["fit", f"--config={QUICKSTART}", f"--config={recipe}", "--print_config"])
    assert exit_info.value.code == 2
