import functools
import json

import pytest
import torch
import torch.distributed as dist

from lightning_boost.benchmark import block, communication, numerics, statistic, strategy
from lightning_boost.benchmark.blocks import SCHEMES, BlockSizes
from lightning_boost.benchmark.counts import count_block, mlp_intensity, parameters_per_process
from lightning_boost.benchmark.paper import BOOST_7B
from lightning_boost.benchmark.setup import Setup
from lightning_boost.benchmark.timing import Quartiles, ratios
from lightning_boost.cli import main
from lightning_boost.collectives import (
    Label,
    all_gather,
    all_reduce,
    count_collectives,
    reduce_scatter,
    register_group,
)
from tests.models import CPU
from tests.processes import run_processes

TINY = [
    "--sizes.hidden_size=32",
    "--sizes.intermediate_size=48",
    "--sizes.bottleneck_size=8",
    "--sizes.num_attention_heads=4",
    "--sizes.sequence_length=8",
    "--sizes.num_sequences=1",
]


LAUNCHES = {
    "full_rank": (2, 2),
    "vanilla": (7, 4),
    "vanilla_sharded": (6, 6),
    "bottleneck": (4, 4),
    "peers": (7, 7),
    "as it is": (4, 4),
    "as it is, forward": (4, 0),
    "compiled": (4, 4),
    "compiled, forward": (4, 0),
    "grouped": (4, 4),
    "grouped, forward": (4, 0),
    "ungrouped": (7, 7),
    "ungrouped, forward": (7, 0),
}
"""Of a block, forward and backward."""


def test_ratios_are_taken_repetition_by_repetition():
    assert ratios([2.0, 9.0, 4.0], [1.0, 3.0, 1.0]) == Quartiles(2.5, 3.0, 3.5)


def _run(capfd, *options):
    with pytest.raises(SystemExit) as exit_info:
        main(["benchmark", *options])
    assert exit_info.value.code == 0
    return capfd.readouterr().out


def _figures(capfd, *options):
    return json.loads(_run(capfd, *options, "--json").splitlines()[-1])


@pytest.fixture
def warm(monkeypatch):
    """Let benchmarks run in processes that have torch loaded."""

    def run_warm(function, num_processes, *args, device="cpu"):
        return run_processes(function, num_processes, torch.device(device), *args)[0]

    monkeypatch.setattr("lightning_boost.benchmark.setup.run_pinned", run_warm)
    monkeypatch.setattr("lightning_boost.compilation.BACKEND", "aot_eager")
    for module in (numerics, statistic):
        monkeypatch.setattr(module, "run_together", run_warm)


@pytest.mark.parametrize(
    ("what", "candidates", "ratios"),
    [
        ("block", SCHEMES.keys(), {f"{name} / bottleneck" for name in SCHEMES} - {"bottleneck / bottleneck"}),
        ("peers", {"peers", "bottleneck"}, {"peers / bottleneck"}),
        (
            "grouping",
            {"ungrouped", "grouped", "ungrouped, forward", "grouped, forward"},
            {"ungrouped / grouped", "ungrouped, forward / grouped, forward"},
        ),
        (
            "compile",
            {"as it is", "compiled", "as it is, forward", "compiled, forward"},
            {"as it is / compiled", "as it is, forward / compiled, forward"},
        ),
        ("strategy", {"Trainer", "loop"}, {"Trainer / loop"}),
    ],
)
@pytest.mark.usefixtures("warm")
def test_what_is_compared_takes_turns(what, candidates, ratios, capfd):
    found = _figures(capfd, what, "--repetitions=3", *TINY)
    assert found["milliseconds"].keys() == candidates
    assert found["ratios"].keys() == ratios
    for ratio in found["ratios"].values():
        for which in ("wall", "cpu"):
            quartiles = ratio[which]
            assert 0 < quartiles["p25"] <= quartiles["median"] <= quartiles["p75"]
    assert found["sizes"]["processes"] == 2
    if what == "strategy":
        return
    launches = {
        name: tuple(each["launches"] for each in passes.values()) for name, passes in found["collectives"].items()
    }
    assert launches == {name: LAUNCHES[name] for name in candidates}


