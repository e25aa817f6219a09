"""A model that starts on the meta device: no process ever holds more than its share and a little."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_boost.config import LlamaConfig, LowRankConfig
from lightning_boost.layout import find_decoder
from lightning_boost.mesh import ParallelSizes, build_mesh
from lightning_boost.model import initialization
from lightning_boost.parallelize import parallelize
from tests.models import CPU, meta_model, one_process_model, parallel_model, small_config, whole
from tests.processes import run_processes

# the proportions of cola_7b, at an eighth of its width
SEVEN_B_SHAPED = LlamaConfig(
    vocab_size=32000,
    hidden_size=512,
    intermediate_size=1376,
    num_hidden_layers=32,
    num_attention_heads=32,
    low_rank=LowRankConfig(bottleneck_size=128),
)


def status(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _peak():
    model = meta_model(SEVEN_B_SHAPED)
    mesh = build_mesh(ParallelSizes(tensor_parallel_size=dist.get_world_size()), "cpu")
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    parallelize(find_decoder(model), mesh, device=CPU, seed=0)
    share = sum(parameter.to_local().numel() * 4 for parameter in model.parameters())
    return (status("VmHWM") - before) / share


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from /proc")
def test_a_process_peaks_below_a_fifth_above_its_share(monkeypatch):
    # blocks an eighth as wide too
    monkeypatch.setattr(initialization, "BLOCK_ELEMENTS", initialization.BLOCK_ELEMENTS // 64)
    for peak in run_processes(_peak, 4):
        assert peak < 1.2


def _weights_by_blocks():
    config = small_config()
    model, reference = parallel_model(config, dist.get_world_size()), one_process_model(config)
    return all(torch.equal(whole(weight), reference.get_parameter(name)) for name, weight in model.named_parameters())


@pytest.mark.parametrize("size", [2, 4])
def test_values_do_not_depend_on_the_share_that_is_drawn(monkeypatch, size):
    monkeypatch.setattr(initialization, "BLOCK_ELEMENTS", 300)
    assert all(run_processes(_weights_by_blocks, size))
