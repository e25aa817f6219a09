"""What a process holds of a model that is trained, counted beside formulas and beside what is followed."""

import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lightning_boost.benchmark import memory
from lightning_boost.benchmark.blocks import SCHEMES
from lightning_boost.benchmark.counts import parameters_per_process, processes_that_do_nothing
from lightning_boost.benchmark.live_memory import LiveMemory
from lightning_boost.cli import main
from lightning_boost.collectives import register_group
from lightning_boost.config import LlamaConfig, LowRankConfig

SMALL = LlamaConfig(
    vocab_size=100,
    hidden_size=64,
    intermediate_size=172,
    num_hidden_layers=3,
    num_attention_heads=4,
    tie_word_embeddings=True,
    low_rank=LowRankConfig(kind="cola", bottleneck_size=16),
)
TOKENS = 5 * 1024
BOTTLENECK = {name: way for name, way in memory.WAYS.items() if way.candidate == SCHEMES["bottleneck"]}


def test_every_scheme_is_counted_and_recompute_too():
    assert memory.WAYS.keys() == {*SCHEMES, "bottleneck, recompute low_rank", "bottleneck, recompute block"}


def test_memory_is_that_of_shares_moments_and_what_blocks_keep():
    found = memory.count_memory(SMALL, BOTTLENECK, tensor_parallel_size=2, num_tokens=TOKENS)
    parameters = parameters_per_process(SMALL, SCHEMES["bottleneck"], 2)
    scales = 4  # two fp32 numbers of a token, in values of bf16
    plain = found["bottleneck"]
    assert plain.run_again == 0
    for kind, values in {"low_rank": 7 * 16 + 64 // 2 + scales, "block": 64 // 2}.items():
        each = found[f"bottleneck, recompute {kind}"]
        assert each.activations == 2 * values * 3 * TOKENS
        assert each.run_again == plain.activations / 3
        assert each.ends == plain.ends
        assert (each.weights, each.gradients, each.optimizer) == (2 * parameters, 2 * parameters, 4 * parameters)
        assert each.total == 8 * parameters + each.activations + each.run_again + each.ends


@pytest.mark.parametrize("scheme", ["full_rank", "bottleneck"])
def test_what_the_ends_hold_is_extended_to_what_is_followed(scheme):
    # logits outweigh the hidden state, and so does what of them there is at a time whatever the tokens
    config = replace(SMALL, vocab_size=4000)
    with processes_that_do_nothing(2):
        model = memory._ends_of(config, SCHEMES[scheme])
        peaks, half = memory._peaks(model, TOKENS), memory._peaks(model, TOKENS // 2)
        token_ids, kept = torch.zeros(1, TOKENS, dtype=torch.int64), []
        # as the first layer would
        model.model.embed_tokens.register_forward_hook(lambda _, __, embedded: kept.append(embedded))
        with LiveMemory() as whole_model:
            model(token_ids, labels=token_ids)
    extended = memory.count_ends(config, SCHEMES[scheme], tensor_parallel_size=2, num_tokens=TOKENS)
    assert extended == pytest.approx(max(peaks), rel=1e-4)
    rotary_tables = 2 * 2 * TOKENS * 64 // 4  # alive until the final norm has ended
    assert whole_model.peak == pytest.approx(max(peaks[0] + rotary_tables, peaks[1]), rel=1e-3)
    # what the loss holds in backward whatever the tokens: the head's gradient that forward has made, but not the one
    # that is the parameter's
    assert 2 * half[2] - peaks[2] == pytest.approx(2 * 2000 * 64, rel=1e-2)


def test_what_an_operator_makes_inside_is_followed():
    x, gamma, factor = torch.zeros(5, 4), torch.ones(4), torch.zeros(3, 4)
    with processes_that_do_nothing(2):
        group = register_group(dist.group.WORLD)
        with LiveMemory() as live:
            z, rho = torch.ops.lightning_boost.norm_project_reduce(x, gamma, [factor], 1e-6, 8, group, "qkv")
    reduced = 4 * 5 * (3 + 8)  # latents and the statistic's columns
    assert live.bytes == z.nbytes + rho.nbytes
    assert live.peak >= live.bytes + reduced


def test_what_another_thread_still_holds_is_waited_for():
    held = []
    let_go = threading.Timer(0.05, held.clear)
    with LiveMemory() as live:
        held.append(torch.zeros(10))
        kept = torch.zeros(3)
    let_go.start()
    assert live.bytes == 4 * 13
    assert live.settled() == kept.nbytes
    let_go.join()


def test_memory_is_shown_and_beside_the_paper_s_where_that_is_the_same_model(capfd, monkeypatch):
    monkeypatch.setattr(memory, "WAYS", BOTTLENECK)
    small = ["--config.hidden_size=64", "--config.intermediate_size=172", "--config.num_attention_heads=4"]
    small += ["--config.num_hidden_layers=3", "--config.vocab_size=100", "--config.low_rank.bottleneck_size=16"]
    with pytest.raises(SystemExit) as exit_info:
        main(["benchmark", "memory", *small])
    assert exit_info.value.code == 0
    shown = capfd.readouterr().out
    assert "bottleneck, recompute low_rank" in shown
    assert "paper" not in shown
    monkeypatch.setattr(memory, "BOOST_7B", SMALL)
    report = memory.measure_memory(SMALL, tensor_parallel_size=4, num_tokens=4 * 4096)
    assert report.rows[-1] == ["bottleneck, paper", "1.25", "1.25", "2.50", "22.14", "", "", "27.14"]
    assert report.figures["gib"]["bottleneck"].keys() == {*memory.Memory.__dataclass_fields__, "total"}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--tokens=0", "tokens (0) must be at least 1"),
        ("--tensor_parallel_size=0", "tensor_parallel_size (0) must be at least 1"),
        ("--tensor_parallel_size=-2", "tensor_parallel_size (-2) must be at least 1"),
        ("--tensor_parallel_size=5", "legal sizes: 1, 2, 4"),
    ],
)
def test_what_cannot_be_counted_is_refused(option, message, capfd):
    with pytest.raises(SystemExit) as exit_info:
        main(["benchmark", "memory", option])
    assert exit_info.value.code == 2
    assert message in capfd.readouterr().err
