"""A run that goes on sees the samples, the rates and the random numbers that the uninterrupted one would have seen."""

import json
import multiprocessing
import warnings

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_boost import BoostParallelStrategy, LowRankLanguageModel, TextDataModule
from lightning_boost.data.streams import StreamSource
from tests.models import small_config
from tests.processes import run_processes
from tests.users_module import VOCAB, UsersModule, trainer_for

NUM_SAMPLES = 48


class _Numbered(Dataset):
    """Samples that carry their number."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCAB, (8,), generator=generator)
        # drawn from the common random numbers, as augmentations are
        noisy = torch.where(torch.rand(8) < 0.2, torch.zeros_like(tokens), tokens)
        return {"input_ids": noisy, "labels": tokens, "number": torch.tensor(index)}


class _Noting(UsersModule):
    """Notes the samples that all replicas see, and draws random numbers of its own."""

    def __init__(self):
        super().__init__()
        self.seen, self.rates = [], []

    def training_step(self, batch, batch_idx):
        replicas = [None] * dist.get_world_size()
        dist.all_gather_object(replicas, batch["number"].tolist())
        self.seen.append(sorted({number for each in replicas for number in each}))
        self.rates.append(self.lr_schedulers().get_last_lr()[0])
        labels = batch["labels"].masked_fill(torch.rand(batch["labels"].shape) < 0.3, -100)
        return super().training_step({"input_ids": batch["input_ids"], "labels": labels}, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def _run(path, sampler, batch_size, stop=-1, resume=False, tensor=1, save_every=1):
    seed_everything(3, verbose=False)
    module = _Noting()
    trainer = trainer_for(
        strategy=BoostParallelStrategy(tensor),
        max_epochs=3,
        max_steps=stop,
        use_distributed_sampler=sampler == "distributed",
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(path, "{step}", every_n_train_steps=save_every, save_top_k=-1, save_last=False)],
        val_check_interval=3,
        limit_val_batches=1,
    )
    loader = DataLoader(_Numbered(), batch_size=batch_size, shuffle=sampler == "random")
    trainer.fit(module, loader, DataLoader(_Numbered(), batch_size=4), ckpt_path=resume or None)
    return module.seen, module.rates, module.losses


@pytest.mark.parametrize("sampler", ["distributed", "random", "sequential"])
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path, sampler):
    """In the middle of an epoch of 6 steps, at a validation, at an epoch's end; known_failures A54, A57, A73."""
    seen, rates, losses = run_processes(_run, 1, tmp_path / "a", sampler, 8)[0]
    assert len(seen) == 18
    for step in (5, 6, 8, 9):
        path = tmp_path / "a" / f"step={step}.ckpt"
        rest = run_processes(_run, 1, tmp_path / "b", sampler, 8, -1, path)[0]
        assert rest[0] == seen[step:], step
        assert rest[1] == pytest.approx(rates[step:]), step
        assert rest[2] == pytest.approx(losses[step:], rel=1e-5), step


def _twice(path, sampler):
    """Interrupt a run at an epoch's end, go on for one step, be interrupted and go on again."""
    whole, *_ = _run(path / "a", sampler, 8)
    for first, second in ((6, 7), (5, 6), (8, 9)):
        _run(path / "b", sampler, 8, second, path / "a" / f"step={first}.ckpt")
        rest, *_ = _run(path / "c", sampler, 8, -1, path / "b" / f"step={second}.ckpt")
        assert rest == whole[second:], (first, second)


@pytest.mark.parametrize("sampler", ["distributed", "random"])
def test_a_run_may_be_interrupted_twice(tmp_path, sampler):
    run_processes(_twice, 1, tmp_path, sampler)


def _orders(shares_loader):
    """Return the samples of each epoch, where training and validation read one loader or two."""
    # a daemon may not start the loader's workers
    multiprocessing.process.current_process()._config["daemon"] = False
    seed_everything(3, verbose=False)
    module = _Noting()
    train, evaluate = (DataLoader(_Numbered(), batch_size=8, shuffle=True, num_workers=1) for _ in range(2))
    trainer = trainer_for(
        max_epochs=3, use_distributed_sampler=False, strategy=BoostParallelStrategy(1), limit_val_batches=1
    )
    trainer.fit(module, train, train if shares_loader else evaluate)
    return module.seen


def test_one_loader_may_serve_training_and_validation():
    shared, apart = (run_processes(_orders, 1, shares)[0] for shares in (True, False))
    assert shared == apart
    assert shared[:6] != shared[6:12] != shared[12:]


class _Still(_Numbered):
    """Draws nothing in workers."""

    def __getitem__(self, index):
        tokens = torch.full((8,), index % VOCAB)
        return {"input_ids": tokens, "labels": tokens, "number": torch.tensor(index)}


def _with_workers(path, persistent, augments, resume):
    multiprocessing.process.current_process()._config["daemon"] = False
    seed_everything(3, verbose=False)
    module = _Noting()
    saving = ModelCheckpoint(path, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = trainer_for(
        max_epochs=3,
        use_distributed_sampler=False,
        strategy=BoostParallelStrategy(1),
        enable_checkpointing=True,
        callbacks=[saving],
    )
    samples = _Numbered() if augments else _Still()
    loader = DataLoader(samples, batch_size=8, shuffle=True, num_workers=2, persistent_workers=persistent)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader, ckpt_path=resume)
    warned = any("random numbers that are drawn in workers" in str(warning.message) for warning in caught)
    return module.seen, module.losses, warned