@pytest.mark.usefixtures("warm")
def test_a_training_step_is_measured_at_every_micro_batch(capfd):
    found = _figures(capfd, "iteration", "--repetitions=2", *TINY)
    assert found["micro-batch"].keys() == {"1", "2", "4", "8"}
    for each in found["micro-batch"].values():
        assert each["milliseconds"].keys() == SCHEMES.keys()
    assert found["micro-batch"]["4"]["ratios"]["vanilla / bottleneck"]["paper"] == pytest.approx(1.64 / 0.72)
    assert found["machine"]["gemm_gflops_per_second"] > 0


@pytest.mark.usefixtures("warm")
def test_recompute_keeps_less_and_its_collectives_are_counted(capfd):
    sizes = [option for option in TINY if "sequences" not in option]
    found = _figures(capfd, "recompute", "--repetitions=2", *sizes, "--sizes.num_sequences=4")
    forms, mib = found["forms"], 2**20
    kept = {name: form["kept_mib"] * mib / 2 / 32 for name, form in forms.items()}
    # of 32 tokens, in values of bf16; a scale in fp32 counts as two
    assert kept["bottleneck, low_rank"] == 7 * 8 + 32 / 2 + 2 * 2
    assert kept["bottleneck, low_rank, sharded"] == 7 * 8 / 2 + 32 / 2 + 2 * 2
    assert kept["bottleneck, block"] == 32 / 2
    assert kept["vanilla, block"] == kept["vanilla_sharded, block"] == 32
    launches = {name: form["collectives"] for name, form in forms.items()}
    assert launches["bottleneck, none"] == launches["bottleneck, low_rank"] == 8
    assert launches["bottleneck, block"] == launches["bottleneck, low_rank, sharded"] == 12
    assert launches["vanilla, block"] == 11 + 7


@pytest.mark.usefixtures("warm")
def test_kinds_are_measured_beside_one_another(capfd):
    shown = _run(capfd, "kinds", "--repetitions=2", *TINY)
    for row in (
        "svd, vanilla / svd, bottleneck",
        "cola, vanilla / cola, bottleneck",
        "lax, bottleneck / svd, bottleneck",
        "2.24",
        "2.28",
        "1.07",
    ):
        assert row in shown


# ---- counts


@functools.cache
def _of_7b():
    return {
        name: count_block(BOOST_7B, candidate, tensor_parallel_size=4, num_tokens=4096)
        for name, candidate in SCHEMES.items()
    }


def test_counts_of_a_7b_block_are_those_of_the_formulas():
    """The paper's: 2D in 2 launches, 5D + 2F in 7 and 3D + F in 4, 7R in 4 and 4."""
    hidden, features, size, tokens, processes = 4096, 11008, 1024, 4096, 4
    counts = _of_7b()
    statistic = 2 * 4 * processes  # twice in forward, three bf16 limbs for each process, padded to eight bytes
    moved = {
        name: [(each.launches, each.values_per_token) for each in passes.values()] for name, passes in counts.items()
    }
    assert moved["full_rank"] == [(2, 2 * hidden)] * 2
    assert moved["vanilla"] == [(7, 5 * hidden + 2 * features), (4, 3 * hidden + features)]
    assert moved["bottleneck"] == [(4, 7 * size + statistic), (4, 7 * size)]
    for passes in counts.values():
        for each in passes.values():
            assert each.bytes == 2 * tokens * each.values_per_token
    dense, low = 4 * hidden**2 + 3 * hidden * features, size * (11 * hidden + 3 * features)
    for name, passes in counts.items():
        multiplied = 2 * tokens * (dense if name == "full_rank" else low) // processes
        assert passes["forward"].gemm_flops == multiplied
        assert passes["backward"].gemm_flops == 2 * multiplied


def test_ratios_of_the_paper_come_out():
    counts = {name: passes["forward"] for name, passes in _of_7b().items()}
    full_rank, bottleneck = counts["full_rank"], counts["bottleneck"]
    assert 7 * 1024 / full_rank.values_per_token == 0.875
    assert counts["vanilla"].values_per_token / full_rank.values_per_token == pytest.approx(5.19, abs=5e-3)
    assert full_rank.gemm_flops / bottleneck.gemm_flops == pytest.approx(2.53, abs=5e-3)
    intensity = {name: mlp_intensity(BOOST_7B, name, 4, 4096) for name in ("full_rank", "vanilla", "bottleneck")}
    assert intensity["vanilla"] / intensity["full_rank"] == pytest.approx(0.2, abs=5e-3)
    assert intensity["bottleneck"] / intensity["vanilla"] == pytest.approx(2.5, abs=0.06)
    parameters = {name: parameters_per_process(BOOST_7B, candidate, 4) for name, candidate in SCHEMES.items()}
    assert 2 * parameters["bottleneck"] / 2**30 == pytest.approx(1.25, abs=5e-3)
    assert parameters["full_rank"] / parameters["bottleneck"] == pytest.approx(2.46, abs=5e-3)


