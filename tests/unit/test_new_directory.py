"""Directories that get their names when complete: killed at every moment, beside remains and beside other runs."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from lightning_boost.new_directory import NewDirectory, link, remove, set_aside, unfinished

FILES = ("first", "second")
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "open"}


def _make(path, content="new"):
    new = NewDirectory(path)
    for name in FILES:
        (unfinished(path) / name).write_text(content)
    new.publish()


def _link_to_a_new_one(path):
    _make(path.with_name("step=2.ckpt"))
    link(path, path.with_name("step=2.ckpt"))
    remove(path.with_name("step=1.ckpt"))


def _content(path):
    """What a directory holds; it must be whole."""
    (content,) = {(path / name).read_text() for name in FILES}
    return content


def _killed_before_change(number, function, *arguments):
    """Run a function in a process that is killed before it changes the disk for the given time; False: it came past."""
    child = os.fork()
    if child == 0:
        left = [number]

        def hook(event, _):
            if event in CHANGES:
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1

        sys.addaudithook(hook)
        function(*arguments)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def _last(folder):
    trainer = Trainer(callbacks=[ModelCheckpoint(folder)], logger=False, accelerator="cpu", enable_progress_bar=False)
    connector = trainer._checkpoint_connector
    return connector._parse_ckpt_path(TrainerFn.FITTING, "last", model_provided=True, model_connected=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("before", ["directory", "link"])
@pytest.mark.parametrize("change", [_make, _link_to_a_new_one])
def test_last_is_whole_whenever_a_process_is_killed(tmp_path, before, change):
    """Lightning's rule finds it; known_failures A62."""
    contents = []
    while True:
        path = tmp_path / str(len(contents)) / "last.ckpt"
        _make(path if before == "directory" else path.with_name("step=1.ckpt"), "old")
        if before == "link":
            link(path, path.with_name("step=1.ckpt"))
        # file systems count time in ticks, and the newest is taken
        time.sleep(0.01)
        was_killed = _killed_before_change(len(contents), change, path)
        contents.append(_content(tmp_path / _last(path.parent)))
        for directory in path.parent.glob("*.ckpt"):
            assert _content(directory) in ("old", "new")
        _make(path)
        assert {entry.name for entry in path.parent.iterdir()} <= {"last.ckpt", "step=1.ckpt", "step=2.ckpt"} | {
            ".last.ckpt.link"
        }
        if not was_killed:
            break
    assert contents == sorted(contents, reverse=True)
    assert contents[0] == "old"
    assert contents[-1] == "new"
    assert len(contents) > 4


def test_no_part_of_what_is_removed_has_its_name(tmp_path):
    number, was_killed = 0, True
    while was_killed:
        path = tmp_path / "a.ckpt"
        _make(path)
        was_killed = _killed_before_change(number, remove, path)
        assert not path.exists() or _content(path)
        number += 1
    _make(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]


def _begin(path, then):
    new = NewDirectory(path)
    (unfinished(path) / "first").write_text("")
    then()
    new.publish()


def _kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def test_remains_of_the_dead_are_cleared_and_nothing_else(tmp_path):
    """Another run saves in the same directory meanwhile."""
    _make(tmp_path / "whole.ckpt")
    _make(set_aside(tmp_path / "replaced.ckpt"))
    assert _killed_before_change(-1, _begin, tmp_path / "dead.ckpt", _kill_itself)
    living = NewDirectory(tmp_path / "living.ckpt")
    (unfinished(living.path) / "first").write_text("")
    assert not unfinished(tmp_path / "dead.ckpt").exists()
    _make(tmp_path / "b.ckpt")
    living.publish()
    names = ["b.ckpt", "living.ckpt", "replaced.replaced.ckpt", "whole.ckpt"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == names
    assert (tmp_path / "living.ckpt" / "first").is_file()


def test_slurm_goes_on_from_one_that_is_whole(tmp_path):
    """Lightning takes the highest number of whatever has hpc_ckpt_ in its name."""
    _make(tmp_path / "hpc_ckpt_1.ckpt")
    assert _killed_before_change(-1, _begin, tmp_path / "hpc_ckpt_2.ckpt", _kill_itself)
    trainer = Trainer(default_root_dir=tmp_path, logger=False, accelerator="cpu", enable_progress_bar=False)
    assert trainer._checkpoint_connector._hpc_resume_path == str(tmp_path / "hpc_ckpt_1.ckpt")


def test_two_runs_that_save_under_one_name_wait_for_one_another(tmp_path):
    path, reading, writing = tmp_path / "a.ckpt", *os.pipe()
    child = os.fork()
    if child == 0:
        new = NewDirectory(path)
        os.write(writing, b"!")
        time.sleep(0.3)
        for name in FILES:
            (unfinished(path) / name).write_text("new")
        new.publish()
        os._exit(0)
    os.read(reading, 1)
    new = NewDirectory(path)
    assert _content(path) == "new"
    assert list(unfinished(path).iterdir()) == []
    new.discard()
    os.waitpid(child, 0)


def test_a_name_that_cannot_be_given_is_told_to_all_who_ask(tmp_path):
    new = NewDirectory(tmp_path / "a.ckpt")
    unfinished(new.path).rmdir()
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            new.publish()


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a Linux place where no directory can be made")
def test_a_place_where_nothing_can_be_is_told():
    with pytest.raises(FileNotFoundError):
        NewDirectory(Path("/proc/none/a.ckpt"))
