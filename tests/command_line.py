"""The command line in forked processes: what ``torchrun -m lightning_boost`` does, without its seconds of imports."""

import contextlib
import io
import logging
import os
import sys

from lightning_boost.cli import main
from tests.processes import run_processes


def run_command(folder, *arguments, processes=1):
    """Run a command in ``folder`` on so many processes; return what process 0 prints and logs."""
    return run_processes(_run, processes, folder, arguments, timeout=300)[0]


def _run(folder, arguments):
    os.chdir(folder)
    sys.argv = ["lightning_boost", *arguments]
    output = io.StringIO()
    logging.getLogger("lightning.pytorch").addHandler(logging.StreamHandler(output))
    with contextlib.redirect_stdout(output):
        code = _exit_code_of(main)
    assert code == 0, output.getvalue()
    return output.getvalue()


def _exit_code_of(function):
    try:
        function()
    except SystemExit as ended:
        return ended.code or 0
    return 0