def test_counts_are_shown_beside_the_paper_s(capfd):
    small = ["--config.hidden_size=64", "--config.intermediate_size=172", "--config.num_attention_heads=4"]
    small += ["--config.num_hidden_layers=2", "--config.vocab_size=100", "--config.low_rank.bottleneck_size=16"]
    found = _figures(capfd, "counts", "--tensor_parallel_size=2", "--tokens=128", *small)
    forward = found["schemes"]["vanilla"]["forward"]
    assert forward.keys() == {"launches", "values_per_token", "bytes", "gemm_flops", "saved_values_per_token"}
    assert (forward["launches"], forward["values_per_token"]) == (7, 5 * 64 + 2 * 172)
    assert forward["bytes"] == 2 * 128 * forward["values_per_token"]
    assert found["ratios"]["GEMM FLOPs, full_rank over bottleneck"]["paper"] == 2.53
    shown = _run(capfd, "counts", "--tensor_parallel_size=2", *small)
    assert "values forward, vanilla over full_rank: 5.19 (paper 5.19)" in shown


def test_a_full_rank_model_is_counted_beside_its_low_rank_forms(capfd):
    small = ["--config.hidden_size=64", "--config.intermediate_size=172", "--config.num_attention_heads=4"]
    small += ["--config.num_hidden_layers=2", "--config.vocab_size=100", "--config.low_rank.bottleneck_size=16"]
    found = [_figures(capfd, "counts", *small, f"--config.low_rank.kind={kind}") for kind in ("full_rank", "cola")]
    assert found[0] == found[1]


# ---- communication


@pytest.mark.usefixtures("warm")
def test_a_block_s_collectives_are_timed_alone(capfd):
    found = _figures(capfd, "comm", "--repetitions=2", *TINY)
    hidden, features, size, tokens = 32, 48, 8, 8
    statistic_columns = 2 * 8
    expected = {
        "full_rank, forward": (2, 2 * hidden),
        "vanilla, forward": (7, 5 * hidden + 2 * features),
        "vanilla, backward": (4, 3 * hidden + features),
        "bottleneck, forward": (4, 7 * size + statistic_columns),
        "bottleneck, backward": (4, 7 * size),
    }
    for name, (launches, values) in expected.items():
        assert found["traffic"][name] == {"launches": launches, "values": values * tokens, "bytes": 2 * values * tokens}
    assert found["milliseconds"].keys() == {f"{name}, {pass_}" for name in SCHEMES for pass_ in ("forward", "backward")}
    assert found["ratios"]["vanilla, forward / bottleneck, forward"]["paper"] == pytest.approx(9.87 / 1.86)
    assert list(found["all_reduce"]) == [str(8 * 4**step * 2**10) for step in range(7)]


def _replay():
    group = register_group(dist.group.WORLD)
    calls = communication.CollectiveSequence()
    with count_collectives(calls):
        all_reduce(torch.ones(3), group, Label("qkv", "forward"))
        all_gather(torch.ones(2, 5, dtype=torch.bfloat16), group, Label("o", "forward"))
        reduce_scatter(torch.ones(2, 7), group, Label("down", "forward"))
    with count_collectives() as log:
        calls.replay()
    return [[(key.operation, vars(traffic)) for key, traffic in each.traffic.items()] for each in (calls, log)]


def test_collectives_are_replayed_as_they_were_issued():
    for recorded, replayed in run_processes(_replay, 2):
        assert recorded == replayed
        assert [operation for operation, _ in replayed] == ["all_reduce", "all_gather", "reduce_scatter"]


def test_latency_and_bandwidth_are_those_of_the_line_behind_the_times():
    sent = 2 * 3 / 4  # of a payload, by each of four processes
    seconds = {payload: 5e-5 + sent * payload / 20e9 for payload in communication.PAYLOAD_BYTES}
    assert communication.fit_line(seconds, 4) == pytest.approx((0.05, 20.0))


