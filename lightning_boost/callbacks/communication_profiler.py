"""What the processes of a run send one another, and what that takes of a step."""

import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from typing_extensions import override

from lightning_boost.callbacks.communication_report import ProcessReport
from lightning_boost.callbacks.counted_traffic import CountedTraffic
from lightning_boost.callbacks.gathered_report import GatheredReport
from lightning_boost.callbacks.sampled_steps import Sample, StepSampler
from lightning_boost.communication_trace import axes_of_groups
from lightning_boost.mesh import DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS


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
        self._is_watching = False
        self._step_before: int | None = None

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
        self._stop()
        mesh = pl_module.device_mesh
        axes = axes_of_groups(mesh)
        names = mesh.mesh_dim_names or () if mesh is not None else ()
        places = zip(("tensor", "pipeline", "data"), (TENSOR_AXIS, PIPELINE_AXIS, DATA_AXIS), strict=True)
        self._position = (
            {} if mesh is None else {axis: mesh[name].get_local_rank() for axis, name in places if name in names}
        )
        is_first_of_stage = not any(self._position.get(axis) for axis in ("tensor", "data"))
        self._traffic = CountedTraffic(trainer, pl_module, axes, warns=is_first_of_stage)
        is_cuda = pl_module.device.type == "cuda"
        self._sampler = StepSampler(self.every_n_steps, trainer.global_step + 1, axes, is_cuda=is_cuda)
        # asks process 0, so every process must call it
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        self._gathered = GatheredReport(folder, every_n_steps=self.every_n_steps, traced_steps=self.traced_steps)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to count, and to record if it is time."""
        self._stop()
        self._is_watching = True
        self._step_before = trainer.global_step
        self._watch.enter_context(self._traffic.open())
        self._sampler.begin_batch(trainer.global_step, self._watch)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Note that backward is over."""
        trace = self._sampler.trace
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
        if not self._is_watching:
            return
        has_stepped = trainer.global_step != self._step_before
        sample = self._sampler.end_batch(is_last_of_step=has_stepped)
        self._stop()
        self._traffic.add_batch(trainer.global_step - has_stepped, has_stepped=has_stepped)
        if sample is not None:
            self._take_over(sample, trainer)

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
        if self._traffic.counts.num_steps == 0:
            return
        self._gathered.gather(self._report(None))
        if trainer.is_global_zero:
            self._gathered.write()
            self._gathered.show()

    def _stop(self) -> None:
        self._watch.close()
        self._is_watching = False

    def _report(self, sample: Sample | None) -> ProcessReport:
        return ProcessReport(self._position, socket.gethostname(), self._traffic.counts, sample)

    def _take_over(self, sample: Sample, trainer: Trainer) -> None:
        self._gathered.gather(self._report(sample))
        if trainer.is_global_zero:
            self._gathered.write()
        shares = sample.blocked_shares()
        metrics = {f"communication/{axis}_share": share for axis, share in shares.items() if share is not None}
        for logger in trainer.loggers if metrics else ():
            logger.log_metrics(metrics, step=sample.step)
