"""What holds for every test: none leaves anything behind for the next."""

import os
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

# files run beside one another and start processes: threads beyond the cores spin while they wait for each other
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start

if not torch.cuda.is_available():
    # before anything imports triton: its own functions look at it, too
    os.environ["TRITON_INTERPRET"] = "1"

# of the extra hf, which may be missing
collect_ignore = [] if find_spec("transformers") else ["distributed/test_hugging_face.py", "unit/test_chat_template.py"]


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Give each test the environment as it was (Lightning keeps its seed there) and see that no group stays open."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    assert not dist.is_initialized(), "a process group was started in the process that runs the tests"
