"""``benchmark kernels``: bytes by signature, the loss's buffers, and what a user reads."""

import json

import pytest
import torch

from lightning_boost import compilation
from lightning_boost.benchmark import kernel_times
from lightning_boost.benchmark.element_wise import ElementWise, element_wise_bytes, moved_bytes
from lightning_boost.benchmark.kernels import loss_buffers, measure_kernels, share_of
from lightning_boost.benchmark.paper import BOOST_7B
from lightning_boost.commands.benchmark import kernels
from lightning_boost.config import LlamaConfig, LowRankConfig
from lightning_boost.kernels.cases import Sizes, cases
from lightning_boost.kernels.operators import FAKES

CONFIG = LlamaConfig(
    vocab_size=100,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=1,
    num_attention_heads=8,
    low_rank=LowRankConfig(kind="cola", bottleneck_size=32),
)


def _counted(run, *args):
    with ElementWise(is_fused=False) as counted:
        run(*args)
    return counted.bytes


def test_an_operator_reads_its_arguments_and_writes_its_results():
    a, b = torch.ones(3, 4), torch.ones(3, 4)
    assert _counted(torch.add, a, b) == 3 * 48
    assert _counted(a.add_, b) == 3 * 48
    assert _counted(a.bfloat16) == 48 + 24
    assert _counted(a.copy_, b) == 2 * 48
    assert _counted(a.zero_) == 48
    assert _counted(torch.mul, a, torch.ones(4).expand(3, 4)) == 2 * 48 + 16


def test_products_views_and_what_writes_nothing_move_nothing():
    a = torch.ones(4, 4)
    assert _counted(torch.mm, a, a) == 0
    assert _counted(a.t) == 0
    assert _counted(a.view, 2, 8) == 0
    assert _counted(torch.empty_like, a) == 0


def test_signatures_of_kernels():
    """In values of bf16, but for scales and sums in fp32."""
    sizes = Sizes(rows=64, tokens=32, hidden=16, latents=24, gated=20, heads=2, head_size=8, vocabulary=50, processes=2)
    expected = {
        "norm_input": 2 * 64 * 16 + 16 + 2 * 64 * 8,
        "norm_input_backward": 64 * (16 + 16 + 2) + 16 + 64 * (16 + 16) + 16,
        "norm_latent silu": 64 * (24 + 8) + 64 * (24 + 24 + 2),
        "norm_latent_backward silu": 64 * (24 + 24 + 2) + 64 * (24 + 2),
        "activate silu": 2 * 64 * 24,
        "gated_activation silu": 3 * 64 * 20,
        "gated_activation_backward silu": 5 * 64 * 20,
        "rotary": 2 * 64 * 16 + 2 * 32 * 8,
        "cross_entropy_parts": 1024 * 50 + 1024 * 4 + 2 * 3 * 1024,
        "cross_entropy_gradient": 2 * 1024 * 50 + 1024 * 4 + 2 * 6 * 1024,
    }
    found = {}
    for case in cases(sizes, torch.bfloat16, torch.device("meta"), ("silu",)):
        operator = getattr(torch.ops.lightning_boost, case.function).default
        found[case.name] = moved_bytes(operator, case.args, {}, FAKES[operator](*case.args)) // 2
    assert {name: found[name] for name in expected} == expected


def test_fused_passes_move_at_most_half():
    plain, fused = (
        element_wise_bytes(CONFIG, tensor_parallel_size=4, num_tokens=4096, is_fused=is_fused)
        for is_fused in (False, True)
    )
    for pass_ in ("forward", "backward"):
        assert 2 * fused[pass_] <= plain[pass_]


def test_the_losss_logits_take_a_tenth_of_a_gibibyte():
    """With a vocabulary of 32,000 over four processes; of how many tokens does not matter."""
    plain, fused = (loss_buffers(BOOST_7B, 4, 4096, is_fused=is_fused) for is_fused in (False, True))
    hidden_gradient = 4096 * 4096 * 2
    for buffers in (plain, fused):
        assert buffers["logits"] < 0.1 * 2**30
        assert buffers["hidden gradient"] == hidden_gradient
    # a chunk's logits in bf16 are all that a kernel needs; a row's few numbers beside
    chunk = 1024 * 8000 * 2
    assert chunk < fused["logits"] < 2.1 * chunk
    assert plain["logits"] > 3 * chunk


def test_what_a_user_reads(capsys, tmp_path):
    assert kernels(config=CONFIG, tokens=64, sequence_length=32, json=True, output=str(tmp_path)) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["times"] is None
    assert set(figures["element_wise_bytes"]) == {"plain", "fused"}
    assert figures["kernels"]["rotary"]["bytes"] > 0
    assert {path.suffix for path in tmp_path.iterdir()} >= {".json", ".png"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": 65, "sequence_length": 32}, r"tokens \(65\) must be a multiple of the sequence length \(32\)"),
        ({"device": "cuda"}, r"device \('cuda'\) needs a GPU"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size"),
        ({"sequence_length": 0}, "sequence_length"),
        ({"repetitions": 1, "device": "cuda"}, "needs a GPU|repetitions"),
    ],
)
def test_wrong_options_are_told(wrong, message):
    with pytest.raises(ValueError, match=message):
        kernels(**({"config": CONFIG, "tokens": 64, "sequence_length": 32} | wrong))


def test_measuring_needs_no_gpu():
    report = measure_kernels(CONFIG, tensor_parallel_size=2, num_tokens=64, sequence_length=32)
    assert report.headings[:2] == ["", "MiB"]
    assert len(report.rows) == 15


@pytest.mark.slow
def test_what_is_timed_on_a_gpu_by_a_made_up_clock(monkeypatch):
    """Every candidate runs; what it is by the clock is made up: half a second each, but a copy of two seconds."""

    def clock(candidates, repetitions):
        for run in candidates.values():
            run()
        return {name: [2.0 if name == "copy" else 0.5] * repetitions for name in candidates}

    monkeypatch.setattr(kernel_times, "time_on_gpu", clock)
    monkeypatch.setattr(kernel_times, "_COPIED_BYTES", 1024)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    times = kernel_times.time_cases(share_of(CONFIG, 2, 64, 32), 2, torch.device("cpu"))
    assert times.copy_gb_per_second == pytest.approx(1024e-9)
    assert times.fused["rotary"] == 0.5e6
    # beside a copy of as many bytes
    assert times.cells(times, "rotary")[-1] == "400%"
    # q and k of the whole model's heads on two processes, read and written, and two tables
    moved = 2 * (2 * 64 * 64 + 2 * 32 * 16)
    assert times.gb_per_second["rotary"] == pytest.approx(moved / 0.5 / 1e9)
    blocks = kernel_times.time_block(CONFIG, 2, 64, 32, 2, torch.device("cpu"))
    assert set(blocks.milliseconds) == {"fused", "plain", "fused compiled", "plain compiled", "full_rank"}
    assert list(blocks.in_words())[1].startswith("over fused: plain 1.00")
