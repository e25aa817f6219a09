"""What all processes found of a run's communication, gathered, written beside the logs and shown."""

import json
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_boost.callbacks.chrome_trace import trace_events
from lightning_boost.callbacks.communication_report import AXES, ProcessReport, Sampled, as_most, rows_of, show
from lightning_boost.callbacks.sampled_steps import Sample, waiting_times

REPORT_NAME = "communication.json"
TRACE_NAME = "communication_trace.json"


class GatheredReport:
    """The figures of all processes, the same on each.

    Args:
        folder: Where its files go.
        every_n_steps: Optimizer steps from one sample to the next, to be told.
        traced_steps: How many samples the trace holds, the latest.
    """

    def __init__(self, folder: Path, *, every_n_steps: int, traced_steps: int) -> None:
        self._folder = folder
        self._every_n_steps = every_n_steps
        self._traced_steps = traced_steps
        self._reports: list[ProcessReport] = []
        self._sampled: list[Sampled] = []
        self._traced: list[deque[Sample]] = []
        self._offsets: list[float] = []

    def gather(self, mine: ProcessReport) -> None:
        """Take over the figures of all processes, and the sample if each has one; every process must call this."""
        own = mine, time.time() - time.perf_counter()
        everyones: list[Any] = [own]
        if dist.is_initialized():
            everyones = [None] * dist.get_world_size()
            dist.all_gather_object(everyones, own)
        self._reports = [report for report, _ in everyones]
        if not self._sampled:
            self._sampled = [Sampled() for _ in everyones]
            self._traced = [deque(maxlen=self._traced_steps) for _ in everyones]
            # processes of a host share a clock; taken once, so that clocks which are set do not move
            offsets: dict[str, float] = {}
            self._offsets = [offsets.setdefault(report.host, offset) for report, offset in everyones]
        samples = [report.sample for report in self._reports if report.sample is not None]
        if len(samples) != len(everyones):
            return
        waiting = waiting_times(samples, [report.host for report in self._reports])
        for index, taken in enumerate(samples):
            self._sampled[index].add(taken, waiting[index])
            self._traced[index].append(taken)

    @property
    def _is_as_formula(self) -> bool | None:
        """Whether all processes have counted what the formula says; ``None`` where there is none."""
        everyones = [report.counts for report in self._reports]
        found = [counts.is_as_formula(key) for counts in everyones for key in counts.keys]
        known = [same for same in found if same is not None]
        return all(known) if known else None

    def write(self) -> None:
        """Write the figures and the trace."""
        counts = self._reports[0].counts
        report = {
            "every_n_steps": self._every_n_steps,
            "num_steps": counts.num_steps,
            "num_batches": counts.num_batches,
            "sampled_steps": self._sampled[0].steps,
            "step_ms": [1e3 * sampled.seconds / max(1, len(sampled.steps)) for sampled in self._sampled],
            "is_as_formula": self._is_as_formula,
            "no_formula_because": counts.missing_because,
            "processes": [
                {"process": index, **of_process.position, "rows": rows}
                for index, (of_process, rows) in enumerate(zip(self._reports, self._rows(), strict=True))
            ],
        }
        positions = [of_process.position for of_process in self._reports]
        trace = {"displayTimeUnit": "ms", "traceEvents": trace_events(self._traced, positions, self._offsets)}
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, content in ((REPORT_NAME, report), (TRACE_NAME, trace)):
            # whoever reads while the run goes on finds a whole file
            partial = self._folder / f"{name}.partial"
            partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
            partial.replace(self._folder / name)

    def show(self) -> None:
        """Print the table."""
        counts = self._reports[0].counts
        verdict = {
            True: "All of the tensor axis as the formula says.",
            False: "The tensor axis moves something else than the formula says: rows in red.",
            None: "Nothing to compare with a formula"
            + (f": {counts.missing_because}." if counts.missing_because else "."),
        }[self._is_as_formula]
        sampled = self._sampled[0].steps
        shown = ", ".join(map(str, sampled[:3])) + (", …" if len(sampled) > 3 else "")
        times = f"Times are of {len(sampled)} sampled steps ({shown})." if sampled else "No step was sampled."
        shares = [f"{axis} {share:.1%}" for axis in AXES if (share := self._most_share(axis)) is not None]
        show(
            as_most(self._rows()),
            [
                f"Tensor axis counted in {counts.num_steps} steps. {verdict} {times}",
                f"Blocked, of a sampled step: {', '.join(shares) or 'n/a'}.",
                f"Also in {self._folder / REPORT_NAME}; trace in {self._folder / TRACE_NAME}",
            ],
        )

    def _rows(self) -> list[list[dict[str, Any]]]:
        return [rows_of(*of_process) for of_process in zip(self._reports, self._sampled, strict=True)]

    def _most_share(self, axis: str) -> float | None:
        """Return the share of a step that an axis blocks the process that it blocks most."""
        shares = []
        for sampled in self._sampled:
            blocked = [times.blocked for key, times in sampled.times.items() if key.axis == axis]
            known = [seconds for seconds in blocked if seconds is not None]
            if blocked and len(known) == len(blocked):
                shares.append(sum(known) / sampled.seconds)
        return max(shares, default=None)
