"""Checkpoints that are written while training goes on."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.distributed_c10d import _set_pg_timeout

from lightning_boost import BoostParallelStrategy
from lightning_boost.new_directory import remove
from lightning_boost.strategy import resumable
from tests.models import whole
from tests.processes import run_processes
from tests.users_module import UsersModule, loader, trainer_for

SECONDS = 0.4


def _slow_writer(seconds=SECONDS):
    write = FileSystemWriter.write_data

    def slowly(self, *arguments):
        time.sleep(seconds)
        return write(self, *arguments)

    FileSystemWriter.write_data = slowly


class _Noting(UsersModule):
    """Notes its weights as a checkpoint is asked for, and what is on the disk a step later."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.weights, self.there = folder, {}, []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.global_step == 1:
            self.weights = {name: whole(parameter).clone() for name, parameter in self.named_parameters()}
            self.trainer.save_checkpoint(self.folder / "a.ckpt")
        self.there.append(sorted(entry.name for entry in self.folder.iterdir()))


def _train(folder, in_background, size):
    _slow_writer()
    torch.manual_seed(0)
    module = _Noting(folder)
    strategy = BoostParallelStrategy(size, save_in_background=in_background)
    trainer_for(strategy=strategy).fit(module, loader(num_batches=4))
    # another Trainer, since the first one's module has gone on
    other = UsersModule()
    trainer_for(strategy=BoostParallelStrategy(size)).validate(
        other, loader(), ckpt_path=folder / "a.ckpt", verbose=False
    )
    same = all(torch.equal(whole(parameter), module.weights[name]) for name, parameter in other.named_parameters())
    return module.losses, module.there, same


@pytest.mark.parametrize("tensor", [1, 2])
def test_what_is_written_is_the_state_as_the_save_was_asked_for(tmp_path, tensor):
    """known_failures A75: three steps are taken while two processes write."""
    folders = [tmp_path / name for name in ("waiting", "going on")]
    for folder in folders:
        folder.mkdir()
    waiting = run_processes(_train, 2, folders[0], False, tensor)
    going_on = run_processes(_train, 2, folders[1], True, tensor)
    assert [losses for losses, _, _ in going_on] == [losses for losses, _, _ in waiting]
    assert all(same for _, _, same in (*waiting, *going_on))
    assert waiting[0][1][0] == ["a.ckpt"]
    assert going_on[0][1][0] == [".unfinished"]
    assert [entry.name for entry in folders[1].iterdir()] == ["a.ckpt"]


class _Improving(UsersModule):
    def training_step(self, batch, batch_idx):
        self.log("number", float(batch_idx))
        return super().training_step(batch, batch_idx)


def _keep_best(folder):
    """Save after every step and keep one; return what else was complete as each outdated one was removed."""
    _slow_writer()
    strategy = BoostParallelStrategy(2, save_in_background=True)
    callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=1, monitor="number", mode="max")
    trainer = trainer_for(strategy=strategy, enable_checkpointing=True, callbacks=[callback])
    others = []

    def noting(path):
        others.append([entry.name for entry in folder.glob("*.ckpt") if entry != path])
        remove(path)

    resumable.remove = noting
    trainer.fit(_Improving(), loader(num_batches=4))
    dist.barrier()
    return others, [entry.name for entry in folder.iterdir()]


def test_an_outdated_checkpoint_goes_only_once_the_next_one_is_complete(tmp_path):
    """known_failures A64."""
    (others, left), (_, left_too) = run_processes(_keep_best, 2, tmp_path)
    assert others == [["step=2.ckpt"], ["step=3.ckpt"], ["step=4.ckpt"]]
    assert left == left_too == ["step=4.ckpt"]


