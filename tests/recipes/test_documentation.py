"""The documentation says what is so: links lead somewhere, commands parse, code blocks run.

A check is a function from a page to its findings. Each is run over every page, and over planted text that it must find
something in.
"""

import functools
import importlib.util
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_boost import DecoderLayout, LlamaConfig, LowRankConfig, LowRankLinear, cli
from lightning_boost.cost import layer_traffic
from lightning_boost.layout import find_decoder
from lightning_boost.model.norm import RMSNorm
from tests.processes import run_processes

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
EXAMPLE = ROOT / "examples" / "own_model.py"
HUGGING_FACE = ROOT / "examples" / "hugging_face.py"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FIRST_SCREEN = 60

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FORBIDDEN = re.compile(
    r"pip3? install lightning[-_]boost"  # another project's name
    r"|/(?:tmp|home|root|Users)/"  # somebody's machine
    r"|(?<![\w-])(?<!low )(?<!full )[Rr]ank(?![\w-])(?!\*\*)"  # two meanings; the glossary explains it
    r"|TODO|@@"
)


def page_id(page):
    return str(page.relative_to(ROOT))


def _code_of(text):
    """Blocks fenced or indented, without their indentation."""
    indented = re.findall(r"(?:^    .*\n)+", FENCED.sub("", text), re.MULTILINE)
    return [body for _, body in FENCED.findall(text)] + [re.sub(r"^    ", "", block, flags=re.M) for block in indented]


def _prose_of(text):
    return re.sub(r"``.+?``|`[^`\n]*`", "", re.sub(r"^    .*$", "", FENCED.sub("", text), flags=re.MULTILINE))


def _blocks(page, language):
    return [body for found, body in FENCED.findall(page.read_text()) if found == language]


def _python_blocks(page):
    return _blocks(page, "python")


# ---- links


