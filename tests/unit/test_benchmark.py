import json

import pytest

from lightning_boost.benchmark.block import BlockSizes, measure_block
from lightning_boost.benchmark.timing import Quartiles, ratios
from lightning_boost.cli import main

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
