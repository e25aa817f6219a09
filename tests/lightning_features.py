"""What Lightning's Trainer, callbacks and hooks do, each as a small run that gives numbers to compare."""

import csv
import re
import time
from datetime import timedelta

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from tests.feature_run import BATCH, ONE, PAGE, REPLICATE, ROWS, SHARD, Module, feature
from tests.models import masked_batch
from tests.users_module import VOCAB, UsersModule


def option(name, *, on_replicas=False, **options):
    """Register a feature that is nothing but options of the Trainer; its numbers are the logged ones."""

    @feature(name, on_replicas=on_replicas)
    def run_with(run):
        trainer = run.fit(**options)
        numbers = {key: value.item() for key, value in trainer.callback_metrics.items()}
        return {**numbers, "steps": trainer.global_step, "epochs": trainer.current_epoch}


# ---- options of the Trainer

option("`accumulate_grad_batches`", accumulate_grad_batches=2, on_replicas=True)
option("`gradient_clip_val` by norm", gradient_clip_val=0.1, on_replicas=True)
option("`gradient_clip_val` by value", gradient_clip_val=1e-3, gradient_clip_algorithm="value", on_replicas=True)
option("`limit_train_batches`, `limit_val_batches`", limit_train_batches=0.5, limit_val_batches=1)
option("`overfit_batches`", overfit_batches=1, max_epochs=3)
option("`max_steps`", max_steps=3)
option("`fast_dev_run`", fast_dev_run=2)
option("`check_val_every_n_epoch`", check_val_every_n_epoch=2, max_epochs=3)
option("`val_check_interval`", val_check_interval=2)
option("`num_sanity_val_steps`", num_sanity_val_steps=-1, on_replicas=True)
option("`inference_mode`", inference_mode=False)
option("`sync_batchnorm`", sync_batchnorm=True)
option("`detect_anomaly`", detect_anomaly=True, on_replicas=True)
option("profiler `simple`", profiler="simple")
option("profiler `advanced`", profiler="advanced")
option("`ModelSummary`, `RichModelSummary`", callbacks=[lightning_callbacks.RichModelSummary(max_depth=2)])


