"""What the profiler of communication makes of events: waiting apart from transfer, what is not known, and the trace."""

import contextlib
import io
import json

import pytest

from lightning_boost.callbacks.chrome_trace import trace_events
from lightning_boost.callbacks.communication_report import ProcessReport, Sampled, as_most, rows_of, show
from lightning_boost.callbacks.counted_traffic import Counts, Key
from lightning_boost.callbacks.sampled_steps import Sample, waiting_times
from lightning_boost.communication_trace import Event
from lightning_boost.cost import Volume

QKV = Key("tensor", "qkv", "forward", "all_reduce")


def _event(started, wait_began, ended, *, operation="all_reduce", axis="tensor", group="t"):
    return Event(axis, operation, "qkv", "forward", 8, group, started, wait_began, ended)


def _sample(*events, began=0.0, seconds=10.0):
    return Sample(1, began=[began], lasted=[seconds], events=list(events))


def _report(counted=None, expected=None, missing_because=None):
    counts = Counts(2, 2, counted or {}, expected or {}, missing_because)
    return ProcessReport({"tensor": 0}, "a", counts, None)


def test_waiting_ends_when_the_last_process_comes():
    early, late = _sample(_event(1.0, 1.0, 4.5)), _sample(_event(4.0, 4.0, 4.5))
    assert waiting_times([early, late], ["a", "a"]) == [[3.0], [0.0]]


def test_what_travels_while_something_is_computed_waits_only_when_it_blocks():
    """The other came at 4, before this process began to block at 5; or at 6, one second into it; or after the end."""
    for other, waited in ((4.0, 0.0), (6.0, 1.0)):
        mine, others = _sample(_event(1.0, 5.0, 7.0)), _sample(_event(other, other, 7.0))
        assert waiting_times([mine, others], ["a", "a"])[0] == [waited]


def test_each_group_has_an_order_of_its_own():
    first = _sample(_event(1.0, 1.0, 3.0), _event(3.0, 3.0, 5.0, group="all"))
    second = _sample(_event(4.0, 4.0, 5.0, group="all"), _event(2.0, 2.0, 3.0))
    assert waiting_times([first, second], ["a", "a"]) == [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("events", "hosts"),
    [
        ([_event(1.0, 1.0, 2.0), _event(1.5, 1.5, 2.0)], ["a", "b"]),
        ([_event(1.0, 1.0, 2.0), _event(None, None, None)], ["a", "a"]),
        ([_event(1.0, 1.0, 2.0, operation="send"), _event(1.5, 1.5, 2.0, operation="recv")], ["a", "a"]),
        ([_event(1.0, 1.0, 2.0, operation="send"), _event(1.5, 1.5, 2.0, operation="send")], ["a", "a"]),
    ],
    ids=["two hosts", "time not known", "send and recv", "both send"],
)
def test_what_cannot_be_told_apart_is_not_known(events, hosts):
    assert waiting_times([_sample(event) for event in events], hosts) == [[None], [None]]


def test_figures_are_per_step_and_what_is_not_known_is_null():
    sampled = Sampled()
    sampled.add(_sample(_event(1.0, 2.0, 4.0), _event(None, None, None, axis="data")), [0.5, None])
    sampled.add(_sample(_event(1.0, 2.0, 3.0), _event(None, None, None, axis="data")), [0.5, None])
    tensor, data = rows_of(_report({QKV: Volume(3, 6, 24)}, {QKV: Volume(3, 6, 24)}), sampled)
    assert (tensor["launches"], tensor["bytes"], tensor["formula_bytes"]) == (1.5, 12, 12)
    assert tensor["is_as_formula"] is True
    assert tensor["blocked_ms"] == pytest.approx(1500)
    assert tensor["in_flight_ms"] == pytest.approx(2500)
    assert tensor["waiting_ms"] == pytest.approx(500)
    assert tensor["transfer_ms"] == pytest.approx(1000)
    assert tensor["share_of_step"] == pytest.approx(3 / 20)
    assert data["launches"] == 1
    assert {data[name] for name in ("blocked_ms", "waiting_ms", "transfer_ms", "share_of_step", "is_as_formula")} == {
        None
    }
    assert json.loads(json.dumps([tensor, data], allow_nan=False)) == [tensor, data]


@pytest.mark.parametrize(
    ("counted", "expected", "missing_because", "found"),
    [
        (Volume(1, 2, 8), Volume(1, 2, 8), None, True),
        (Volume(2, 2, 8), Volume(1, 2, 8), None, False),
        (Volume(1, 2, 4), Volume(1, 2, 8), None, False),
        (None, Volume(1, 2, 8), None, False),
        (Volume(1, 2, 8), None, None, False),
        (Volume(1, 2, 8), None, "another model", None),
    ],
)
def test_the_formula_is_kept_to_the_byte_or_not_kept(counted, expected, missing_because, found):
    report = _report(
        {} if counted is None else {QKV: counted}, {} if expected is None else {QKV: expected}, missing_because
    )
    (row,) = rows_of(report, Sampled())
    assert row["is_as_formula"] is found


def test_the_table_shows_the_process_that_differs():
    right = rows_of(_report({QKV: Volume(9, 9, 2**22)}, {QKV: Volume(9, 9, 2**22)}), Sampled())
    wrong = rows_of(_report({QKV: Volume(4, 4, 2**21)}, {QKV: Volume(2, 2, 2**20)}), Sampled())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        show(as_most([right, wrong]), ["below"])
    (line,) = [line for line in printed.getvalue().splitlines() if "qkv" in line]
    assert [cell.strip() for cell in line.split("│")[5:8]] == ["2", "1.0000", "1, 0.5000 MiB"]
    assert "below" in printed.getvalue()


def test_processes_of_several_hosts_are_put_on_one_clock():
    """The second host's clock is 100 s behind."""
    samples = [[_sample(_event(1.0, 1.0, 2.0))], [_sample(_event(-99.0, -98.5, -98.0), began=-100.0)]]
    events = trace_events(samples, [{"tensor": 0}, {"tensor": 1}], [0.0, 100.0])
    spans = {(event["pid"], event["name"]): (event["ts"], event["dur"]) for event in events if event["ph"] == "X"}
    assert spans == {
        (0, "step 1"): (0.0, 10e6),
        (0, "qkv all_reduce"): (1e6, 1e6),
        (1, "step 1"): (0.0, 10e6),
        (1, "qkv all_reduce"): (1.5e6, 0.5e6),
    }
    in_flight = [(event["ph"], event["ts"]) for event in events if event["ph"] in "be"]
    assert in_flight == [("b", 1e6), ("e", 2e6)]