def _anchors(text):
    """Give the anchors that GitHub makes of a page's headings."""
    headings = HEADING.findall(FENCED.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(text, folder):
    """Relative links that lead to no file, or to a heading that is not there. Code is looked at no more than prose."""
    # the text of a link may be code, so only blocks are left out
    targets = LINK.findall(re.sub(r"^    .*$", "", FENCED.sub("", text), flags=re.MULTILINE))
    findings = []
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (folder / name).resolve() if name else None
        if path is not None and not path.exists():
            findings.append(f"{target}: no such file")
        elif anchor and anchor not in _anchors(text if path is None else path.read_text()):
            findings.append(f"{target}: no such heading")
    return findings


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    assert broken_links(page.read_text(), page.parent) == []


@pytest.mark.parametrize(
    "text",
    ["[a](nothing.md)", "[`a`](docs/nothing)", "# B\n[a](#c)", "[a](CONTRIBUTING.md#nowhere)", "x [a](../README.md)"],
)
def test_broken_links_are_found(text):
    assert broken_links(text, ROOT)


def test_every_page_can_be_reached_from_the_readme():
    reached, waiting = set(), [README]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            links = (target.partition("#")[0] for target in LINK.findall(page.read_text()))
            waiting += [(page.parent / name).resolve() for name in links if name and ":" not in name]
    assert set(PAGES) <= reached


# ---- words


def forbidden_words(text):
    """What no page may say, in code or prose."""
    return [match[0] for match in FORBIDDEN.finditer(re.sub(r"\[rank\d\]", "", text))]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_nothing_forbidden_is_said(page):
    text = page.read_text()
    if page.name == "CONTRIBUTING.md":
        text = text.replace("*Rank* is never a bare word", "")
    assert forbidden_words(text) == []


@pytest.mark.parametrize(
    "text", ["pip install lightning-boost", "see /home/x", "of rank 4", "the rank.", "TODO", "@@NUMBER@@"]
)
def test_forbidden_words_are_found(text):
    assert forbidden_words(text)
    assert not forbidden_words("`tp_rank`, low-rank, full-rank, `global_rank`, ranking")


# ---- commands


def _commands(text):
    """Give the shell commands of a page's blocks, and those of its prose that are whole."""
    lines = [line for block in _code_of(text) for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`([^`\n]+)`", FENCED.sub("", text))
    starts = re.compile(r"(make|python|\.venv/bin/\S+|git|source)\b(?!=)")
    words = [shlex.split(line, comments=True) for line in [*lines, *inline] if starts.match(line.strip())]
    return [command for command in words if len(command) > 1 and "…" not in " ".join(command)]


def _parse(monkeypatch, arguments):
    """Parse a command line as ``main`` does, and stop before anything is built."""
    for name, command in cli.COMMANDS.items():
        stub = functools.wraps(command)(lambda **_: 0)
        monkeypatch.setitem(cli.COMMANDS, name, stub)
    if arguments and cli.split_command(arguments)[0] is None and "--help" not in arguments:
        arguments = [*arguments, "--print_config"]
    monkeypatch.setattr(sys, "argv", ["lightning_boost", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    return exit_info.value.code


OWN_COMMANDS = sorted(
    {
        shlex.join(command[3:])
        for page in PAGES
        for command in _commands(page.read_text())
        if command[1:3] == ["-m", "lightning_boost"] and len(command) > 3
    }
)


def test_commands_are_found():
    text = (
        "    python -m lightning_boost fit \\\n      --a b  # why\n\nor `make it`, not `make`.\n\n```\nmake all\n```\n"
    )
    assert _commands(text) == [
        ["make", "all"],
        ["python", "-m", "lightning_boost", "fit", "--a", "b"],
        ["make", "it"],
    ]
    assert any("validate" in command for command in OWN_COMMANDS)


@pytest.mark.parametrize("command", OWN_COMMANDS)
def test_commands_parse(monkeypatch, capsys, command):
    monkeypatch.chdir(ROOT)
    assert _parse(monkeypatch, shlex.split(command)) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "fit --config recipes/quickstart.yaml --trainer.max_step 3",
        "fit --config recipes/nothing.yaml",
        "validate --ckpt_pat x",
        "parity --kind full",
        "parity --shape round",
        "parities",
        "benchmark blocks",
        "checkpoint",
        "checkpoint inspekt x",
        "checkpoint export x",
        "checkpoint verify x --al",
        "fit --config recipes/quickstart.yaml --trainer.strategy.data_axis shard",
    ],
)
def test_wrong_commands_do_not_parse(monkeypatch, capsys, command):
    monkeypatch.chdir(ROOT)
    assert _parse(monkeypatch, shlex.split(command)) == 2


def other_commands(text):
    """Make targets and scripts that are not there."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    findings = []
    for program, first, *_ in _commands(text):
        if program == "make" and first not in targets:
            findings.append(f"make {first}")
        if program == "python" and first.endswith(".py") and not (ROOT / first).is_file():
            findings.append(f"python {first}")
    return findings


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_make_targets_and_scripts_are_there(page):
    assert other_commands(page.read_text()) == []


@pytest.mark.parametrize("text", ["    make coffee\n", "`python examples/nothing.py`"])
def test_missing_targets_and_scripts_are_found(text):
    assert other_commands(text)


# ---- the README


def test_the_first_screen_holds_what_a_newcomer_needs():
    lines = README.read_text().splitlines()[:FIRST_SCREEN]
    screen = "\n".join(lines)
    end = README.read_text().splitlines().index("## Install")
    assert lines.index("## What it cannot do yet") < end <= FIRST_SCREEN
    for part in ("| all-reduces", "make quickstart", "make test", "validation loss", "```python", 'strategy="boost"'):
        assert part in screen
    assert max(map(len, lines)) <= 120


def test_the_table_s_figures_are_those_of_its_formulas():
    hidden, features = 4096, 11008
    launches, figures = {"low rank, ordinary": (7, 4)}, {"low rank, ordinary": 5 * hidden + 2 * features}
    for row, kind in {"full rank": "full_rank", "low rank, cut": "cola"}.items():
        low_rank = LowRankConfig(kind=kind, bottleneck_size=1024)
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=features,
            num_attention_heads=32,
            num_hidden_layers=1,
            low_rank=low_rank,
        )
        traffic = layer_traffic(config, 0, tensor_parallel_size=4, statistic_columns=0)
        assert {operation for operation, _, _ in traffic} == {"all_reduce"}
        forward = [values for (_, _, pass_), values in traffic.items() if pass_ == "forward"]
        launches[row], figures[row] = (len(forward), len(traffic) - len(forward)), sum(forward)
    for row, figure in figures.items():
        line = next(line for line in README.read_text().splitlines() if line.startswith(f"| {row}"))
        assert "| {} + {} |".format(*launches[row]) in line
        assert line.endswith(f" {figure:,} |")


def _run_readme(folder):
    (block,) = _python_blocks(README)
    os.chdir(folder)
    shortened = block.replace("max_steps=300", "max_steps=2, limit_val_batches=1, enable_progress_bar=False")
    assert shortened != block
    names = {"__name__": "__main__"}
    exec(compile(shortened, str(README), "exec"), names)
    assert isinstance(names["trainer"], Trainer)
    return names["trainer"].global_step, names["trainer"].callback_metrics["train_loss"].item()


def test_the_trainer_snippet_runs(tmp_path):
    (first_steps, first_loss), (steps, loss) = run_processes(_run_readme, 2, tmp_path)
    assert first_steps == steps == 2
    assert first_loss == loss
    assert math.isfinite(loss)


