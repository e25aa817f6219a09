"""What the profiler of communication leaves as it is, and runs that are not one plain fit under ``boost``."""

import contextlib
import csv
import io
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed import Work

from lightning_boost import LowRankLanguageModel, collectives, communication_trace
from lightning_boost.callbacks.communication_profiler import CommunicationProfiler
from lightning_boost.callbacks.gathered_report import REPORT_NAME
from tests.models import small_config
from tests.processes import run_processes
from tests.profiled_fit import data_for, figures_of, fit_profiled
from tests.users_module import trainer_for
from tests.watched_steps import StepWatch


class _CountingClock(communication_trace.HostClock):
    stamps = Counter()
    step = 0

    def stamp(self):
        self.stamps[self.step] += 1
        return super().stamp()


class _Noting(LowRankLanguageModel):
    def training_step(self, batch, batch_idx):
        _CountingClock.step = batch_idx
        loss = super().training_step(batch, batch_idx)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


def _steps(folder, is_profiled):
    communication_trace.HostClock = _CountingClock
    config, watch = small_config(attention_dropout=0.1), StepWatch()
    callbacks = [watch, CommunicationProfiler(every_n_steps=2)] if is_profiled else [watch]
    module = _Noting(config)
    torch.manual_seed(0)
    trainer_for(callbacks=callbacks, default_root_dir=folder).fit(module, data_for(config, 5))
    return watch.steps, module.losses, dict(_CountingClock.stamps)


def test_steps_between_take_no_time_stamp_and_no_operation_and_losses_are_the_same(tmp_path):
    plain, profiled = (run_processes(_steps, 2, tmp_path, is_profiled) for is_profiled in (False, True))
    for (steps, losses, _), (profiled_steps, same_losses, stamps) in zip(plain, profiled, strict=True):
        assert same_losses == losses
        assert stamps.keys() == {1, 3}
        assert [profiled_steps[step] for step in (2, 4)] == [steps[step] for step in (2, 4)]
        # the formula, when it is first worked out, asks which of two dtypes is the wider
        assert profiled_steps[0] == steps[0]._replace(operations=steps[0].operations + 1)


class _Skipping(LowRankLanguageModel):
    """Ends its first epoch in the middle of a step that is sampled."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.current_epoch == 0 and batch_idx == 3 else None

    def on_train_epoch_end(self):
        assert not collectives._open_logs


def _skip(folder):
    config = small_config()
    options = {"accumulate_grad_batches": 2, "max_epochs": 2}
    return fit_profiled(folder, _Skipping(config), data_for(config), data_for(config), **options)


def test_a_skipped_batch_leaves_nothing_open(tmp_path):
    for report, *_ in run_processes(_skip, 2, tmp_path):
        assert report["is_as_formula"] is True
        assert report["num_batches"] == 3 + 4
        assert report["sampled_steps"] == [1]


class _Failing(LowRankLanguageModel):
    def on_after_backward(self):
        if self.trainer.global_step == 1:
            raise RuntimeError("planted")


def _fail_and_go_on(folder):
    config = small_config()
    plain_wait = Work.wait
    module, profiler = _Failing(config), CommunicationProfiler(every_n_steps=1)
    trainer = trainer_for(callbacks=[profiler], default_root_dir=folder)
    with contextlib.suppress(RuntimeError):
        trainer.fit(module, data_for(config))
    is_closed = not collectives._open_logs and collectives._recorder is None and Work.wait is plain_wait
    hooks = sum(len(inner._forward_hooks) for inner in module.modules() if type(inner).__name__ == "LlamaForCausalLM")
    return is_closed, hooks


def test_an_exception_leaves_nothing_open(tmp_path):
    for is_closed, hooks in run_processes(_fail_and_go_on, 2, tmp_path):
        assert is_closed
        assert hooks == 1  # the strategy's own


def _fit_twice(folder):
    config = small_config()
    module, data = LowRankLanguageModel(config, max_steps=8), data_for(config)
    trainer = trainer_for(callbacks=[CommunicationProfiler(every_n_steps=2)], default_root_dir=folder)
    reports = []
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(module, data)
        dist.barrier()
        reports.append(json.loads((folder / REPORT_NAME).read_text()))
    return reports


def test_a_second_fit_begins_anew(tmp_path):
    (first, second), _ = run_processes(_fit_twice, 2, tmp_path)
    assert [report["num_steps"] for report in (first, second)] == [4, 4]
    assert [report["sampled_steps"] for report in (first, second)] == [[1, 3], [5, 7]]
    assert first["is_as_formula"]
    assert second["is_as_formula"]
    assert figures_of(first, 0) == figures_of(second, 0)


# ---- other strategies, and others beside it


def _fit_with(folder, strategy):
    config = small_config()
    if strategy == "model parallel":
        strategy = ModelParallelStrategy(tensor_parallel_size=2, data_parallel_size=1)
    logger = CSVLogger(folder, name="", version="")
    module = LowRankLanguageModel(config)
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    options = {"strategy": strategy, "logger": logger, "log_every_n_steps": 1}
    report, text, told = fit_profiled(folder, module, data_for(config), **options)
    with (folder / "metrics.csv").open() as file:
        logged = [{name for name, value in row.items() if value} for row in csv.DictReader(file)]
    return report, text, told, logged, num_bytes


@pytest.mark.parametrize(("strategy", "world_size"), [("auto", 1), ("ddp", 2), ("model parallel", 2)])
def test_another_strategy_has_no_formula(strategy, world_size, tmp_path):
    (report, text, told, logged, num_bytes), *_ = run_processes(_fit_with, world_size, tmp_path, strategy)
    assert told == []
    assert report["is_as_formula"] is None
    assert "Strategy does not split the model as 'boost' does" in report["no_formula_because"]
    assert "Nothing to compare with a formula" in text
    found = figures_of(report, 0)
    if strategy == "auto":
        assert found == {}
        assert text.startswith("No process sent another one anything.")
        assert len(logged) == 4
        assert {"step"} not in logged
    if strategy == "ddp":
        assert found["all", "backward", "other", "all_reduce"] == num_bytes


def _fit_beside_another(folder):
    config = small_config()
    trainer = trainer_for(callbacks=[CommunicationProfiler(), CommunicationProfiler()], default_root_dir=folder)
    with pytest.raises(ValueError, match="CommunicationProfiler must be given once, and is given 2 times"):
        trainer.fit(LowRankLanguageModel(config), data_for(config))


def test_two_of_them_are_refused(tmp_path):
    """Each would take the other's collectives, and leave its own ears behind."""
    run_processes(_fit_beside_another, 2, tmp_path)


class _FullDisk(LowRankLanguageModel):
    """Runs out of space at the second sample."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            plain = Path.write_text

            def write_half(path, text):
                plain(path, text[: len(text) // 2])
                raise OSError("no space left on device")

            Path.write_text = write_half
        return super().training_step(batch, batch_idx)


def _fit_until_the_disk_is_full(folder):
    config = small_config()
    with contextlib.suppress(OSError):
        fit_profiled(folder, _FullDisk(config), data_for(config))
    return json.loads((folder / REPORT_NAME).read_text())


def test_a_file_is_whole_or_the_one_before(tmp_path):
    (report,) = run_processes(_fit_until_the_disk_is_full, 1, tmp_path)
    assert report["sampled_steps"] == [1]


@pytest.mark.parametrize("option", ["every_n_steps", "traced_steps"])
def test_wrong_options_are_refused(option):
    with pytest.raises(ValueError, match=rf"{option} \(0\) must be a whole number of at least 1"):
        CommunicationProfiler(**{option: 0})