def _cannot_write(folder, in_background, failing):
    if dist.get_rank() == failing:

        def refuse(self, *arguments):
            raise OSError(28, "No space left on device")

    module, strategy = UsersModule(), BoostParallelStrategy(2, save_in_background=in_background)
    trainer = trainer_for(strategy=strategy)
    trainer.fit(module, loader(num_batches=1))
    trainer.save_checkpoint(folder / "a.ckpt")
    strategy.finish_saving()
    if dist.get_rank() == failing:
        FileSystemWriter.write_data = refuse
    try:
        trainer.save_checkpoint(folder / "a.ckpt")
        strategy.finish_saving()
    except OSError as error:
        message = str(error)
    else:
        message = ""
    left = sorted(entry.name for entry in folder.iterdir())
    trainer_for(strategy=BoostParallelStrategy(2)).validate(
        module, loader(), ckpt_path=folder / "a.ckpt", verbose=False
    )
    return message, left


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("in_background", [False, True])
def test_a_process_that_cannot_write_is_told_by_all_and_harms_nothing(tmp_path, in_background, failing):
    """known_failures A65."""
    for message, left in run_processes(_cannot_write, 2, tmp_path, in_background, failing):
        assert f"process {failing} says OSError" in message
        assert "No space left on device" in message
        assert "What was there before is untouched" in message
        assert left == ["a.ckpt"]


def _fails_while_outdated(folder):
    """Keep one checkpoint, fail to write the second, and go on from the first with the same Trainer."""
    strategy = BoostParallelStrategy(2, save_in_background=True)
    callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=1, monitor="number", mode="max")
    trainer = trainer_for(strategy=strategy, enable_checkpointing=True, callbacks=[callback], max_epochs=2)
    write, calls = FileSystemWriter.write_data, []

    def once(self, *arguments):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return write(self, *arguments)

    FileSystemWriter.write_data = once
    module = _Improving()
    try:
        trainer.fit(module, loader(num_batches=2))
    except OSError as error:
        message = str(error)
    trainer.validate(module, loader(), ckpt_path=folder / "step=1.ckpt", verbose=False)
    return message, [entry.name for entry in folder.iterdir()]


def test_a_save_that_fails_does_not_take_the_one_before_with_it(tmp_path):
    for message, left in run_processes(_fails_while_outdated, 2, tmp_path):
        assert "No space left on device" in message
        assert left == ["step=1.ckpt"]


def _side_by_side(folder):
    """Save in the background while another strategy saves beside it."""
    _slow_writer()
    trainers = [trainer_for(strategy=BoostParallelStrategy(2, save_in_background=True)) for _ in range(2)]
    for trainer, module in zip(trainers, (UsersModule(), UsersModule()), strict=True):
        trainer.fit(module, loader(num_batches=1))
    for name, trainer in zip("ab", trainers, strict=True):
        trainer.save_checkpoint(folder / f"{name}.ckpt")
    for trainer in trainers:
        trainer.strategy.finish_saving()
    return sorted(entry.name for entry in folder.iterdir())


def test_two_runs_may_save_side_by_side(tmp_path):
    assert run_processes(_side_by_side, 2, tmp_path) == [["a.ckpt", "b.ckpt"]] * 2


TIMEOUT = timedelta(seconds=2)


class _SavesOnce(UsersModule):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 0:
            self.trainer.save_checkpoint(self.path)


def _slower_than_the_timeout(path, in_background):
    """One process writes for longer than any collective of training may take."""
    strategy = BoostParallelStrategy(2, save_in_background=in_background, timeout=TIMEOUT)
    _set_pg_timeout(TIMEOUT)
    if dist.get_rank() == 1:
        _slow_writer(2 * TIMEOUT.total_seconds())
    module = _SavesOnce()
    module.path = path
    trainer_for(strategy=strategy).fit(module, loader(num_batches=4))
    return len(module.losses)


@pytest.mark.parametrize("in_background", [True, False])
def test_a_save_may_take_longer_than_the_timeout(tmp_path, in_background):
    """known_failures A81."""
    assert run_processes(_slower_than_the_timeout, 2, tmp_path / "a.ckpt", in_background) == [4, 4]
    assert (tmp_path / "a.ckpt").is_dir()