def test_one_process_has_nothing_to_communicate():
    with pytest.raises(ValueError, match=r"processes \(1\) must be at least 2"):
        communication.measure_communication(Setup(num_processes=1))


# ---- statistic


@pytest.mark.usefixtures("warm")
def test_the_statistic_s_ways_are_counted_and_exact_as_they_should_be(capfd, tmp_path):
    found = _figures(capfd, "statistic", "--tokens=8", "--processes=2", f"--output={tmp_path}")
    assert {path.name for path in tmp_path.iterdir()} == {"statistic.txt", "statistic.json", "statistic.png"}
    assert found["sizes"] == {"tokens": 8, "processes": 2}
    one_process, apart, column, local_first, limbs, wide = found["forms"].values()
    moved = [(each["launches"], each["statistic_bytes_per_token"]) for each in found["forms"].values()]
    # three limbs of each process, padded to eight columns
    assert moved == [(0, 0), (2, 4), (1, 2), (2, 4), (1, 2 * 8), (1, 4)]
    assert one_process["mean_square"] is None
    for exact in (apart, local_first, limbs, wide):
        assert exact["mean_square"] < 6e-7
    assert 1e-3 < column["mean_square"] < 2**-7
    for inputs in ("gaussian", "outliers"):
        assert limbs["output"][inputs] == pytest.approx(apart["output"][inputs], rel=1e-2)
        assert wide["output"][inputs] < limbs["output"][inputs] < local_first["output"][inputs] < 6e-3


# ---- files


def test_a_report_is_written_as_table_figures_and_bars(capfd, tmp_path):
    _run(capfd, "block", "--repetitions=2", *TINY, f"--output={tmp_path / 'charts'}")
    written = {path.name: path for path in (tmp_path / "charts").iterdir()}
    assert written.keys() == {"block.txt", "block.json", "block.png"}
    assert "vanilla / bottleneck" in written["block.txt"].read_text(encoding="utf-8")
    assert json.loads(written["block.json"].read_text(encoding="utf-8"))["sizes"]["hidden_size"] == 32
    assert written["block.png"].read_bytes().startswith(b"\x89PNG")


