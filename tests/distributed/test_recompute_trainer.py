"""Recompute in a Trainer: whole runs end with the very weights of runs without it."""

import contextlib
import functools
import io
import os
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout

from lightning_boost import BoostParallelStrategy, LlamaConfig, LowRankConfig, LowRankLanguageModel
from lightning_boost.callbacks.low_rank_activation_checkpointing import LowRankActivationCheckpointing
from lightning_boost.callbacks.online_rms_norm_verifier import OnlineRMSNormVerifier
from lightning_boost.callbacks.run_summary import RunSummary
from tests.models import whole
from tests.processes import run_processes
from tests.users_module import VOCAB, UsersModule, _Decoder, _Layer, loader, trainer_for


class _Dropping(UsersModule):
    """Drops features behind each MLP, in a layer's own forward."""

    def __init__(self):
        super().__init__()
        for layer in self.net.model.layers:
            layer.mlp.register_forward_hook(lambda module, _, output: dropout(output, 0.2, module.training))


class _NamedLayer(_Layer):
    def forward(self, *, hidden, scale):
        return super().forward(hidden) * scale, None


class _NamedDecoder(_Decoder):
    def forward(self, input_ids):
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden, _ = layer(hidden=hidden, scale=input_ids.float().mean() / VOCAB)
        return self.norm(hidden)


class _Named(UsersModule):
    """Its layers are given everything by name, and return the hidden state in a tuple."""

    def __init__(self):
        super().__init__()
        self.net.model = _NamedDecoder()
        self.net.model.layers = nn.ModuleList([_NamedLayer(), _NamedLayer()])


def _language_model(**changes):
    return LowRankLanguageModel(
        LlamaConfig(
            vocab_size=37,
            hidden_size=32,
            intermediate_size=50,
            num_hidden_layers=2,
            num_attention_heads=4,
            attention_dropout=0.2,
            hidden_dropout=0.2,
            **changes,
        )
    )


def _run(make_module, options, recompute, folder, precision):
    """Train, save, and go on in another Trainer; return the weights, and what is drawn behind it all.

    A ``recompute`` that is no name is the options of the callback, which stands in for the strategy's.
    """
    path = folder / ("plain.ckpt" if recompute == "none" else "recomputed.ckpt")
    torch.manual_seed(5)
    for max_epochs, resumed in ((1, None), (2, path)):
        module = make_module()
        trainer = trainer_for(
            strategy=BoostParallelStrategy(
                **options, **({"recompute": recompute} if isinstance(recompute, str) else {})
            ),
            callbacks=[] if isinstance(recompute, str) else [LowRankActivationCheckpointing(**recompute)],
            max_epochs=max_epochs,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            precision=precision,
        )
        trainer.fit(module, loader(), val_dataloaders=loader(1), ckpt_path=resumed)
        trainer.save_checkpoint(path)
        is_recomputed = any("forward" in vars(each) for each in module.modules())
        assert is_recomputed == (recompute != "none")
    drawn = torch.rand(1).item()
    return {name: whole(parameter).numpy() for name, parameter in module.named_parameters()}, drawn


@pytest.mark.parametrize(
    ("make_module", "processes", "options", "recompute", "precision"),
    [
        (_Dropping, 1, {}, "low_rank", "32-true"),
        (_Dropping, 2, {"tensor_parallel_size": 2}, "block", "32-true"),
        (_Dropping, 4, {"tensor_parallel_size": 2, "data_axis": "shard"}, "low_rank", "32-true"),
        (_language_model, 4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "low_rank", "32-true"),
        (_Dropping, 2, {"tensor_parallel_size": 2}, {"store_latents": "sharded"}, "32-true"),
        (_language_model, 2, {"tensor_parallel_size": 2}, {"every": 0.5, "store_latents": "sharded"}, "32-true"),
        (_Named, 1, {}, "low_rank", "32-true"),
        (_Named, 2, {"tensor_parallel_size": 2}, {"store_latents": "sharded"}, "32-true"),
        (_Named, 1, {}, "block", "bf16-mixed"),
        (_Dropping, 1, {}, "low_rank", "bf16-mixed"),
        (_Dropping, 2, {"tensor_parallel_size": 2}, {"store_latents": "sharded"}, "bf16-mixed"),
    ],
)
def test_a_run_ends_with_the_same_weights(make_module, processes, options, recompute, precision, tmp_path):
    plain = run_processes(_run, processes, make_module, options, "none", tmp_path, precision)
    for (weights, drawn), (others, other_drawn) in zip(
        plain, run_processes(_run, processes, make_module, options, recompute, tmp_path, precision), strict=True
    ):
        assert drawn == other_drawn
        assert weights.keys() == others.keys()
        for name, weight in weights.items():
            assert (weight == others[name]).all(), name


