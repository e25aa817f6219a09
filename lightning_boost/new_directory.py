"""Directories that get their names when they are complete: what has its name is whole, whenever a process is killed.

One that is made stands in ``.unfinished`` beside its place until then, and one that is removed goes there first. Who
makes one holds a lock on it, which ends with the process: what nobody holds is the remains of a process that was
killed, and the next one that makes something there clears it.
"""

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from threading import Lock
from uuid import uuid4

_UNFINISHED = ".unfinished"
# no part of the names there: Lightning takes the number of Slurm's next checkpoint from whatever has hpc_ckpt_ in it

_ATTEMPTS = 100
"""At making a directory that others clear or publish meanwhile."""


def unfinished(path: Path) -> Path:
    """Return where a directory is made."""
    return path.parent / _UNFINISHED / path.name


def set_aside(path: Path) -> Path:
    """Return the name of what is replaced, while it is: whole, and one that Lightning's ``"last"`` finds."""
    return path.with_name(f"{path.stem}.replaced{path.suffix}")


class NewDirectory:
    """A directory in the making; ``unfinished(path)`` is there, empty, and this process's.

    Args:
        path: The name that it is to get.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._clear_remains()
        self._lock: int | None = _make_locked(unfinished(path))
        # a save in the background may end in one thread while another waits for it
        self._ending = Lock()
        self._error: OSError | None = None

    def publish(self) -> None:
        """Give it its name, and only then remove what had it; once, so that two may ask for it.

        Raises:
            OSError: If that cannot be done, whoever asks.
        """
        with self._ending:
            if self._lock is not None:
                try:
                    _give_name(unfinished(self.path), self.path)
                except OSError as error:
                    self._error = error
                self._end(self._lock)
            if self._error is not None:
                raise self._error

    def discard(self) -> None:
        """Remove what there is of it, if it has no name yet."""
        with self._ending:
            if self._lock is not None:
                shutil.rmtree(unfinished(self.path), ignore_errors=True)
                self._end(self._lock)

    def _end(self, lock: int) -> None:
        # said, since a process that was forked meanwhile may have the descriptor too
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)
        self._lock = None
        _remove_if_empty(unfinished(self.path).parent)

    def _clear_remains(self) -> None:
        for folder in unfinished(self.path).parent.glob("*"):
            # held by another run; or there are no locks on this file system, and nothing is known
            with suppress(OSError):
                lock = os.open(folder, os.O_RDONLY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)


def remove(path: Path) -> None:
    """Remove a directory, a file or a link, if it is there; at no time does a part of a directory have its name."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    rubbish = unfinished(path).with_name(uuid4().hex)
    while path.is_dir():
        rubbish.parent.mkdir(exist_ok=True)
        # another run may just have removed the empty folder
        with suppress(FileNotFoundError):
            path.rename(rubbish)
    shutil.rmtree(rubbish, ignore_errors=True)
    _remove_if_empty(rubbish.parent)


def link(path: Path, target: Path) -> None:
    """Have a name lead to a directory, whatever had it before."""
    new = path.with_name(f".{path.name}.link")
    new.unlink(missing_ok=True)
    new.symlink_to(os.path.relpath(target, path.parent))
    _give_name(new, path)


def _give_name(new: Path, path: Path) -> None:
    aside = set_aside(path)
    if os.path.lexists(path):
        # of a process that was killed here
        remove(aside)
        path.rename(aside)
    new.rename(path)
    remove(aside)


def _make_locked(folder: Path) -> int:
    """Make a directory and lock it, after any other process that makes one of this name; return the lock."""
    for attempts_left in reversed(range(_ATTEMPTS)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            # another process may have cleared it; or it is a place where nothing can be
            if attempts_left:
                continue
            raise
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        # while this one waited it may have been published or cleared
        if _is_open(lock, folder):
            if not any(folder.iterdir()):
                return lock
            # remains of a process that was killed
            shutil.rmtree(folder)
        os.close(lock)
    raise OSError(f"{folder} could not be made: something is put into it again and again.")


def _is_open(descriptor: int, folder: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    return False


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