class _Slow(Module):
    """Learns nothing, so that it matters to no weight when it stops; its last process is late after each step."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(0.2)


def stops_in_time(run, **options):
    """Train without another end than a second; processes reach it at different steps, and stop together."""
    trainer = run.fit(_Slow, max_epochs=-1, limit_val_batches=0, **options)
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, trainer.global_step)
    return {"stops": len(set(everyones)), "has stepped": trainer.global_step > 0}


@feature("`max_time`", on_replicas=True)
def max_time(run):
    return stops_in_time(run, max_time="00:00:00:01")


@feature("`deterministic`")
def deterministic(run):
    try:
        run.fit(deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)


@feature("profiler `pytorch`")
def pytorch_profiler(run):
    profiler = PyTorchProfiler(dirpath=run.folder, filename="profile")
    run.fit(profiler=profiler)
    (run.folder / "names").write_text(str(profiler.summary()))
    return {"names modules": any("mlp.up_proj" in event.key for event in profiler.function_events)}


@feature("`barebones`")
def barebones(run):
    unset = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"))

    class Silent(UsersModule):
        log = lambda self, *_, **__: None  # noqa: E731 - Lightning refuses to log in this mode

    run.fit(Silent, barebones=True, **unset)


@feature("`reload_dataloaders_every_n_epochs`")
def reload_dataloaders(run):
    torch.manual_seed(0)
    run.module, loads = Module(), []
    run.module.train_dataloader = lambda: loads.append(0) or run.loader()
    run.trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1, limit_val_batches=0).fit(run.module)
    return {"loads": len(loads)}


@feature("`use_distributed_sampler`", on_replicas=True)
def distributed_sampler(run):
    """Lightning gives each replica its rows; in order, so that one process can be given the same batches."""
    torch.manual_seed(0)
    run.module, rows = Module(), masked_batch(VOCAB, rows=ROWS)["input_ids"]
    loader = DataLoader(
        [{"input_ids": row, "labels": row} for row in rows],
        batch_size=BATCH // 2 if run.layout in {REPLICATE, SHARD} else BATCH,
    )
    trainer = run.trainer(use_distributed_sampler=True, overfit_batches=4)
    trainer.fit(run.module, loader)
    return {"train_loss": trainer.callback_metrics["train_loss"].item()}


# ---- callbacks and loggers


@feature("`GradientAccumulationScheduler`", on_replicas=True)
def accumulation_scheduler(run):
    run.fit(max_epochs=2, callbacks=[lightning_callbacks.GradientAccumulationScheduler({0: 1, 1: 2})])


@feature("`EarlyStopping`", on_replicas=True)
def early_stopping(run):
    """Replicas see different values of what is watched, and stop together; known_failures A82."""

    class Differs(Module):
        def validation_step(self, batch, batch_idx):
            mine = dist.get_rank() if run.layout in {REPLICATE, SHARD} else 1
            # process 0 gets better and better
            self.log("watched", float(self.current_epoch if mine else -self.current_epoch))

    stopping = lightning_callbacks.EarlyStopping("watched", patience=1)
    return {"epochs": run.fit(Differs, max_epochs=6, callbacks=[stopping]).current_epoch}


@feature("`ModelCheckpoint`", on_replicas=True)
def model_checkpoint(run):
    saving = lightning_callbacks.ModelCheckpoint(
        run.folder / "checkpoints", monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}"
    )
    trainer = run.fit(max_epochs=3, enable_checkpointing=True, callbacks=[saving])
    best = trainer.validate(run.module, run.loader(rows=12), ckpt_path="best", verbose=False)[0]
    return {**best, "files": sorted(path.name for path in (run.folder / "checkpoints").iterdir())}


class _Scheduled(Module):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"}]


@feature("loggers, `LearningRateMonitor`")
def loggers(run):
    """One folder, one line a step; known_failures A83."""
    monitor = lightning_callbacks.LearningRateMonitor()
    run.fit(_Scheduled, logger=CSVLogger(run.folder), callbacks=[monitor], log_every_n_steps=1)
    dist.barrier()
    (version,) = (run.folder / "lightning_logs").iterdir()
    with (version / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    return {
        f"{number} {name}": float(value) for number, line in enumerate(lines) for name, value in line.items() if value
    }


@feature("`DeviceStatsMonitor`")
def device_stats(run):
    # what Lightning asks of a package that is not installed everywhere
    CPUAccelerator.get_device_stats = lambda self, device: {"percent": 12.5}
    run.fit(callbacks=[lightning_callbacks.DeviceStatsMonitor(cpu_stats=False)], logger=CSVLogger(run.folder / "stats"))


@feature("`ReduceLROnPlateau`")
def plateau(run):
    class OnPlateau(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    trainer = run.fit(OnPlateau, max_epochs=3)
    return {"rate": trainer.optimizers[0].param_groups[0]["lr"]}


@feature("`Timer`", on_replicas=True)
def timer(run):
    return stops_in_time(run, callbacks=[lightning_callbacks.Timer(timedelta(seconds=1))])


@feature("`LambdaCallback`")
def own_callback(run):
    seen = []
    run.fit(callbacks=[lightning_callbacks.LambdaCallback(on_train_batch_end=lambda *_: seen.append(0))])
    return {"batches": len(seen)}


@feature("`LearningRateFinder`, `Tuner.lr_find`")
def rate_finder(run):
    """Not compared on replicas, where Lightning goes by the losses of the first."""

    class WithRate(Module):
        rate = 1e-2

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=self.rate, eps=1e-4)

    finder = lightning_callbacks.LearningRateFinder(1e-5, 1e-2, num_training_steps=20, attr_name="rate")
    run.fit(WithRate, max_epochs=6, callbacks=[finder])
    return {"rate": run.module.rate}


@feature("`predict`, `BasePredictionWriter`", on_replicas=True)
def predict(run):
    class Writer(lightning_callbacks.BasePredictionWriter):
        def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
            self.logits = dict(zip(sum(batch_indices[0], []), torch.cat(predictions), strict=True))

    run.fit()
    writer, rows = Writer("epoch"), masked_batch(VOCAB, rows=8)["input_ids"]
    trainer = run.trainer(callbacks=[writer], use_distributed_sampler=True)
    trainer.predict(run.module, DataLoader([{"input_ids": row} for row in rows], batch_size=2))
    everyones = [writer.logits]
    if run.layout in {REPLICATE, SHARD}:
        everyones = [None, None]
        dist.all_gather_object(everyones, writer.logits)
    logits = {index: row for own in everyones for index, row in own.items()}
    return {str(index): logits[index].sum().item() for index in sorted(logits)}


# ---- the module's own ways


@feature("`configure_gradient_clipping`", on_replicas=True)
def own_clipping(run):
    class Clips(Module):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

    run.fit(Clips)


@feature("`torch.nn.utils.clip_grad_norm_`", on_replicas=True)
def torchs_clipping(run):
    class Clips(Module):
        def on_before_optimizer_step(self, optimizer):
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)

    run.fit(Clips)


class _Manual(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self._loss(batch))
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()


class _Several(_Manual):
    def configure_optimizers(self):
        parameters = list(self.parameters())
        half = len(parameters) // 2
        return torch.optim.SGD(parameters[:half], lr=0.1), torch.optim.AdamW(parameters[half:], lr=1e-2, eps=1e-4)

    def training_step(self, batch, batch_idx):
        self.manual_backward(self._loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


class _Toggling(_Several):
    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(self._loss(batch))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


class _ManualWindow(_Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        is_last = batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=is_last):
            self.manual_backward(self._loss(batch) / 2)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


for _name, _module in {
    "manual optimisation": _Manual,
    "several optimizers": _Several,
    "`toggle_optimizer`": _Toggling,
    "`toggle_model(sync_grad=…)`": _ManualWindow,
}.items():
    feature(_name, on_replicas=True)(lambda run, module=_module: run.fit(module) and None)


def documented_average():
    """Give the callback of the page."""
    names: dict = {}
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(block, PAGE.name, "exec"), names)
    return names["AverageOfWeights"](decay=0.5)


@feature("an average of weights", on_replicas=True)
def average(run):
    """Lightning's own, where there is one process."""
    callback = lightning_callbacks.EMAWeightAveraging(decay=0.5) if run.layout == ONE else documented_average()
    run.fit(callbacks=[callback], limit_val_batches=0, accumulate_grad_batches=2, max_epochs=2)


