"""What the processes of a run send one another, and what that takes of a step."""

import json
import socket
import time
import warnings
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from typing_extensions import override

from lightning_boost.callbacks.communication_report import (
    AXES,
    Key,
    ProcessReport,
    Sample,
    Sampled,
    as_most,
    is_as_formula,
    plus,
    rows_of,
    show,
    trace_events,
    waiting_times,
)
from lightning_boost.callbacks.traffic_formula import ModelCall, TrafficFormula
from lightning_boost.collectives import CollectiveLog, count_collectives
from lightning_boost.communication_trace import WHOLE_WORLD, CommunicationTrace, axes_of_groups
from lightning_boost.cost import Volume
from lightning_boost.mesh import DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS

REPORT_NAME = "communication.json"
TRACE_NAME = "communication_trace.json"


class CommunicationProfiler(Callback):
    """Count what the processes of a run send one another, against the formula, and time it every n steps.

    Collectives of the tensor axis are counted in every training step and compared with the formula; a difference is
    warned of, and shown in red. In sampled steps, the second of a fit and every n-th from there, all axes are recorded
    with their times; steps between take no time stamps. Validation is left out. Process 0 keeps the figures of all
    processes in ``communication.json`` and the samples as a trace for Chrome or Perfetto in
    ``communication_trace.json``, both beside the logs, and shows a table when the fit ends.

    Args:
        every_n_steps: Optimizer steps from one sample to the next.
        traced_steps: How many samples the trace holds, the latest.

    Raises:
        ValueError: If an option is out of range.
    """

    def __init__(self, *, every_n_steps: int = 100, traced_steps: int = 3) -> None:
        super().__init__()
        for name, value in (("every_n_steps", every_n_steps), ("traced_steps", traced_steps)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} ({value!r}) must be a whole number of at least 1.")
        self.every_n_steps = every_n_steps
        self.traced_steps = traced_steps
        self._watch = ExitStack()
        self._begin_run(0)

    def _begin_run(self, step: int) -> None:
        self._watch.close()
        self._due = step + 1
        self._step_before: int | None = None
        self._log: CollectiveLog | None = None
        self._calls: list[ModelCall] = []
        self._trace: CommunicationTrace | None = None
        self._sample: Sample | None = None
        self._began = 0.0
        self._num_steps = self._num_batches = 0
        self._counted: dict[Key, Volume] = {}
        self._expected: dict[Key, Volume] = {}
        self._has_warned = False
        self._missing_because: str | None = None
        self._reports: list[ProcessReport] = []
        self._sampled: list[Sampled] = []
        self._traced: list[deque[Sample]] = []
        self._offsets: list[float] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that no other one would hear the same collectives.

        Raises:
            ValueError: If the Trainer has several.
        """
        given = sum(isinstance(callback, CommunicationProfiler) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        if given > 1:
            raise ValueError(
                f"callback CommunicationProfiler must be given once, and is given {given} times. Leave out all but one."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget an earlier run, and find out what stands on this process."""
        self._begin_run(trainer.global_step)
        self._formula = TrafficFormula(trainer, pl_module)
        self._missing_because = self._formula.missing_because
        mesh = pl_module.device_mesh
        self._axes = axes_of_groups(mesh)
        names = mesh.mesh_dim_names or () if mesh is not None else ()
        places = zip(("tensor", "pipeline", "data"), (TENSOR_AXIS, PIPELINE_AXIS, DATA_AXIS), strict=True)
        self._position = (
            {} if mesh is None else {axis: mesh[name].get_local_rank() for axis, name in places if name in names}
        )
        # asks process 0, so every process must call it
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to count, and to record if it is time."""
        self._watch.close()
        step = trainer.global_step
        is_first_of_step = step != self._step_before
        self._step_before = step
        if is_first_of_step:
            self._sample = Sample(step) if step >= self._due else None
        self._calls = self._watch.enter_context(self._formula.calls_noted())
        self._log = self._watch.enter_context(count_collectives())
        if self._sample is not None:
            is_cuda = pl_module.device.type == "cuda"
            self._trace = self._watch.enter_context(CommunicationTrace(self._axes, is_cuda=is_cuda).open())
            self._began = _now(is_cuda=is_cuda)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Note that backward is over."""
        trace = self._trace
        if trace is None:
            return
        trace.is_in_step = True
        if not pl_module.automatic_optimization:
            # the batch may go on with another forward, for another optimizer
            self._watch.callback(optimizer.register_step_post_hook(lambda *_: trace.end_step()).remove)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add what was counted, and compare it with the formula; finish a sample at the end of its step."""
        if self._log is None:
            return
        if self._sample is not None:
            self._sample.began.append(self._began)
            self._sample.lasted.append(_now(is_cuda=pl_module.device.type == "cuda") - self._began)
        log, trace = self._log, self._trace
        self._stop()
        has_stepped = trainer.global_step != self._step_before
        self._num_steps += has_stepped
        self._num_batches += 1
        self._add(log, self._calls, trainer.global_step - has_stepped)
        if self._sample is not None and trace is not None:
            self._sample.events += trace.events()
            if has_stepped:
                self._finish_sample(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave validation out, where a batch before it was skipped."""
        self._stop()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave nothing open where a batch was skipped."""
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing open."""
        self._stop()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the counts of all steps, and show the table on process 0."""
        self._stop()
        self._sample = None
        if self._num_steps == 0:
            return
        self._gather()
        if trainer.is_global_zero:
            self._write()
            self._show()

    def _stop(self) -> None:
        self._watch.close()
        self._log = self._trace = None

    def _add(self, log: CollectiveLog, calls: list[ModelCall], step: int) -> None:
        for key, traffic in log.traffic.items():
            axis = self._axes.get(log.groups[key], WHOLE_WORLD)
            mine = Key(axis, key.chunk, key.pass_, key.operation)
            self._counted[mine] = plus(self._counted.get(mine), Volume(traffic.launches, traffic.values, traffic.bytes))
        if self._missing_because is not None or self._formula.size == 1:
            return
        if not calls:
            self._missing_because = "a training step did not call the model as a whole"
            return
        for (operation, chunk, pass_), volume in self._formula.expected(calls).items():
            mine = Key("tensor", chunk, pass_, operation)
            self._expected[mine] = plus(self._expected.get(mine), volume)
        if not self._has_warned:
            self._compare(step)

    def _compare(self, step: int) -> None:
        report = self._report(None)
        keys = {*self._counted, *self._expected}
        different = [key for key in keys if is_as_formula(key, report) is False]
        # one process of each stage is enough
        if different and not any(self._position.get(axis) for axis in ("tensor", "data")):
            warnings.warn(_describe(different, report, step), RuntimeWarning, stacklevel=2)
        self._has_warned = bool(different)

    def _report(self, sample: Sample | None) -> ProcessReport:
        return ProcessReport(
            self._position,
            socket.gethostname(),
            self._num_steps,
            self._counted,
            self._expected,
            self._missing_because,
            sample,
        )

    def _finish_sample(self, trainer: Trainer) -> None:
        sample, self._sample = self._sample, None
        assert sample is not None
        sample.seconds = sum(sample.lasted)
        self._due = sample.step + self.every_n_steps
        self._gather(sample)
        if trainer.is_global_zero:
            self._write()
        shares = self._shares(sample)
        for logger in trainer.loggers if shares else ():
            logger.log_metrics(shares, step=sample.step)

    def _shares(self, sample: Sample) -> dict[str, float]:
        """Return which share of the step this process was blocked by each axis, where that is known."""
        blocked: dict[str, float | None] = {}
        for event in sample.events:
            so_far = blocked.get(event.axis, 0.0)
            blocked[event.axis] = None if so_far is None or event.blocked is None else so_far + event.blocked
        return {
            f"communication/{axis}_share": seconds / sample.seconds
            for axis, seconds in blocked.items()
            if seconds is not None
        }

    def _gather(self, sample: Sample | None = None) -> None:
        """Take over the figures of all processes, and the sample if there is one."""
        mine = self._report(sample), time.time() - time.perf_counter()
        everyones: list[Any] = [mine]
        if dist.is_initialized():
            everyones = [None] * dist.get_world_size()
            dist.all_gather_object(everyones, mine)
        self._reports = [report for report, _ in everyones]
        if not self._sampled:
            self._sampled = [Sampled() for _ in everyones]
            self._traced = [deque(maxlen=self.traced_steps) for _ in everyones]
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
        found = [is_as_formula(key, report) for report in self._reports for key in {*report.counted, *report.expected}]
        known = [same for same in found if same is not None]
        return all(known) if known else None

    def _write(self) -> None:
        rows = [rows_of(*of_process) for of_process in zip(self._reports, self._sampled, strict=True)]
        report = {
            "every_n_steps": self.every_n_steps,
            "num_steps": self._num_steps,
            "num_batches": self._num_batches,
            "sampled_steps": self._sampled[0].steps,
            "step_ms": [1e3 * sampled.seconds / max(1, len(sampled.steps)) for sampled in self._sampled],
            "is_as_formula": self._is_as_formula,
            "no_formula_because": self._missing_because,
            "processes": [
                {"process": index, **of_process.position, "rows": rows[index]}
                for index, of_process in enumerate(self._reports)
            ],
        }
        trace = {
            "displayTimeUnit": "ms",
            "traceEvents": trace_events(
                self._traced, [of_process.position for of_process in self._reports], self._offsets
            ),
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, content in ((REPORT_NAME, report), (TRACE_NAME, trace)):
            # whoever reads while the run goes on finds a whole file
            partial = self._folder / f"{name}.partial"
            partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
            partial.replace(self._folder / name)

    def _show(self) -> None:
        rows = as_most([rows_of(*of_process) for of_process in zip(self._reports, self._sampled, strict=True)])
        verdict = {
            True: "All of the tensor axis as the formula says.",
            False: "The tensor axis moves something else than the formula says: rows in red.",
            None: "Nothing to compare with a formula"
            + (f": {self._missing_because}." if self._missing_because else "."),
        }[self._is_as_formula]
        sampled = self._sampled[0].steps
        shown = ", ".join(map(str, sampled[:3])) + (", …" if len(sampled) > 3 else "")
        times = f"Times are of {len(sampled)} sampled steps ({shown})." if sampled else "No step was sampled."
        shares = [f"{axis} {share:.1%}" for axis in AXES if (share := self._most_share(axis)) is not None]
        show(
            rows,
            [
                f"Tensor axis counted in {self._num_steps} steps. {verdict} {times}",
                f"Blocked, of a sampled step: {', '.join(shares) or 'n/a'}.",
                f"Also in {self._folder / REPORT_NAME}; trace in {self._folder / TRACE_NAME}",
            ],
        )

    def _most_share(self, axis: str) -> float | None:
        """Return the share of a step that an axis blocks the process that it blocks most."""
        shares = []
        for sampled in self._sampled:
            blocked = [times.blocked for key, times in sampled.times.items() if key.axis == axis]
            known = [seconds for seconds in blocked if seconds is not None]
            if blocked and len(known) == len(blocked):
                shares.append(sum(known) / sampled.seconds)
        return max(shares, default=None)


def _now(*, is_cuda: bool) -> float:
    if is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _describe(keys: list[Key], report: ProcessReport, step: int) -> str:
    key = min(keys)
    counted, expected = (volumes.get(key, Volume(0, 0, 0)) for volumes in (report.counted, report.expected))
    return (
        f"the tensor axis moves something else than the formula says, up to step {step}: {key.operation} of"
        f" {key.chunk}, {key.pass_}, was counted {counted.launches} times with {counted.bytes} bytes, and the formula"
        f" says {expected.launches} times with {expected.bytes}; so it is for {len(keys)} kinds of collectives. If the"
        " training_step does more with the model than one forward and backward, that is it; if not, report it."
    )