# ---- your own model


def test_the_page_shows_the_examples_verbatim():
    blocks = _python_blocks(ROOT / "docs" / "your_own_model.md")
    assert blocks[0] == EXAMPLE.read_text()
    assert HUGGING_FACE.read_text() in blocks


def _run_example(devices, block=None, path=EXAMPLE):
    spec = importlib.util.spec_from_file_location("own_model", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    if block is not None:
        exec(compile(block, "your_own_model.md", "exec"), vars(example))
        example.OwnModel = example.OwnModelWithoutLogits
    module = example.main(devices=devices, max_steps=3)
    return type(module).__name__, module.trainer.callback_metrics["val_loss"].item()


def _same_loss_on_two_processes(block=None, path=EXAMPLE):
    ((name, expected),) = run_processes(_run_example, 1, 1, block, path)
    for found, loss in run_processes(_run_example, 2, 2, block, path):
        assert found == name
        assert loss == pytest.approx(expected, abs=1e-5)
    return name, expected


def test_the_example_trains_on_two_processes_as_on_one():
    plain_name, plain = _same_loss_on_two_processes()
    block = next(block for block in _python_blocks(ROOT / "docs" / "your_own_model.md") if "NextTokenLoss(" in block)
    name, smoothed = _same_loss_on_two_processes(block)
    assert (plain_name, name) == ("OwnModel", "OwnModelWithoutLogits")
    # both start and learn alike; the smoothing alone sets them apart
    assert 1e-3 < abs(smoothed - plain) < 1.0


def test_the_hugging_face_example_does_too():
    assert _same_loss_on_two_processes(path=HUGGING_FACE)[0] == "FineTuning"


def test_the_example_runs_as_a_script(tmp_path):
    """The Trainer starts the other process itself, for training, and finds it there for validation."""
    script = tmp_path / "shortened.py"
    script.write_text(
        f"import runpy\nexample = runpy.run_path({str(EXAMPLE)!r})\nexample['main'](devices=2, max_steps=2)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("val_loss") == 1


def _other_names():
    def pair():
        return LowRankLinear(32, 32, 4)

    def layer():
        attention = {name: pair() for name in ("q", "k", "v", "out")}
        mlp = {name: pair() for name in ("gate", "up", "down")}
        parts = {"attn": torch.nn.ModuleDict(attention), "mlp": torch.nn.ModuleDict(mlp)}
        return torch.nn.ModuleDict({"norm_1": RMSNorm(32), "norm_2": RMSNorm(32), **parts})

    blocks = torch.nn.ModuleList([layer(), layer()])
    inner = torch.nn.ModuleDict({"wte": torch.nn.Embedding(5, 32), "blocks": blocks, "norm": RMSNorm(32)})
    return torch.nn.ModuleDict({"transformer": inner, "head": torch.nn.Linear(32, 5, bias=False)})


def test_the_layout_of_the_page_finds_a_model_of_such_names():
    names = {}
    block = next(block for block in _python_blocks(ROOT / "docs" / "your_own_model.md") if "DecoderLayout(" in block)
    exec(compile(block, "your_own_model.md", "exec"), names)
    assert isinstance(names["layout"], DecoderLayout)
    assert find_decoder(_other_names(), names["layout"]).attention_heads == (16, 16)


# ---- configurations


YAML_BLOCKS = [block for page in PAGES for block in _blocks(page, "yaml")]


def _code_of_a_run_with(monkeypatch, tmp_path, block):
    """Lay a page's configuration over the quickstart's, and stop before anything is built."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "block.yaml").write_text(block)
    return _parse(monkeypatch, ["fit", "--config", "recipes/quickstart.yaml", f"--config={tmp_path / 'block.yaml'}"])


@pytest.mark.parametrize("block", YAML_BLOCKS)
def test_yaml_blocks_are_configurations(monkeypatch, capsys, tmp_path, block):
    assert _code_of_a_run_with(monkeypatch, tmp_path, block) == 0, capsys.readouterr().err


def test_a_yaml_block_of_the_shapes_is_there_and_a_wrong_one_is_found(monkeypatch, tmp_path):
    (block,) = (block for block in YAML_BLOCKS if "other_bottleneck_sizes" in block)
    wrong = block.replace("tie_word_embeddings", "tied_word_embeddings")
    assert wrong != block
    assert _code_of_a_run_with(monkeypatch, tmp_path, wrong) == 2


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_blocks_compile(page):
    for block in _python_blocks(page):
        compile(f"if True:\n{block}" if block.startswith("    ") else block, page_id(page), "exec")