def test_charts_that_cannot_be_drawn_are_told_before_anything_is_measured(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr("lightning_boost.benchmark.charts.importlib.util.find_spec", lambda _: None)
    with pytest.raises(SystemExit) as exit_info:
        main(["benchmark", "block", f"--output={tmp_path}"])
    assert exit_info.value.code == 2
    assert "output needs matplotlib" in capfd.readouterr().err


def test_a_directory_that_cannot_be_made_is_told_before_anything_is_measured(capfd, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as exit_info:
        main(["benchmark", "block", f"--output={tmp_path / 'file' / 'charts'}"])
    assert exit_info.value.code == 2
    assert "must be a directory, and cannot be made one: Not a directory" in capfd.readouterr().err


@pytest.mark.parametrize("what", ["counts", "memory"])
def test_what_needs_no_peers_is_refused_under_torchrun(what, monkeypatch, capfd):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(SystemExit) as exit_info:
        main(["benchmark", what])
    assert exit_info.value.code == 2
    assert f"benchmark {what} must not be run by torchrun" in capfd.readouterr().err


# ---- numerics


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
    for forms in run_processes(numerics._distances, 2, CPU, torch.bfloat16, 16, 0):
        from_one_process, _ = forms["online"]
        # a few elements may round to the other side
        assert from_one_process == pytest.approx(_bf16_distance_by_hand(16, 2), rel=2e-2)


def test_numerics_in_the_paper_s_set_up():
    """In fp32 held against float64: one process's own error, a sum of 1024, is above the paper's figure on a CPU."""
    for forms in run_processes(numerics._medians, 4, CPU, torch.float32, 2, 5):
        (largest, mean), (_, one_process_mean) = forms["online"][1], forms["one process"][1]
        assert largest < numerics.PAPER["float32"].largest
        assert mean < one_process_mean
    for forms in run_processes(numerics._medians, 4, CPU, torch.bfloat16, 2, 5):
        (largest, from_one_process_mean), (_, mean) = forms["online"]
        assert largest < numerics.PAPER["bfloat16"].largest
        assert from_one_process_mean < numerics.PAPER["bfloat16"].mean
        assert mean < forms["online, statistic in bf16"][1][1]


def test_numerics_are_measured_in_new_processes(capfd):
    found = _figures(capfd, "numerics", "--repetitions=1", "--processes=2")
    assert found["sizes"] == {"tokens": 2, "processes": 2, "draws": 1}
    assert 0 < found["float32"]["online"]["from_one_process"]["largest"] < 2e-6
    assert found["bfloat16"]["paper"]["from_one_process"] == {"largest": 3.1e-2, "mean": 2.2e-3}


@pytest.mark.usefixtures("warm")
def test_numerics_are_shown_beside_the_paper_s(capfd, tmp_path):
    shown = _run(capfd, "numerics", "--repetitions=1", f"--output={tmp_path}")
    assert {path.name for path in tmp_path.glob("*.png")} == {"numerics_1.png", "numerics_2.png"}
    assert "2 tokens, 4 processes; absolute, median of 1 draws" in shown
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert rows[0][:3] == ["float32, one process", "", ""]
    assert rows[2] == ["float32, paper (2 tokens, 4 GPUs)", "7.0e-07", "6.0e-08", "", ""]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes=0"], "processes (0) must be at least 1"),
        (["--processes=3"], "processes (3) must divide the 1024 features"),
        (["--tokens=0"], "tokens (0) must be at least 1"),
        (["--repetitions=0"], "repetitions (0) must be at least 1"),
        (["--sizes.hidden_size=32"], "sizes.hidden_size"),
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
            r"processes \(10000\) must be at most \d+, the cores of this machine",
        ),
        ({"num_processes": 0}, r"processes \(0\) must be at least 1"),
        ({"num_processes": 1, "repetitions": 1}, r"repetitions \(1\) must be at least 2"),
        (
            {"num_processes": 3, "repetitions": 3},
            r"sizes.num_attention_heads \(16\) must be a multiple of processes \(3\); legal numbers of processes: 1, 2",
        ),
        ({"bottleneck_size": 2000}, r"sizes.bottleneck_size \(2000\) must be at most the smaller of sizes.hidden_size"),
        ({"intermediate_size": 0}, r"sizes.intermediate_size \(0\) must be at least 1"),
        ({"sequence_length": 0}, r"sizes.sequence_length \(0\) must be at least 1"),
        ({"dtype": "float16"}, r"sizes.dtype \('float16'\) must be one of bfloat16, float32"),
        (
            {"hidden_size": 100},
            r"sizes.hidden_size \(100\) must be a multiple of twice sizes.num_attention_heads \(16\)",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(options, message):
    how = {name: options[name] for name in ("num_processes", "repetitions") if name in options}
    sizes = {name: value for name, value in options.items() if name not in how}
    with pytest.raises(ValueError, match=message):
        block.measure_block(Setup(sizes=BlockSizes(**sizes), **how))


def test_wrong_sizes_are_told_in_one_sentence(capfd):
    with pytest.raises(SystemExit) as exit_info:
        main(["benchmark", "block", "--sizes.num_attention_heads=3"])
    assert exit_info.value.code == 2
    sentence, hint = capfd.readouterr().err.splitlines()
    assert sentence.startswith(
        "error: sizes.hidden_size (1024) must be a multiple of twice sizes.num_attention_heads (3)"
    )
    assert hint == "All options: python -m lightning_boost benchmark block --help"


def test_torch_s_plan_is_refused_a_bottleneck_that_it_cannot_split():
    with pytest.raises(ValueError, match=r"sizes.bottleneck_size \(7\) must be a multiple of processes \(2\)"):
        block.measure_peers(Setup(sizes=BlockSizes(bottleneck_size=7)))


def test_a_process_of_torchrun_other_than_0_has_no_report(monkeypatch):
    for name in ("setup.run_pinned", "numerics.run_together", "statistic.run_together"):
        monkeypatch.setattr(f"lightning_boost.benchmark.{name}", lambda *_, **__: None)
    assert strategy.measure_strategy(Setup()) is None
    assert block.measure_block(Setup()) is None
    assert numerics.measure_numerics(num_tokens=1, num_processes=2, num_draws=1) is None
    assert statistic.measure_statistic(num_tokens=1, num_processes=2) is None