@feature("frozen parameters", on_replicas=True)
def frozen(run):
    class Frozen(Module):
        def configure_optimizers(self):
            self.net.model.layers[0].requires_grad_(False)
            return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1)

    run.fit(Frozen)


@feature("`self.all_gather`, `self.log(sync_dist=True)`", on_replicas=True)
def gathers(run):
    class Gathers(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.gathered = self.all_gather(loss.detach())
            return loss

    trainer = run.fit(Gathers)
    logged = trainer.callback_metrics["train_loss"].item()
    return {"gathered": run.module.gathered.mean().item(), "logged": logged}


@feature("`fit` twice, then `validate` and `test`", on_replicas=True)
def twice(run):
    trainer = run.fit()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(run.module, run.loader())
    validated = trainer.validate(run.module, run.loader(rows=12), verbose=False)[0]["val_loss"]
    tested = trainer.test(run.module, run.loader(rows=12), verbose=False)[0]["val_loss"]
    return {"steps": trainer.global_step, "validated": validated, "tested": tested}


def _told(name, calls):
    return lambda self, *_, **__: calls.append(name)


@feature("order of hooks", on_replicas=True)
def hooks(run):
    names = [name for name in dir(pl.Callback) if name.startswith(("on_", "setup", "teardown"))]
    calls = []
    callback = type("Told", (pl.Callback,), {name: _told(f"callback {name}", calls) for name in names})()
    shared = [name for name in names if hasattr(pl.LightningModule, name) and name != "setup"]
    module = type("Told", (Module,), {name: _told(f"module {name}", calls) for name in shared})
    run.fit(module, callbacks=[callback], accumulate_grad_batches=2, max_epochs=2)
    return {"calls": calls}
