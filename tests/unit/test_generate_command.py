"""``generate``: the model's own text, whatever its format and on however many processes."""

import contextlib
import io
import json
import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lightning_boost.cli import main
from lightning_boost.interchange.source import open_model
from lightning_boost.model.generation import generate
from lightning_boost.model.initialization import initialize
from lightning_boost.model.llama import LlamaForCausalLM
from tests.checkpoints import CHECKPOINTS, DATA
from tests.processes import run_processes

PROMPT = "abc"
BYTES = ["--prompt", PROMPT, "--tokenizer", "bytes"]


def _said(*arguments):
    """Run the command in this process; return its exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(["generate", *map(str, arguments)])
    return ended.value.code, out.getvalue(), err.getvalue()


def _expected(name, num_tokens):
    source = open_model(DATA / name)
    with torch.device("meta"):
        model = LlamaForCausalLM(source.config, values=source.values)
    initialize(model)
    tokens = generate(model.eval(), torch.tensor([list(PROMPT.encode())]), num_tokens)
    return bytes(int(token) for token in tokens).decode(errors="replace")


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_it_writes_what_the_model_takes_for_most_likely(name):
    ((code, out, err),) = run_processes(_said, 1, DATA / name, *BYTES, "--num_tokens", 12)
    assert code == 0, err
    assert out == _expected(name, 12) + "\n"


def test_processes_that_share_layers_write_once():
    """Also with draws, which are the same on all."""
    arguments = [DATA / "asvd_mixed_gqa", *BYTES, "--num_tokens", 12]
    drawn = ["--temperature", 0.7, "--top_p", 0.9, "--seed", 3]
    ((_, alone, _),) = run_processes(_said, 1, *arguments, *drawn)
    (code, out, err), (other_code, other_out, _) = run_processes(
        _said, 2, *arguments, *drawn, "--tensor_parallel_size", 2
    )
    assert (code, other_code) == (0, 0), err
    assert (out, other_out) == (alone, "")
    assert alone != _expected("asvd_mixed_gqa", 12) + "\n"


def test_json_is_alone_on_standard_output():
    ((_, out, err),) = run_processes(_said, 1, DATA / "cola_latent_only", *BYTES, "--num_tokens", 5, "--json")
    result = json.loads(out)
    assert result["text"] == _expected("cola_latent_only", 5)
    assert result["text"] in err
    assert (result["prompt"], result["num_tokens"]) == (PROMPT, 5)
    assert result["tokens_per_second"] > 0


def test_a_space_between_prompt_and_text_is_kept(tmp_path):
    """A SentencePiece-like vocabulary drops the space before a text's first word, and only there."""
    vocabulary = Tokenizer(models.WordLevel({**{f"▁w{index}": index for index in range(127)}, "</s>": 127}))
    vocabulary.pre_tokenizer, vocabulary.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    vocabulary.save(str(tmp_path / "tokenizer.json"))
    arguments = ["--prompt", "w1 w2", "--tokenizer", tmp_path / "tokenizer.json", "--num_tokens", 3]
    ((code, out, err),) = run_processes(_said, 1, DATA / "cola_latent_only", *arguments)
    assert code == 0, err
    assert re.fullmatch(r"( w\d+){3}\n", out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([DATA / "cola_latent_only", "--prompt", "a"], "tokenizer must be given: there is no"),
        ([DATA / "cola_latent_only", *BYTES, "--num_tokens", 0], "num_tokens (0) must be at least 1"),
        ([DATA / "cola_latent_only", *BYTES, "--temperature", -1], "temperature (-1.0) must be at least 0"),
        ([DATA / "cola_latent_only", "--prompt", "", "--tokenizer", "bytes"], "prompt must hold at least one token"),
        ([DATA / "cola_latent_only", "--prompt", "é", "--tokenizer", "bytes"], "the model's vocab_size is 128"),
        ([DATA / "nowhere", *BYTES], "nowhere"),
    ],
)
def test_wrong_input_is_told_in_a_sentence(arguments, message):
    code, out, err = _said(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
