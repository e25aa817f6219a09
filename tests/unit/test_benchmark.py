import json

import pytest
import torch

from lightning_boost.benchmark import numerics
from lightning_boost.benchmark.block import BlockSizes, measure_block
from lightning_boost.benchmark.timing import Quartiles, ratios
from lightning_boost.cli import main
from lightning_boost.commands import benchmark
from tests.processes import run_processes

TINY = [
    "--sizes.hidden_size=32",
    "--sizes.intermediate_size=48",
    "--sizes.bottleneck_size=8",
    "--sizes.num_attention_heads=4",
    "--sizes.sequence_length=8",
    "--sizes.num_sequences=1",
]


def test_ratios_are_taken_repetition_by_repetition():
    assert ratios([2.0, 9.0, 4.0], [1.0, 3.0, 1.0]) == Quartiles(2.5, 3.0, 3.5)


def test_the_block_is_measured_under_every_scheme(capfd):
    with pytest.raises(SystemExit) as exit_info:
        main(["benchmark", "block", "--repetitions=3", *TINY, "--json"])
    assert exit_info.value.code == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    quartiles = found["full_rank_over_bottleneck"]
    assert 0 < quartiles["p25"] <= quartiles["median"] <= quartiles["p75"]
    assert found["milliseconds"].keys() == {"full_rank", "bottleneck"}
    assert found["machine"]["gemm_gflops_per_second"] > 0
    assert found["sizes"]["processes"] == 2


def test_the_strategy_is_measured_beside_a_loop(capfd):
    with pytest.raises(SystemExit) as exit_info:
        main(["benchmark", "strategy", "--repetitions=3", *TINY, "--json"])
    assert exit_info.value.code == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    quartiles = found["trainer_over_loop"]
    assert 0 < quartiles["p25"] <= quartiles["median"] <= quartiles["p75"]
    assert found["milliseconds"].keys() == {"trainer", "loop"}


def _bf16_distance_by_hand(num_tokens, num_processes):
    """What the processes' shares give, rounded where online RMSNorm rounds, beside one process; of the first draw."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, 1024, generator=generator).bfloat16()
    weight = (0.02 * torch.randn(1024, 1024, generator=generator)).bfloat16()
    rho = 1 / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    shares = zip(x.chunk(num_processes, 1), weight.chunk(num_processes, 1), strict=True)
    online = (sum(part @ factor.t() for part, factor in shares).double() * rho).bfloat16()
    one_process = (x.double() * rho).bfloat16() @ weight.t()
    difference = (online.double() - one_process.double()).abs()
    return difference.max().item(), difference.mean().item()


def test_numerics_are_those_of_a_computation_by_hand():
    for forms in run_processes(numerics._distances, 2, torch.bfloat16, 16, 0):
        from_one_process, _ = forms["online"]
        # a few elements may round to the other side
        assert from_one_process == pytest.approx(_bf16_distance_by_hand(16, 2), rel=2e-2)


def test_numerics_in_the_paper_s_set_up():
    """In fp32 held against float64: one process's own error, a sum of 1024, is above the paper's figure on a CPU."""
    for forms in run_processes(numerics._medians, 4, torch.float32, 2, 5):
        (largest, mean), (_, one_process_mean) = forms["online"][1], forms["one process"][1]
        assert largest < numerics.PAPER["float32"].largest
        assert mean < one_process_mean
    for forms in run_processes(numerics._medians, 4, torch.bfloat16, 2, 5):
        (largest, from_one_process_mean), (_, mean) = forms["online"]
        assert largest < numerics.PAPER["bfloat16"].largest
        assert from_one_process_mean < numerics.PAPER["bfloat16"].mean
        assert mean < forms["online, statistic in bf16"][1][1]


def _run_numerics(capfd, *options):
    with pytest.raises(SystemExit) as exit_info:
        main(["benchmark", "numerics", *options])
    assert exit_info.value.code == 0
    return capfd.readouterr().out


def test_numerics_are_measured_in_new_processes(capfd):
    found = json.loads(_run_numerics(capfd, "--repetitions=1", "--processes=2", "--json").splitlines()[-1])
    assert found["sizes"] == {"tokens": 2, "processes": 2, "draws": 1}
    assert 0 < found["float32"]["online"]["from_one_process"]["largest"] < 2e-6
    assert found["bfloat16"]["paper"]["from_one_process"] == {"largest": 3.1e-2, "mean": 2.2e-3}


def test_numerics_are_shown_beside_the_paper_s(capfd, monkeypatch):
    exactness = numerics.Exactness(numerics.Distance(1.2e-6, 2e-7), numerics.Distance(3e-7, 4e-8))
    asked = {}
    found = {dtype: {"one process": exactness, "online": exactness} for dtype in numerics.PAPER}
    monkeypatch.setattr(benchmark, "measure_numerics", lambda **given: asked.update(given) or found)
    shown = _run_numerics(capfd)
    assert asked == {"num_tokens": 2, "num_processes": 4, "num_draws": 15}
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert rows[:3] == [
        ["float32, one process", "", "", "3.0e-07", "4.0e-08"],
        ["float32, online", "1.2e-06", "2.0e-07", "3.0e-07", "4.0e-08"],
        ["float32, paper (2 tokens, 4 GPUs)", "7.0e-07", "6.0e-08", "", ""],
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes=0"], "processes (0) must be at least 1"),
        (["--processes=3"], "processes (3) must divide the 1024 features"),
        (["--tokens=0"], "tokens (0) must be at least 1"),
        (["--repetitions=0"], "repetitions (0) must be at least 1"),
        (["--sizes.hidden_size=32"], "sizes are those of a block"),
    ],
)
def test_numerics_that_cannot_be_measured_are_refused(options, message, capfd):
    with pytest.raises(SystemExit) as exit_info:
        main(["benchmark", "numerics", *options])
    assert exit_info.value.code == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_processes": 10_000, "hidden_size": 20_000, "num_attention_heads": 10_000},
            "10000 processes need a core each",
        ),
        ({"num_processes": 1, "repetitions": 1}, r"repetitions \(1\) must be at least 2"),
        (
            {"num_processes": 3, "repetitions": 3},
            r"num_attention_heads \(16\) must be a multiple of .* legal sizes: 1, 2",
        ),
        ({"sequence_length": 0}, r"sizes.sequence_length \(0\) must be at least 1"),
        ({"dtype": "float16"}, r"sizes.dtype \('float16'\) must be one of bfloat16, float32"),
        ({"hidden_size": 100}, r"num_attention_heads \(16\) must divide hidden_size \(100\)"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, message):
    how = {"num_processes": 2, "repetitions": 3}
    sizes = {name: value for name, value in options.items() if name not in how}
    with pytest.raises(ValueError, match=message):
        measure_block(BlockSizes(**sizes), **{**how, **{name: options[name] for name in how if name in options}})
