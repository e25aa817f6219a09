"""Every kernel compiled for GPUs that are not there."""

import json
import os
import subprocess
import sys

import pytest

from lightning_boost.kernels.dispatch import KERNELS

_COMPILE = """
import dataclasses, json, sys, torch
from lightning_boost.kernels.ahead_of_time import SHARED_MEMORY, compile_cases
from lightning_boost.kernels.cases import Sizes

activations = ("none", "silu", "gelu", "gelu_tanh", "relu", "tanh")
wide = Sizes(rows=4096, hidden=8192, latents=24576, heads=64, vocabulary=128256)
# Triton takes a size of one as a constant
ones = Sizes(1, 1, hidden=1, latents=1, gated=1, heads=1, head_size=2, vocabulary=1, loss_rows=1, processes=1)
runs = [(Sizes(), torch.bfloat16, 80, activations), (Sizes(), torch.bfloat16, 90, ("silu",))]
runs += [(Sizes(), torch.bfloat16, 90, ("silu",), torch.float32), (ones, torch.bfloat16, 90, ("silu",))]
runs += [(Sizes(), torch.float32, 80, ("silu",)), (wide, torch.bfloat16, 90, ("silu",))]
found = [dataclasses.asdict(each) | {"limit": SHARED_MEMORY[run[2]]} for run in runs for each in compile_cases(*run)]
json.dump(found, sys.stdout)
"""


_SPILL = """
import dataclasses, json, sys, torch
from lightning_boost.kernels import ahead_of_time, norm_input
from lightning_boost.kernels.cases import Sizes

norm_input.tile = lambda _: (16, 1024)
every = ahead_of_time.cases
ahead_of_time.cases = lambda *args: [case for case in every(*args) if case.function == "norm_input_backward"]
found = [dataclasses.asdict(each) for each in ahead_of_time.compile_cases(Sizes(), torch.float32, 80)]
json.dump(found, sys.stdout)
"""


_LOADS = """
import dataclasses, json, re, sys, torch
from lightning_boost.kernels import ahead_of_time
from lightning_boost.kernels.cases import Sizes

found, compile_ = [], ahead_of_time.triton.compile

def note(*args, **options):
    compiled = compile_(*args, **options)
    found.append(re.findall("ld.global[^ ]*v4", compiled.asm["ptx"]))
    return compiled

ahead_of_time.triton.compile = note
every = ahead_of_time.cases
ahead_of_time.cases = lambda *args: [case for case in every(*args) if case.function == "norm_latent"]
for processes in (1, 2, 4, 8):
    list(ahead_of_time.compile_cases(Sizes(processes=processes), torch.bfloat16, 90, ("silu",)))
json.dump([len(loads) for loads in found], sys.stdout)
"""


def _run(script):
    """Return what a script prints; another process runs it, since Triton interprets in this one."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def compiled():
    return _run(_COMPILE)


def test_all_kernels_are_compiled_for_both_targets(compiled):
    for capability in (80, 90):
        cases = {each["case"].split()[0] for each in compiled if each["capability"] == capability}
        assert all(any(case.startswith(name) for case in cases) for name in KERNELS)
        assert {f"{name}_backward" for name in ("norm_input", "norm_latent", "gated_activation", "rotary")} <= cases


def test_nothing_spills(compiled):
    assert [each for each in compiled if each["spilled"]] == []


def test_shared_memory_suffices(compiled):
    assert [each for each in compiled if each["shared"] > each["limit"]] == []


def test_registers_leave_room_for_several_blocks(compiled):
    """At 128 registers a multiprocessor has 512 threads at a time, few enough to wait for memory."""
    assert [each for each in compiled if each["registers"] > 128] == []


def test_latents_are_read_16_bytes_at_a_time():
    """Beside a statistic of any number of processes, whose columns are padded to 8 but not to 16."""
    assert [loads > 0 for loads in _run(_LOADS)] == [True] * 4


def test_a_spill_is_seen():
    """Of tiles that registers cannot hold."""
    assert [each["spilled"] > 0 for each in _run(_SPILL)] == [True]
