from pathlib import Path

import pytest
import tokenizers

from lightning_boost import cli
from lightning_boost.cli import main

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


def _error(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model.config.low_rank.bottleneck_sise", "3"), "Did you mean 'model.config.low_rank.bottleneck_size'?"),
        (("--model.learning_rat", "3"), "Did you mean 'model.learning_rate'?"),
        (
            ("--trainer.strategy", "BoostParallelStrategy", "--trainer.strategy.tensor_parallel_siz", "2"),
            "Did you mean 'tensor_parallel_size'?",
        ),
        (("--model.config.num_attention_heads", "7"), "error: num_attention_heads (7) must divide hidden_size (256)"),
        (
            ("--trainer.strategy", "BoostParallelStrategy", "--trainer.strategy.tensor_parallel_size", "3"),
            "error: tensor_parallel_size (3) must divide the number of processes (2",
        ),
        (("--model.config.vocab_size", "200"), "error: model.config.vocab_size (200) must be at least the tokenizer's"),
        (("--ckpt_path", "nowhere.ckpt"), "error: ckpt_path (nowhere.ckpt) does not exist."),
        (("--data.train_files", "missing.txt"), "error: text file missing.txt does not exist."),
        (
            ("--data.train_streams", '[{"dataset": "json", "data_files": ["missing.jsonl"]}]'),
            "error: data_files (missing.jsonl) of dataset json does not exist.",
        ),
        (
            ("--data.validation_streams", '[{"dataset": "text"}]'),
            "error: data_files (None) of dataset text must name its files.",
        ),
        (
            ("--data.train_streams", '[{"dataset": "c4"}]', "--trainer.max_steps", "-1"),
            "error: trainer.max_steps (-1) must be given with train_streams",
        ),
        (("--trainer.precision", "16-true"), "error: precision ('16-true') must be one of"),
    ],
)
def test_wrong_options_are_told_in_one_sentence(capsys, arguments, message):
    error = _error(capsys, "fit", "--config", str(QUICKSTART), *arguments)
    assert message in error
    assert "Traceback" not in error
    assert "usage:" not in error


@pytest.mark.parametrize(
    ("callback", "options", "message"),
    [
        (
            "communication_profiler.CommunicationProfiler",
            "every_n_steps: 0",
            "every_n_steps (0) must be a whole number",
        ),
        ("communication_profiler.CommunicationProfiler", "traced_step: 1", "Did you mean 'traced_steps'?"),
        ("online_rms_norm_verifier.OnlineRMSNormVerifier", "tolerance: -1", "tolerance (-1.0) must be above 0"),
        ("token_throughput.TokenThroughput", "peak_flops: 0", "peak_flops (0.0) must be above 0"),
        ("run_summary.RunSummary", "sample_tokens: -1", "sample_tokens (-1) must be at least 0"),
        ("RunSumary", "", "callbacks.RunSumary cannot be used: module 'lightning_boost.callbacks' has no attribute"),
    ],
)
def test_wrong_options_of_a_callback_are_told_without_what_else_a_callback_may_be(
    callback, options, message, capsys, tmp_path
):
    file = tmp_path / "wrong.yaml"
    entry = f"{{class_path: lightning_boost.callbacks.{callback}, init_args: {{{options}}}}}"
    file.write_text(f"trainer: {{callbacks+: [{entry}]}}\n")
    lines = _error(capsys, "fit", "--config", str(QUICKSTART), "--config", str(file)).splitlines()
    *_, error, way_out = lines
    assert error.startswith("error: ")
    assert message in error
    assert "valid subclass" not in error
    assert way_out.startswith("All options: ")


def test_a_line_that_cannot_be_read_is_told_before_any_process_starts(capsys, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "answer": ""}\n')
    for options, message in (
        ((), f'error: line 1 of {file} must be an object with a "text"'),
        (
            ("--data.records=prompt_answer", "--data.packing=one_document"),
            f"error: line 1 of {file} has an empty answer",
        ),
    ):
        error = _error(capsys, "fit", "--config", str(QUICKSTART), f"--data.train_files={file}", *options)
        assert message in error
        assert "Traceback" not in error


def test_the_path_of_a_vocabulary_is_a_path_and_no_configuration(capsys, tmp_path):
    file = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<end>": 1}, unk_token="a")).save(str(file))
    (tmp_path / "recipe.yaml").write_text(f"data: {{tokenizer: {file}}}")
    for options in (("--data.tokenizer", str(file)), ("--config", str(tmp_path / "recipe.yaml"))):
        error = _error(capsys, "fit", "--config", str(QUICKSTART), *options)
        assert f"error: tokenizer file {file} has none of </s>" in error


def test_a_misspelt_key_in_a_file_is_told_with_the_nearest(capsys, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(QUICKSTART.read_text().replace("bottleneck_size:", "bottleneck_sise:"))
    assert "Did you mean 'model.config.low_rank.bottleneck_size'?" in _error(capsys, "fit", "--config", str(recipe))


def test_a_wrong_value_of_a_command_is_told_in_one_sentence(capsys):
    assert "error: steps (0) must be at least 1" in _error(capsys, "parity", "--steps", "0")


def test_a_wrong_option_of_a_command_is_told_with_the_nearest(capsys):
    assert "Did you mean 'kind'?" in _error(capsys, "parity", "--kin", "svd")


def test_a_checkpoint_that_was_being_replaced_is_there_under_its_name(tmp_path):
    (tmp_path / "a.replaced.ckpt").mkdir()
    assert cli._is_there(tmp_path / "a.ckpt")
    assert not cli._is_there(tmp_path / "b.ckpt")
