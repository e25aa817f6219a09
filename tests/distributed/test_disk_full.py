"""A disk that is full for one process, by a limit on the size of its files: all are told, nothing is harmed."""

import resource

import pytest
import torch.distributed as dist

from lightning_boost import BoostParallelStrategy
from tests.processes import run_processes
from tests.users_module import UsersModule, loader, trainer_for

LIMITS = {"a share": 100_000, "meta.pt": 60_000}
"""Bytes: less than what cannot be written, and more than what is written before, the tests' own rendezvous included."""


class _LargeState(UsersModule):
    """Has so much in the trainer's state that its file is larger than any other but a share."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["filler"] = "x" * 40_000


def _save_with_little_room(folder, failing, limit):
    module = _LargeState()
    trainer = trainer_for(strategy=BoostParallelStrategy(2))
    trainer.fit(module, loader(num_batches=1))
    path = folder / "a.ckpt"
    trainer.save_checkpoint(path)
    assert min(shard.stat().st_size for shard in path.glob("*.distcp")) > LIMITS["a share"]
    assert LIMITS["meta.pt"] < (path / "meta.pt").stat().st_size < LIMITS["a share"]
    if dist.get_rank() == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    message = ""
    try:
        trainer.save_checkpoint(path)
    except OSError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    left = sorted(entry.name for entry in folder.iterdir())
    trainer_for(strategy=BoostParallelStrategy(2)).validate(module, loader(), ckpt_path=path, verbose=False)
    trainer.save_checkpoint(folder / "b.ckpt")
    return message, left


@pytest.mark.parametrize(("failing", "what"), [(0, "a share"), (1, "a share"), (0, "meta.pt")])
def test_a_full_disk_is_told_by_all_and_harms_nothing(tmp_path, failing, what):
    """known_failures A65."""
    results = run_processes(_save_with_little_room, 2, tmp_path, failing, LIMITS[what], timeout=60)
    assert results[0] == results[1]
    message, left = results[0]
    assert (
        f"checkpoint {tmp_path / 'a.ckpt'} could not be written: process {failing} says OSError: [Errno 27]" in message
    )
    assert message.endswith("What was there before is untouched.")
    assert left == ["a.ckpt"]
    assert (tmp_path / "b.ckpt").is_dir()


def _save_below_a_file(path):
    trainer = trainer_for(strategy=BoostParallelStrategy(2))
    trainer.fit(UsersModule(), loader(num_batches=1))
    with pytest.raises(OSError, match="could not be written: process 0 says .*Not a directory"):
        trainer.save_checkpoint(path)


def test_a_place_that_cannot_be_written_is_told_by_all(tmp_path):
    (tmp_path / "file").write_text("")
    run_processes(_save_below_a_file, 2, tmp_path / "file" / "a.ckpt", timeout=60)
