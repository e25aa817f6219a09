"""Names that torch does not promise: one that is missing is told of in a sentence, and where it is imported."""

import ast
import re
import runpy
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from lightning_boost import communication_trace, torch_internals
from lightning_boost.tensor_parallel import verification

ROOT = Path(__file__).parents[2]
TAKEN_BY = (communication_trace, verification)


def _names_taken(module):
    """Return what a module takes by ``private``, as its source has it."""
    calls = [node for node in ast.walk(ast.parse(Path(module.__file__).read_text())) if isinstance(node, ast.Call)]
    return [
        tuple(argument.value for argument in call.args) for call in calls if getattr(call.func, "id", "") == "private"
    ]


CASES = [
    *(
        (torch_internals, "torch._ops", "OpOverload"),
        (torch_internals, "torch.utils._python_dispatch", "TorchDispatchMode"),
    ),
    *((module, *taken) for module in TAKEN_BY for taken in _names_taken(module)),
]


def test_each_of_them_takes_some():
    assert all(_names_taken(module) for module in TAKEN_BY)


@pytest.mark.parametrize(("module", "owner", "name"), CASES, ids=[f"{owner}.{name}" for _, owner, name in CASES])
def test_a_torch_without_a_name_is_told_of_at_import(module, owner, name, monkeypatch):
    holder = import_module(owner)
    *classes, last = name.split(".")
    for part in classes:
        holder = getattr(holder, part)
    monkeypatch.delattr(holder, last)
    sentence = f"torch {torch.__version__} has no {owner}.{name}, which this package calls and torch does not promise"
    with pytest.raises(ImportError, match=re.escape(sentence)) as caught:
        runpy.run_path(module.__file__)
    assert str(caught.value).endswith(f"install {torch_internals.WORKS_WITH}.")


def test_a_torch_without_a_module_is_told_of(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._ops", None)
    with pytest.raises(ImportError, match=r"has no torch\._ops\.OpOverload"):
        torch_internals.private("torch._ops", "OpOverload")


def test_the_versions_are_those_that_are_installed_with_the_package():
    assert f'"{torch_internals.WORKS_WITH}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", communication_trace._OPERATIONS)
def test_the_trace_knows_operators_by_names_that_this_torch_has(name):
    """One that torch renames would be recorded as an operation of its own, with the bytes of the wrong argument."""
    assert hasattr(torch.ops.c10d, name) or hasattr(torch.ops._c10d_functional, name)
