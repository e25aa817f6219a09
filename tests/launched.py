"""Runs of a user's script in processes of their own, and how long after a fault the last of them has ended."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LIMIT_SECONDS = 30
"""The promise: any process's failure ends all within this time."""

TORCHRUN = ("-m", "torch.distributed.run")

needs_proc = pytest.mark.skipif(not Path("/proc").is_dir(), reason="counts processes through /proc")

_MARK = "STARTED_BY_TEST_IN"
_SET_BY_LAUNCHERS = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def start(folder, script, *arguments, launcher=(), **variables):
    """Start a script as a user does, by Python alone or by one of its modules."""
    path = folder / "script.py"
    path.write_text(script)
    environment = {name: value for name, value in os.environ.items() if name not in _SET_BY_LAUNCHERS}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", _MARK: str(folder), **variables}
    return subprocess.Popen(
        [sys.executable, *launcher, path, *map(str, arguments)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(folder, *processes):
    """Return exit codes, outputs, and the seconds from the fault, if one is told, until the last process was gone."""
    outputs = [process.communicate(timeout=180)[0] for process in processes]
    faults = re.findall(r"fault at ([\d.]+)", "".join(outputs))
    ended = time_when_all_ended(folder)
    return [process.returncode for process in processes], outputs, ended - float(faults[0] if faults else 0)


def time_when_all_ended(folder):
    """Wait for all processes that were started in a folder, and for those that they have started."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while left := _running(folder):
        assert time.monotonic() < deadline, f"processes {left} are left"
        time.sleep(0.2)
    return time.time()


def _running(folder):
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = environ.read_bytes().split(b"\0")
        except OSError:
            continue
        if f"{_MARK}={folder}".encode() in variables:
            found.append(int(environ.parent.name))
    return found
