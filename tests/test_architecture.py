"""The floors of the package and its other agreements, read from the source text: neither torch nor a GPU is needed.

A rule is a function from one source file to its findings, ``path:line: what is wrong``. Each is run over the package,
and over small planted files that break it or must pass.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "lightning_boost"

FLOORS = (
    {"config", "divisors", "mesh", "kernels", "options", "new_directory", "torch_internals"},
    {"collectives", "cost", "model", "data", "checkpoint_reader"},
    {"layout", "interchange"},
    {
        "tensor_parallel",
        "pipeline_parallel",
        "data_parallel",
        "random_streams",
        "recompute",
        "gradients",
        "optimization",
    },
    {"parallelize", "compilation", "checkpoint", "planning", "communication_trace"},
    {"strategy", "callbacks", "language_model", "data_module"},
    {"parity", "benchmark", "checkpoint_tools"},
    {"commands"},
    {"cli"},
    {"__main__"},
)
FLOOR_OF = {part: number for number, parts in enumerate(FLOORS) for part in parts}
UPPER = {"__init__", *(part for part, number in FLOOR_OF.items() if number >= 5)}

CONFINED = {
    "triton": {"kernels"},
    "datasets": {"data"},
    "tokenizers": {"data"},
    "safetensors": {"interchange"},
    "jinja2": {"data"},
    "numpy": {"checkpoint"},  # to leave its numbers out
    "matplotlib": {"benchmark"},
    "lightning": UPPER,
    "torchmetrics": UPPER,
    "rich": UPPER,
    "jsonargparse": UPPER,
}
EVERYWHERE = {"lightning_boost", "torch", "typing_extensions", *sys.stdlib_module_names}

LIGHTNING_DOOR = "strategy/lightning_internals.py"
TORCH_DOOR = "torch_internals.py"
WATCHES_A_RUN = ("callbacks/", "communication_trace.py", "tensor_parallel/verification.py")
PRINTERS = {"commands"}
MOST_LINES = 400

RANK = re.compile(r"(^|_)rank($|_)")
QUALIFIED_RANK = re.compile(r"_?((global|local|node|tp|pp|dp)_rank|rank_zero_\w+|\w*(low|full)_rank\w*)")

COLLECTIVE = re.compile(
    r"_?(all_(reduce|gather|to_all)|reduce|broadcast|gather|scatter|i?send|i?recv|batch_isend_irecv"
    r"|(monitored_)?barrier)(_.*)?"
    r"|_functional_collectives"
)
EVERY_COLLECTIVE = re.compile("")
NO_COLLECTIVE = re.compile("(?!)")
MAY_ISSUE = {
    "collectives": EVERY_COLLECTIVE,
    "checkpoint": EVERY_COLLECTIVE,  # of state that is saved or loaded, not of activations
    "parallelize": re.compile("broadcast"),  # process 0's weights, once
    "strategy": re.compile("all_reduce|broadcast_object_list|all_gather_object"),  # votes and random state
    "data_parallel": re.compile("all_reduce"),  # token counts, on the data axis
    "pipeline_parallel": re.compile("all_reduce|broadcast"),  # losses and outputs of the last stage, token counts
    "random_streams": re.compile("all_reduce"),  # a vote of the stages
    "parity": re.compile("all_gather_object"),  # gradients of all stages, to be compared
    "callbacks": re.compile("all_gather_object"),  # figures of all stages and replicas, to be shown
    "benchmark": re.compile("all_reduce|barrier"),  # what is measured, and to measure together
    "commands": re.compile("barrier"),  # to end together
}


@dataclass(frozen=True)
class Source:
    """One file of the package."""

    path: str
    """Relative to the package, with forward slashes."""

    text: str

    @property
    def part(self) -> str:
        """The module or folder right below the package that the file belongs to."""
        return self.path.split("/")[0].removesuffix(".py")

    def nodes(self) -> Iterator[ast.AST]:
        return ast.walk(ast.parse(self.text, self.path))

    def finding(self, line: int, what: str) -> str:
        return f"{PACKAGE.name}/{self.path}:{line}: {what}"


Rule = Callable[[Source], Iterator[str]]


def read_sources(package: Path) -> list[Source]:
    paths = sorted(package.rglob("*.py"))
    return [Source(path.relative_to(package).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """Yield the line and the full dotted name of every import, wherever it stands; a relative one begins with a dot."""
    for node in source.nodes():
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def imports_go_down_the_floors(source: Source) -> Iterator[str]:
    if source.part == "__init__":  # the root shows what the floors below it hold
        return
    if source.part not in FLOOR_OF:
        yield source.finding(1, f"{source.part} is on no floor; add it to FLOORS in {Path(__file__).name}")
        return
    for line, name in imports(source):
        top, _, below = name.partition(".")
        other = below.split(".")[0]
        if top == "":
            yield source.finding(line, f"relative import {name}")
        elif top == PACKAGE.name and other not in FLOOR_OF:
            yield source.finding(line, f"{name} is imported from the root; import it from the part that defines it")
        elif top == PACKAGE.name and other != source.part and FLOOR_OF[other] >= FLOOR_OF[source.part]:
            floors = f"floor {FLOOR_OF[source.part]} imports floor {FLOOR_OF[other]}"
            yield source.finding(line, f"{floors}: {name}")


def third_party_libraries_stay_on_their_floor(source: Source) -> Iterator[str]:
    for line, name in imports(source):
        library = name.split(".")[0]
        if library == "" or library in EVERYWHERE:
            continue
        if library not in CONFINED:
            yield source.finding(line, f"{library} has no home; if it is a dependency, add it to CONFINED")
        elif source.part not in CONFINED[library]:
            yield source.finding(line, f"{name} belongs in: {', '.join(sorted(CONFINED[library]))}")


def private_lightning_names_have_one_door(source: Source) -> Iterator[str]:
    yield from private_imports(source, "lightning", LIGHTNING_DOOR)


def what_watches_a_run_has_one_door_to_private_torch_names(source: Source) -> Iterator[str]:
    if not source.path.startswith(WATCHES_A_RUN):
        return
    yield from private_imports(source, "torch", TORCH_DOOR)
    for node in source.nodes():
        if isinstance(node, ast.Attribute) and re.fullmatch(r"torch(\.[a-zA-Z]\w*)*\._[a-zA-Z]\w*", ast.unparse(node)):
            yield source.finding(node.lineno, f"{ast.unparse(node)} is private; take it by private() of {TORCH_DOOR}")


def private_imports(source: Source, library: str, door: str) -> Iterator[str]:
    if source.path == door:
        return
    for line, name in imports(source):
        top, *rest = name.split(".")
        if top == library and any(part.startswith("_") and not part.endswith("__") for part in rest):
            yield source.finding(line, f"{name} is private; import it in {door}")


def rank_is_qualified(source: Source) -> Iterator[str]:
    for line, name in own_names(source):
        if RANK.search(name) and not QUALIFIED_RANK.fullmatch(name):
            what = f"{name}: say global_rank, tp_rank, … for a process and bottleneck_size for a width"
            yield source.finding(line, what)


def own_names(source: Source) -> Iterator[tuple[int, str]]:
    """Yield line and name of what the file may name as it likes: not the keywords and attributes of others."""
    for node in source.nodes():
        match node:
            case ast.arg(arg=name) | ast.Name(id=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name


def tensor_axis_collectives_have_one_door(source: Source) -> Iterator[str]:
    allowed = MAY_ISSUE.get(source.part, NO_COLLECTIVE)
    for line, name in collectives(source):
        if not allowed.match(name):
            yield source.finding(line, f"{name} of torch.distributed; call or add a function of collectives.py")


def collectives(source: Source) -> Iterator[tuple[int, str]]:
    """Yield the line and name of every collective of ``torch.distributed`` that is imported or read off the module."""
    for line, name in imports(source):
        last = name.split(".")[-1]
        if name.startswith("torch.distributed.") and COLLECTIVE.fullmatch(last):
            yield line, last
    modules = names_of_torch_distributed(source)
    for node in source.nodes():
        if isinstance(node, ast.Attribute) and COLLECTIVE.fullmatch(node.attr) and ast.unparse(node.value) in modules:
            yield node.lineno, node.attr


def names_of_torch_distributed(source: Source) -> set[str]:
    names = {"torch.distributed"}
    for node in source.nodes():
        if isinstance(node, ast.Import):
            names |= {alias.asname for alias in node.names if alias.name == "torch.distributed" and alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            names |= {alias.asname or alias.name for alias in node.names if alias.name == "distributed"}
    return names


def only_commands_print(source: Source) -> Iterator[str]:
    if source.part in PRINTERS:
        return
    for node in source.nodes():
        if isinstance(node, ast.Name) and node.id == "print":
            yield source.finding(node.lineno, "print outside of commands; use logging")


def files_are_short(source: Source) -> Iterator[str]:
    lines = len(source.text.splitlines())
    if lines > MOST_LINES:
        yield source.finding(lines, f"{lines} lines, more than {MOST_LINES}; split it by subject")


RULES: tuple[Rule, ...] = (
    imports_go_down_the_floors,
    third_party_libraries_stay_on_their_floor,
    private_lightning_names_have_one_door,
    what_watches_a_run_has_one_door_to_private_torch_names,
    rank_is_qualified,
    tensor_axis_collectives_have_one_door,
    only_commands_print,
    files_are_short,
)


def findings(rule: Rule, package: Path) -> list[str]:
    return [finding for source in read_sources(package) for finding in rule(source)]


def short_name(value: Rule | str) -> str:
    return value.splitlines()[-1] if isinstance(value, str) else value.__name__


@pytest.mark.parametrize("rule", RULES, ids=short_name)
def test_package_keeps(rule: Rule) -> None:
    assert read_sources(PACKAGE), f"no source files below {PACKAGE}"
    found = findings(rule, PACKAGE)
    assert not found, "\n" + "\n".join(found)


BREAKS = (
    (imports_go_down_the_floors, "model/llama.py", "from lightning_boost.strategy.boost import BoostParallelStrategy"),
    (imports_go_down_the_floors, "cost.py", "import lightning_boost.model.llama"),
    (imports_go_down_the_floors, "cost.py", "def late():\n    from lightning_boost import planning"),
    (imports_go_down_the_floors, "planning.py", "from lightning_boost import BoostParallelStrategy"),
    (imports_go_down_the_floors, "planning.py", "import lightning_boost"),
    (imports_go_down_the_floors, "model/mlp.py", "from . import llama"),
    (imports_go_down_the_floors, "utils.py", "import math"),
    (third_party_libraries_stay_on_their_floor, "model/norm.py", "import triton.language as tl"),
    (third_party_libraries_stay_on_their_floor, "data_module.py", "from datasets import load_dataset"),
    (third_party_libraries_stay_on_their_floor, "checkpoint.py", "from lightning.pytorch import Trainer"),
    (third_party_libraries_stay_on_their_floor, "planning.py", "from rich.table import Table"),
    (third_party_libraries_stay_on_their_floor, "cost.py", "import numpy as np"),
    (private_lightning_names_have_one_door, "cli.py", "from lightning.pytorch.utilities._pytree import tree_map"),
    (private_lightning_names_have_one_door, "strategy/boost.py", "from lightning.fabric.strategies.fsdp import _setup"),
    (private_lightning_names_have_one_door, "strategy/boost.py", "import lightning.pytorch._graveyard"),
    (
        what_watches_a_run_has_one_door_to_private_torch_names,
        "communication_trace.py",
        "from torch._ops import OpOverload",
    ),
    (
        what_watches_a_run_has_one_door_to_private_torch_names,
        "tensor_parallel/verification.py",
        "from torch.utils import _python_dispatch",
    ),
    (
        what_watches_a_run_has_one_door_to_private_torch_names,
        "callbacks/timing.py",
        "import torch\nt = torch._C._current_graph_task_id()",
    ),
    (rank_is_qualified, "config.py", "def build(rank): ..."),
    (rank_is_qualified, "config.py", "attn_rank: int = 512"),
    (rank_is_qualified, "mesh.py", "class Mesh:\n    def __init__(self):\n        self.rank = 0"),
    (rank_is_qualified, "mesh.py", "def my_rank_of(mesh): ..."),
    (tensor_axis_collectives_have_one_door, "model/mlp.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
    (tensor_axis_collectives_have_one_door, "gradients.py", "import torch\ntorch.distributed.broadcast(x, 0)"),
    (tensor_axis_collectives_have_one_door, "gradients.py", "from torch import distributed as d\nd.all_gather(x, y)"),
    (tensor_axis_collectives_have_one_door, "parity.py", "from torch.distributed import reduce_scatter_tensor"),
    (tensor_axis_collectives_have_one_door, "parity.py", "import torch.distributed._functional_collectives as fun"),
    (tensor_axis_collectives_have_one_door, "parallelize.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
    (only_commands_print, "benchmark/block.py", "print('1.0 ms')"),
    (only_commands_print, "cost.py", "from functools import partial\nsay = partial(print, flush=True)"),
    (files_are_short, "model/llama.py", "x = 0\n" * 401),
)

KEEPS = (
    (imports_go_down_the_floors, "__init__.py", "from lightning_boost.strategy.boost import BoostParallelStrategy"),
    (imports_go_down_the_floors, "model/llama.py", "from lightning_boost.model.mlp import GatedMLP\nimport torch"),
    (imports_go_down_the_floors, "cost.py", "from lightning_boost import config, mesh"),
    (third_party_libraries_stay_on_their_floor, "kernels/norm.py", "import math\nimport triton"),
    (third_party_libraries_stay_on_their_floor, "callbacks/timing.py", "import lightning.pytorch as pl"),
    (private_lightning_names_have_one_door, LIGHTNING_DOOR, "from lightning.pytorch._graveyard import _x"),
    (private_lightning_names_have_one_door, "cli.py", "from lightning import __version__"),
    (
        what_watches_a_run_has_one_door_to_private_torch_names,
        "communication_trace.py",
        "import torch\nfrom lightning_boost.torch_internals import OpOverload\ntorch.__version__",
    ),
    (rank_is_qualified, "mesh.py", "tp_rank = dist.get_rank(group)\nsplit(x, rank=tp_rank)\nlow_rank = True"),
    (
        tensor_axis_collectives_have_one_door,
        "collectives.py",
        "from torch import distributed\ndistributed.all_reduce(x)",
    ),
    (tensor_axis_collectives_have_one_door, "parallelize.py", "import torch.distributed as dist\ndist.broadcast(x, 0)"),
    (tensor_axis_collectives_have_one_door, "checkpoint.py", "import torch.distributed as dist\ndist.barrier()"),
    (tensor_axis_collectives_have_one_door, "mesh.py", "import torch.distributed as dist\ndist.get_world_size()"),
    (tensor_axis_collectives_have_one_door, "gradients.py", "all_reduce(x)\ntensor.scatter_(0, i, x)"),
    (only_commands_print, "commands/plan.py", "print('{}')"),
    (files_are_short, "model/llama.py", "x = 0\n" * 400),
)


def plant(folder: Path, path: str, text: str) -> Path:
    package = folder / PACKAGE.name
    file = package / path
    file.parent.mkdir(parents=True)
    file.write_text(text, encoding="utf-8")
    return package


def test_every_rule_is_seen_to_fail() -> None:
    assert {rule for rule, _, _ in BREAKS} == set(RULES)


@pytest.mark.parametrize(("rule", "path", "text"), BREAKS, ids=short_name)
def test_planted_break_is_reported_once_with_its_line(rule: Rule, path: str, text: str, tmp_path: Path) -> None:
    found = findings(rule, plant(tmp_path, path, text))
    last_line = len(text.splitlines())
    assert len(found) == 1, found
    assert found[0].startswith(f"{PACKAGE.name}/{path}:{last_line}: ")


@pytest.mark.parametrize(("rule", "path", "text"), KEEPS, ids=short_name)
def test_allowed_use_is_not_reported(rule: Rule, path: str, text: str, tmp_path: Path) -> None:
    assert not findings(rule, plant(tmp_path, path, text))


def test_contributors_read_of_the_same_floors() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", text, flags=re.MULTILINE)
    assert [(int(number), set(re.findall(r"`(\w+)`", parts))) for number, parts in rows] == [
        (number, parts) for number, parts in enumerate(FLOORS) if "__main__" not in parts
    ]
