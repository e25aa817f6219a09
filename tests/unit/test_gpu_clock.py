"""Times of a GPU's streams, on a GPU that is made up: its events and streams do what torch's documentation says.

Nothing here has run on a real one. Seen is that the code keeps to the rules by which torch would refuse it, that it
waits for the GPU at the ends of sampled steps only, and what it makes of the streams' times.
"""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_boost import LowRankLanguageModel, collectives, communication_trace
from lightning_boost.callbacks import communication_profiler
from lightning_boost.callbacks.sampled_steps import StepSampler
from lightning_boost.collectives import Label, all_reduce, start_all_reduce
from lightning_boost.communication_trace import CommunicationTrace
from tests.models import small_config
from tests.processes import run_processes
from tests.profiled_fit import data_for, fit_profiled

LABEL = Label("qkv", "forward")
TRANSFER = 5.0
LATENCY = 0.125
"""From the record of an event until even a stream with nothing to do has come to it."""


class _GPU:
    """A host's clock, and streams that do what they are given in order."""

    def __init__(self):
        self.now = 0.0
        self.ends = Counter()
        self.current_stream = "compute"
        self.sampler = None
        self.waits = Counter()

    def work(self, seconds, stream=None):
        stream = stream or self.current_stream
        self.ends[stream] = max(self.ends[stream], self.now) + seconds

    def wait_for(self, instant):
        self.waits[self.sampler and self.sampler._step_before] += 1
        self.now = max(self.now, instant)

    # in the place of torch.cuda's, torch.distributed's and time's

    def synchronize(self):
        self.wait_for(max(self.ends.values(), default=0.0))

    def perf_counter(self):
        return self.now

    def all_reduce(self, tensor, group=None, async_op=False):
        """NCCL's stream begins when the current one comes here, and that goes on behind it when it waits."""
        here = max(self.ends[self.current_stream], self.now)
        self.ends["nccl"] = max(self.ends["nccl"], here)
        self.work(TRANSFER, "nccl")
        done = self.ends["nccl"]

        def wait():
            self.ends[self.current_stream] = max(self.ends[self.current_stream], done)

        return SimpleNamespace(wait=wait) if async_op else wait()


class _Event:
    def __init__(self, gpu, enable_timing):
        self.gpu, self.enable_timing, self.at = gpu, enable_timing, None

    def record(self, stream=None):
        self.at = max(self.gpu.ends[stream or self.gpu.current_stream], self.gpu.now) + LATENCY

    def synchronize(self):
        self.gpu.wait_for(self.at)

    def elapsed_time(self, end_event):
        for event in (self, end_event):
            if not event.enable_timing or event.at is None or event.at > self.gpu.now:
                raise RuntimeError("both events must be recorded, with timing, and completed")
        return 1e3 * (end_event.at - self.at)


def _put_in(gpu, setattr_):
    setattr_(torch.cuda, "synchronize", gpu.synchronize)
    setattr_(torch.cuda, "Event", lambda enable_timing=False: _Event(gpu, enable_timing))


@pytest.fixture
def gpu(monkeypatch):
    gpu = _GPU()
    _put_in(gpu, monkeypatch.setattr)
    monkeypatch.setattr(communication_trace, "time", gpu)
    monkeypatch.setattr(collectives, "dist", gpu)
    monkeypatch.setattr(collectives, "_groups", {"t": SimpleNamespace(group_name="t")})
    return gpu


def test_a_collective_takes_the_streams_time_and_the_host_waits_for_none(gpu):
    gpu.work(7.0)
    with CommunicationTrace({"t": "tensor"}, is_cuda=True).open() as trace:
        waits, now = gpu.waits.copy(), gpu.now
        gpu.work(2.0)
        all_reduce(torch.ones(2), "t", LABEL)
        gpu.work(1.0)
        work = start_all_reduce(torch.ones(2), "t", LABEL)
        gpu.work(3.0)
        work.wait()
        assert (gpu.waits, gpu.now) == (waits, now)
    at_once, overlapped = trace.events()
    assert (at_once.blocked, at_once.in_flight) == (5.0, 5.0)
    # for three of its five seconds something else was computed
    assert (overlapped.blocked, overlapped.in_flight) == (2.0, 5.0)
    assert overlapped.started - at_once.ended == 1.0
    assert at_once.started == pytest.approx(7.0 + 2.0, abs=LATENCY)


def test_stamps_may_go_into_another_stream_than_the_first_one_did(gpu):
    with CommunicationTrace({"t": "tensor"}, is_cuda=True).open() as trace:
        gpu.current_stream = "another"
        all_reduce(torch.ones(2), "t", LABEL)
    (event,) = trace.events()
    assert event.blocked == TRANSFER


def test_a_clock_is_ready_as_soon_as_it_is_there(gpu):
    """Its first event is over before stamps of other streams, whose end says nothing of it, are compared with it."""
    clock = communication_trace.CudaClock()
    assert clock._origin.at <= gpu.now


def _reduce():
    _put_in(_GPU(), setattr)
    with CommunicationTrace({}, is_cuda=True).open() as trace:
        dist.all_reduce(torch.ones(2))
    return trace.events()


def test_torchs_own_collectives_have_no_times_on_a_gpu():
    ((event,),) = run_processes(_reduce, 1)
    assert (event.operation, event.bytes) == ("all_reduce", 8)
    assert (event.started, event.wait_began, event.ended) == (None, None, None)


def _fit(folder):
    gpu = _GPU()
    _put_in(gpu, setattr)

    def sampler_of_gpu(*args, is_cuda):
        gpu.sampler = StepSampler(*args, is_cuda=True)
        return gpu.sampler

    communication_profiler.StepSampler = sampler_of_gpu
    config = small_config()
    report, text, _ = fit_profiled(folder, LowRankLanguageModel(config), data_for(config, 5))
    return report, text, gpu.waits


def test_the_gpu_is_waited_for_in_sampled_steps_only(tmp_path):
    (report, text, waits), (_, _, others_waits) = run_processes(_fit, 2, tmp_path)
    assert report["sampled_steps"] == [1, 3]
    assert waits.keys() == others_waits.keys() == {1, 3}
    for row in report["processes"][0]["rows"]:
        is_of_the_door = row["axis"] == "tensor" and row["chunk"] != "scalars"
        assert (row["blocked_ms"] is not None) == is_of_the_door
        # when the others came is not known
        assert row["waiting_ms"] is row["transfer_ms"] is None
    assert "n/a" in text
