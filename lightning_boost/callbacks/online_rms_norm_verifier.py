"""Whether online RMSNorm is the exact norm in a run, on the run's own activations."""

import json
import math
import re
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lightning_boost.tensor_parallel.verification import NormDifference, online_norms, verify_norms

FILE_NAME = "online_rms_norm.json"

TOLERANCES = {"bfloat16": 2e-2, "float32": 1e-5}
"""Largest relative difference of a token that rounding explains, with room; measured in docs/monitoring.md."""

FIGURES = ("max_absolute", "mean_absolute", "max_relative", "mean_relative")
"""What is logged of the worst norm, as ``online_rms_norm/…``, and shown of each."""

_WIDTH = 120
"""Of the table where the output is no terminal."""

Item = TypeVar("Item")


class OnlineRMSNormVerifier(Callback):
    """Compare each online norm and the factors behind it with the exact norm of the gathered input, every n steps.

    Norms are compared in the forward of the first micro-batch of a step, beginning with the first step of a fit. Steps
    between run as they would without this callback: no hook, no collective. A norm's difference is that of its worst
    replica; process 0 logs the worst norm, keeps each norm's worst step in ``online_rms_norm.json`` beside the logs and
    shows a table of them when the fit ends.

    Args:
        every_n_steps: Optimizer steps from one comparison to the next.
        tolerance: Largest relative difference of a token; ``None``: by dtype, 2e-2 for bf16 and 1e-5 for fp32.
        on_violation: What follows a larger one: ``"warn"``, or ``"stop"``, an error on all processes.
        log_each_norm: Whether each norm's figures are logged beside the worst, four for each.

    Raises:
        ValueError: If an option is out of range.
    """

    def __init__(
        self,
        *,
        every_n_steps: int = 100,
        tolerance: float | None = None,
        on_violation: Literal["warn", "stop"] = "warn",
        log_each_norm: bool = False,
    ) -> None:
        super().__init__()
        if type(every_n_steps) is not int or every_n_steps < 1:
            raise ValueError(f"every_n_steps ({every_n_steps!r}) must be a whole number of at least 1.")
        if tolerance is not None and not tolerance > 0:
            raise ValueError(f"tolerance ({tolerance}) must be above 0, or None for that of the dtype.")
        if on_violation not in ("warn", "stop"):
            raise ValueError(f"on_violation ({on_violation!r}) must be 'warn' or 'stop'.")
        self.every_n_steps = every_n_steps
        self.tolerance = tolerance
        self.on_violation = on_violation
        self.log_each_norm = log_each_norm
        self._watch = ExitStack()
        self._begin_run()

    def _begin_run(self) -> None:
        self._due = self._step = 0
        self._found: list[NormDifference] | None = None
        self._steps: list[int] = []
        self._worst: dict[str, tuple[int, NormDifference]] = {}

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that there is something to verify.

        Raises:
            ValueError: If no process has an online norm.
        """
        if not _of_all_processes(online_norms(pl_module)):
            layout = getattr(trainer.strategy, "sizes", None) or "one process"
            raise ValueError(
                f"OnlineRMSNormVerifier would verify nothing: on this layout ({layout}) no norm of the model is an"
                " online one. That takes Trainer(strategy='boost') with tensor_parallel_size of at least 2, and"
                " low-rank projections behind a norm. Leave the callback out, or train on such a layout."
            )
        self._begin_run()
        # asks process 0, so every process must call it
        self._path = Path(trainer.log_dir or trainer.default_root_dir) / FILE_NAME

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Put hooks on the norms, if it is time."""
        if trainer.global_step >= self._due:
            self._step = trainer.global_step
            self._found = self._watch.enter_context(verify_norms(pl_module))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the hooks away, and say what was found.

        Raises:
            RuntimeError: If a norm is above the tolerance, and that is to stop the run.
        """
        if self._found is None:
            return
        found = self._found
        self._stop_watching()
        # all processes hold the same afterwards, so they agree on whether to stop
        norms = _worst_of_each(_of_all_processes(found))
        if not norms:
            return
        self._steps.append(self._step)
        self._due = self._step + self.every_n_steps
        self._keep(norms)
        if trainer.is_global_zero:
            self._write()
        self._log(trainer, norms)
        violations = [norm for norm in norms if not self._is_within_tolerance(norm)]
        if violations and self.on_violation == "stop":
            self._show(trainer)
            raise RuntimeError(self._describe(violations, len(norms)))
        if violations:
            rank_zero_warn(self._describe(violations, len(norms)))

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave no hook behind where a batch was skipped."""
        self._stop_watching()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave no hook behind."""
        self._stop_watching()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the table on process 0.

        Raises:
            RuntimeError: If no norm was compared.
        """
        if not self._worst:
            raise RuntimeError(
                f"OnlineRMSNormVerifier verified nothing up to step {trainer.global_step}: the fit took no step, or its"
                " training_step did not run the model. Leave the callback out of such a fit."
            )
        self._show(trainer)

    def _stop_watching(self) -> None:
        self._watch.close()
        self._found = None

    def _keep(self, norms: Iterable[NormDifference]) -> None:
        for norm in norms:
            kept = self._worst.get(norm.name)
            if kept is None or _badness(norm) > _badness(kept[1]):
                self._worst[norm.name] = self._step, norm

    def _log(self, trainer: Trainer, norms: list[NormDifference]) -> None:
        shown = {"online_rms_norm": norms}
        if self.log_each_norm:
            shown |= {f"online_rms_norm/{norm.name}": [norm] for norm in norms}
        metrics = {
            f"{prefix}/{name}": _largest(getattr(norm, name) for norm in of_prefix)
            for prefix, of_prefix in shown.items()
            for name in FIGURES
        }
        # not by the module's own log, which drops what falls between two of log_every_n_steps
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=self._step)

    def _tolerance_for(self, norm: NormDifference) -> float:
        return self.tolerance if self.tolerance is not None else TOLERANCES.get(norm.dtype, TOLERANCES["float32"])

    def _is_within_tolerance(self, norm: NormDifference) -> bool:
        # false for NaN too
        return norm.max_relative <= self._tolerance_for(norm)

    def _describe(self, violations: list[NormDifference], num_norms: int) -> str:
        worst = max(violations, key=_badness)
        return (
            f"online RMSNorm at {worst.name} is {worst.max_relative:.1e} from the exact norm (step {self._step},"
            f" {worst.dtype}, relative, worst token) and must be within tolerance ({self._tolerance_for(worst):.1e});"
            f" {len(violations)} of {num_norms} norms are not. If rounding explains it, as docs/monitoring.md tells,"
            " give a larger tolerance; if not, the run does not train the model that one process would: report it."
        )

    def _write(self) -> None:
        report = {
            "every_n_steps": self.every_n_steps,
            "steps": self._steps,
            "is_within_tolerance": all(self._is_within_tolerance(norm) for _, norm in self._worst.values()),
            "norms": [
                _in_json({**asdict(norm), "step": step, "tolerance": self._tolerance_for(norm)})
                for step, norm in self._worst.values()
            ],
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # whoever follows the run must not read half a file
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
        unfinished.replace(self._path)

    def _show(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero:
            return
        title = f"online RMSNorm beside the exact norm, each at its worst; steps verified: {len(self._steps)}"
        table = Table(title=title, title_justify="left")
        table.add_column("norm", overflow="fold")
        for figure in FIGURES:
            table.add_column(figure.replace("_", "\n"), justify="right")
        for _, norm in self._worst.values():
            style = None if self._is_within_tolerance(norm) else "bold red"
            table.add_row(norm.name, *(f"{getattr(norm, figure):.1e}" for figure in FIGURES), style=style)
        tolerances = sorted({self._tolerance_for(norm) for _, norm in self._worst.values()})
        limits = ", ".join(f"{tolerance:.0e}" for tolerance in tolerances)
        num_violations = sum(not self._is_within_tolerance(norm) for _, norm in self._worst.values())
        console = Console(width=None if sys.stdout.isatty() else _WIDTH)
        console.print(table)
        console.print(
            f"Above the tolerance (max relative {limits}): {num_violations} of {len(self._worst)} norms."
            f" Also in {self._path}",
            soft_wrap=True,
            highlight=False,
        )


def _of_all_processes(items: Iterable[Item]) -> list[Item]:
    """Return the items of all processes, in their order; the same on each."""
    mine = list(items)
    if not dist.is_initialized():
        return mine
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return [item for theirs in everyones for item in theirs]


def _worst_of_each(found: Iterable[NormDifference]) -> list[NormDifference]:
    """Return one difference for each norm, in the order of the layers, whichever stage and replica they are from."""
    worst: dict[str, NormDifference] = {}
    for norm in found:
        if norm.name not in worst or _badness(norm) > _badness(worst[norm.name]):
            worst[norm.name] = norm
    return sorted(worst.values(), key=lambda norm: [int(number) for number in re.findall(r"\d+", norm.name)])


def _in_json(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields of a report with ``None`` for what is not finite, which JSON has no number for."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields.items()
    }


def _badness(norm: NormDifference) -> float:
    return _largest([norm.max_relative])


def _largest(values: Iterable[float]) -> float:
    """Return the largest value; what is not a number counts as infinite."""
    return max(math.inf if math.isnan(value) else value for value in values)