def _verified(recompute, folder):
    """Return the weights of a run whose norms are verified in every step."""
    torch.manual_seed(5)
    module = _language_model()
    trainer_for(
        strategy=BoostParallelStrategy(2, **recompute),
        callbacks=[OnlineRMSNormVerifier(every_n_steps=1)],
        default_root_dir=folder,
    ).fit(module, loader())
    return {name: whole(parameter).numpy() for name, parameter in module.named_parameters()}


def test_the_verifier_s_latents_are_not_taken_for_the_block_s_own(tmp_path):
    """They are computed in the first run only."""
    plain = run_processes(_verified, 2, {}, tmp_path)
    options = {"recompute": "low_rank", "store_latents": "sharded"}
    for weights, others in zip(plain, run_processes(_verified, 2, options, tmp_path), strict=True):
        assert all((weight == others[name]).all() for name, weight in weights.items())


def _with_other_options(first, second):
    module = UsersModule()
    for options in (first, second):
        trainer_for(strategy=BoostParallelStrategy(2, **options), max_epochs=1).fit(module, loader())


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"recompute": "low_rank"}, {}, r"recompute \('none'\) must be 'low_rank': an earlier Trainer"),
        (
            {"recompute": "low_rank", "recompute_every": 2},
            {"recompute": "low_rank"},
            r"recompute_every \(1\) must be 2: an earlier Trainer",
        ),
        (
            {"recompute": "low_rank", "store_latents": "sharded"},
            {"recompute": "low_rank"},
            r"store_latents \('whole'\) must be 'sharded': an earlier Trainer",
        ),
    ],
)
def test_a_second_trainer_must_want_the_same(first, second, message):
    with pytest.raises(RuntimeError, match=message):
        run_processes(_with_other_options, 2, first, second)


def _summarised(options, precision="32-true", **changes):
    os.environ["COLUMNS"] = "160"
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        trainer_for(
            strategy=BoostParallelStrategy(**{"tensor_parallel_size": 2, **options}),
            callbacks=[RunSummary(sample_tokens=0)],
            max_steps=1,
            precision=precision,
        ).fit(_language_model(**changes), loader())
    return output.getvalue()


@pytest.mark.parametrize(
    ("options", "layout", "forward", "backward"),
    [
        ({}, "tensor 2 ", "4 and 72", "4 and 56"),
        (
            {"recompute": "block", "recompute_every": 2},
            "tensor 2; recompute block in every 2. block ",
            "6 and 108",
            "4 and 56",
        ),
        (
            {"recompute": "low_rank", "store_latents": "sharded"},
            "tensor 2; recompute low_rank in every block, latents sharded ",
            "4 and 72",
            "8 and 84",
        ),
        (
            {"recompute": "block", "pipeline_parallel_size": 2, "num_microbatches": 3},
            "tensor 2 × pipeline 2; recompute block in every block ",
            "8 and 144",
            "4 and 56",
        ),
    ],
)
def test_a_summary_names_recompute_and_what_it_moves(options, layout, forward, backward):
    """With R 8 and two blocks: 7R backward, 8 more values for each norm forward, and half of 7R to gather.

    On a pipeline process 0 counts its own one of the blocks.
    """
    text, *others = run_processes(_summarised, 2 * options.get("pipeline_parallel_size", 1), options)
    assert f" {layout}" in text
    assert not any(others)
    for figures in (forward, backward):
        launches, _, values = figures.partition(" and ")
        assert f"{launches} collectives, {values} values per token counted; formula {figures}" in text


def _figures(text, pass_):
    (line,) = [line for line in text.splitlines() if f" {pass_}, a block" in line]
    return re.search(r"([\d.]+) collectives, (\d+) values per token counted; formula ([\d.]+) and (\d+)", line).groups()


def test_a_summary_of_a_pipeline_is_of_the_blocks_that_stand_there():
    options = {"pipeline_parallel_size": 2, "num_microbatches": 3}
    text, *_ = run_processes(_summarised, 4, options)
    assert _figures(text, "forward") == ("4", "72", "4", "72")
    assert _figures(text, "backward") == ("4", "56", "4", "56")


def test_a_summary_knows_in_which_dtype_a_statistic_travels():
    dense = LowRankConfig(other_bottleneck_sizes={"q_proj": "dense"})
    text, *_ = run_processes(
        functools.partial(_summarised, {"tensor_parallel_size": 4}, "bf16-mixed", low_rank=dense), 4
    )
    for pass_ in ("forward", "backward"):
        launches, values, *formula = _figures(text, pass_)
        assert [launches, values] == formula