@pytest.mark.parametrize(("persistent", "augments"), [(False, True), (True, False)])
def test_a_loader_with_workers_goes_on_as_if_it_had_not_been_interrupted(tmp_path, persistent, augments):
    """In the first epoch of 6 steps, at its end and in the second; workers that live on draw their seed once."""
    whole, losses, warned = run_processes(_with_workers, 1, tmp_path / "a", persistent, augments, None)[0]
    assert not warned
    for step in (2, 6, 8):
        path = tmp_path / "a" / f"step={step}.ckpt"
        rest, *numbers = run_processes(_with_workers, 1, tmp_path / "b", persistent, augments, path)[0]
        assert rest == whole[step:], step
        assert numbers[0] == pytest.approx(losses[step:], rel=1e-5), step
        assert numbers[1] == (persistent and step >= 6)


def _two_loaders(path, resume):
    seed_everything(3, verbose=False)
    module = _Noting()
    step = module.training_step
    module.training_step = lambda batch, batch_idx: step(
        {name: torch.cat([part[name] for part in batch.values()]) for name in next(iter(batch.values()))}, batch_idx
    )
    samples = _Numbered()
    loaders = {"long": DataLoader(samples, batch_size=8), "short": DataLoader(Subset(samples, range(16)), batch_size=8)}
    trainer = trainer_for(
        use_distributed_sampler=False,
        strategy=BoostParallelStrategy(1),
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(path, "{step}", every_n_train_steps=1, save_top_k=-1)],
    )
    trainer.fit(module, CombinedLoader(loaders, "max_size_cycle"), ckpt_path=resume)
    return module.seen


def test_a_shorter_loader_that_begins_anew_goes_on_where_it_was(tmp_path):
    whole = run_processes(_two_loaders, 1, tmp_path / "a", None)[0]
    for step in (3, 5):
        assert run_processes(_two_loaders, 1, tmp_path / "b", tmp_path / "a" / f"step={step}.ckpt")[0] == whole[step:]


def _validated(every):
    seed_everything(3, verbose=False)
    module = _Noting()
    options = {"val_check_interval": every, "limit_val_batches": 2} if every else {"limit_val_batches": 0}
    trainer = trainer_for(max_epochs=2, use_distributed_sampler=False, strategy=BoostParallelStrategy(1), **options)
    loader = DataLoader(_Numbered(), batch_size=8, shuffle=True)
    trainer.fit(module, loader, DataLoader(_Numbered(), batch_size=4))
    return module.losses


def test_validating_more_often_changes_nothing():
    assert run_processes(_validated, 1, 0) == run_processes(_validated, 1, 2)


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "tensor"), [((2, 4), (1, 8), 1), ((1, 8), (2, 4), 1), ((2, 4), (2, 8), 2)]
)
def test_another_number_of_replicas_sees_the_samples_that_are_left(tmp_path, saved_by, loaded_by, tensor):
    """known_failures A56."""
    whole = run_processes(_run, saved_by[0], tmp_path / "a", "distributed", saved_by[1])[0]
    path = tmp_path / "a" / "step=8.ckpt"
    for rest in run_processes(_run, loaded_by[0], tmp_path / "b", "distributed", loaded_by[1], -1, path, tensor):
        assert rest[0] == whole[0][8:]
        assert rest[1] == pytest.approx(whole[1][8:])


def _error(path, batch_size):
    try:
        _run(path.parent / "b", "distributed", batch_size, -1, path)
    except ValueError as error:
        return str(error)
    return ""


def test_a_position_inside_a_batch_is_refused(tmp_path):
    run_processes(_run, 1, tmp_path, "distributed", 8, 7)
    (error,) = run_processes(_error, 1, tmp_path / "step=7.ckpt", 16)
    assert "batch_size (16) × replicas (1) must divide the 8 samples" in error


class _NotingText(LowRankLanguageModel):
    def training_step(self, batch, batch_idx):
        self.seen.append(batch["input_ids"].sum().item())
        return super().training_step(batch, batch_idx)


def _stream(folder, steps, resume):
    seed_everything(3, verbose=False)
    source = StreamSource(dataset="json", data_files=[str(folder / "text.jsonl")], shuffle_window=20)
    data = TextDataModule(train_streams=[source], sequence_length=16, batch_size=2)
    module = _NotingText(small_config(vocab_size=257, num_hidden_layers=1), warmup_steps=2, max_steps=30)
    module.seen = []
    trainer = trainer_for(
        max_steps=steps,
        max_epochs=-1,
        strategy=BoostParallelStrategy(1),
        use_distributed_sampler=True,
        limit_val_batches=0,
    )
    trainer.fit(module, data, ckpt_path=folder / "a.ckpt" if resume else None)
    if not resume:
        trainer.save_checkpoint(folder / "a.ckpt")
    return module.seen


@pytest.mark.parametrize("size", [1, 2])
def test_a_stream_goes_on_where_it_was(tmp_path, size):
    lines = [json.dumps({"text": f"document {number} " * (1 + number % 5)}) for number in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    whole = run_processes(_stream, size, tmp_path, 30, False)
    run_processes(_stream, size, tmp_path, 11, False)
    rest = run_processes(_stream, size, tmp_path, 30, True)
    assert [len(seen) for seen in rest] == [19] * size
    assert rest == [seen[11:] for seen in whole]
    assert len(set(map(tuple, whole))) == size
