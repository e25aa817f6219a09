"""Any position of a large world starts within little memory: nothing on it grows with the number of processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_boost.model.llama import LlamaForCausalLM
from tests.large_world import BOOST_40B, SIZES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("index", "first", "last"),
    [
        (0, "model.embed_tokens.weight", "model.layers.2.mlp.down_proj.factor_b.weight"),
        (517, "model.layers.24.input_layernorm.weight", "model.layers.26.mlp.down_proj.factor_b.weight"),
        (1023, "model.layers.45.input_layernorm.weight", "lm_head.weight"),
    ],
)
def test_a_position_among_1024_processes_starts(index, first, last):
    """Tensor 8 × pipeline 16 × data 8; a process of its own, whose peak is its own."""
    command = [sys.executable, "-m", "tests.large_world", str(index)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["names"][0] == first
    assert found["names"][-1] == last
    assert found["peak_gib"] < 4.0
    with torch.device("meta"):
        whole = sum(parameter.numel() for parameter in LlamaForCausalLM(BOOST_40B).parameters())
    # layers are the larger part; the ends hold embedding or head beside them
    assert found["held"] == pytest.approx(whole / SIZES.world_size, rel=0.25)
