"""Tokens per second, by a clock that only moves where the run is told to take time."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_boost.callbacks import token_throughput
from lightning_boost.callbacks.token_throughput import TokenThroughput

FETCHING, STEPPING, VALIDATING, SAVING = 3.0, 1.0, 1000.0, 5000.0
TOKENS = 8


class _Clock:
    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


class _Slow(Dataset):
    """Rows that take time to get, one batch each."""

    def __init__(self, clock):
        self.clock = clock

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.clock.now += FETCHING
        return {"input_ids": torch.zeros(TOKENS, dtype=torch.long)}


class _Module(pl.LightningModule):
    def __init__(self, clock):
        super().__init__()
        self.clock, self.weight, self.rates = clock, torch.nn.Parameter(torch.ones(1)), []

    def training_step(self, batch, batch_idx):
        self.clock.now += STEPPING
        return self.weight.square().sum()

    def validation_step(self, batch, batch_idx):
        self.clock.now += VALIDATING

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Rates(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        rate = trainer.callback_metrics.get("tokens_per_second")
        pl_module.rates.append(None if rate is None else rate.item())

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        pl_module.clock.now += SAVING


def _rates(monkeypatch, tmp_path, num_runs=1, **options):
    warnings.filterwarnings("ignore")
    clock = _Clock()
    monkeypatch.setattr(token_throughput, "time", clock)
    module = _Module(clock)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[TokenThroughput(window=1, warmup_steps=1), _Rates(), *options.pop("callbacks", [])],
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    for run in range(num_runs):
        trainer.fit_loop.max_epochs = run + 1
        trainer.fit(module, DataLoader(_Slow(clock)), DataLoader(_Slow(clock), batch_size=8))
    return module.rates


def test_waiting_for_data_counts(monkeypatch, tmp_path):
    rates = _rates(monkeypatch, tmp_path, enable_checkpointing=False)
    assert rates == [None] + [pytest.approx(TOKENS / (FETCHING + STEPPING))] * 7


def test_validation_and_checkpoints_do_not_count(monkeypatch, tmp_path):
    saving = pl.callbacks.ModelCheckpoint(every_n_train_steps=3, save_top_k=-1)
    rates = _rates(monkeypatch, tmp_path, val_check_interval=2, callbacks=[saving])
    whole, alone = TOKENS / (FETCHING + STEPPING), TOKENS / STEPPING
    # validated after the second, fourth and sixth step, saved after the third and sixth
    assert rates == [None, *map(pytest.approx, [whole, alone, alone, alone, whole, alone, whole])]


def test_each_run_warms_up(monkeypatch, tmp_path):
    """What an earlier run took does not count in the next one."""
    rates = _rates(monkeypatch, tmp_path, num_runs=2, enable_checkpointing=False, limit_val_batches=0)
    assert rates == ([None] + [pytest.approx(TOKENS / (FETCHING + STEPPING))] * 7) * 2
