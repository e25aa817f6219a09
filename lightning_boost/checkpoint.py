"""Checkpoints that do not know the layout: torch's distributed format under the names and shapes of one process.

A checkpoint is a directory that gets its name when it is complete. Nothing is unpickled but plain types and torch's own
description of a checkpoint.
"""

import io
import pickle
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_boost.checkpoint_reader import PlainPlanner, PlainReader, without_advice
from lightning_boost.config import LlamaConfig, LowRankConfig, RopeScaling
from lightning_boost.new_directory import NewDirectory, set_aside, unfinished

TRAINER_STATE_FILE = "meta.pt"
"""Everything that is not a tensor of the model or of an optimizer; Lightning's name for it."""

# without flattening, the parameter groups of one process would overwrite those of the others
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)

# what a module's hyper-parameters may hold beside plain types
_OWN_TYPES: list[Any] = [LlamaConfig, LowRankConfig, RopeScaling]


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the model's state under its one-process names, tensors as this process's shares."""
    return get_model_state_dict(model)


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state, flat, under the names of the parameters; before its first step only its groups'."""
    if optimizer.state:
        with _without_empty_groups(optimizer):
            return get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    # torch would take a step to make a state, and so change the training that is saved
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"param_groups.{names[parameter]}.{option}": value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for option, value in group.items()
        if option != "params"
    }


class CheckpointSave:
    """A checkpoint on its way to the disk; every process makes and finishes it together.

    Making it takes copies of the tensors if it is written in the background, and their time if not. A background save
    gets its name as soon as it is complete.

    Args:
        path: Directory to make. If it exists, it is replaced once the new one is complete.
        tensors: State of the model and of optimizers; each process hands in its shares.
        trainer_state: The rest; process 0's is written.
        group: Of all processes, that nothing else communicates over; it may have a longer timeout than others.
        in_background: Whether to return before it is written.

    Raises:
        OSError: If process 0 cannot write the rest; all processes raise.
        ValueError: If the rest holds something that loading would refuse.
    """

    def __init__(
        self,
        path: Path,
        tensors: dict[str, Any],
        trainer_state: dict[str, Any],
        *,
        group: ProcessGroup | None = None,
        in_background: bool = False,
    ) -> None:
        self.path = path
        self._new: NewDirectory | None = None
        """On process 0."""

        outcome = [self._prepare(trainer_state) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(outcome)
        if outcome[0] is not None:
            raise outcome[0]
        self._error: str | None = None
        self._future: Future[Any] | None = None
        plain = _plain_numbers(tensors)
        if not in_background:
            try:
                dcp.save(plain, checkpoint_id=unfinished(path), process_group=group)
            except (CheckpointException, OSError) as error:
                self._error = _cause(error)
            return
        response = dcp.async_save(plain, checkpoint_id=unfinished(path), process_group=group)
        assert isinstance(response, Future)
        self._future = response
        if (new := self._new) is not None:
            # torch has the first process finish when all have written their shares
            response.add_done_callback(lambda done: new.discard() if done.exception() else new.publish())

    def finish(self) -> None:
        """Wait until it is complete, on every process.

        Raises:
            OSError: If a process could not write its share; what there is of it is removed, and all processes raise.
        """
        if self._future is not None and (error := self._future.exception()) is not None:
            self._error = _cause(error)
        errors: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, self._error)
        outcome = [self._conclude(errors)]
        dist.broadcast_object_list(outcome)
        if outcome[0] is not None:
            raise self._not_written(outcome[0])

    def _prepare(self, trainer_state: dict[str, Any]) -> Exception | None:
        """Make the directory and write what is no tensor; return what is to be raised."""
        try:
            self._new = NewDirectory(self.path)
            _write_trainer_state(_plain_numbers(trainer_state), unfinished(self.path) / TRAINER_STATE_FILE)
        except (OSError, ValueError) as error:
            if self._new is not None:
                self._new.discard()
            return error if isinstance(error, ValueError) else self._not_written(_cause(error))
        return None

    def _not_written(self, cause: str) -> OSError:
        return OSError(f"checkpoint {self.path} could not be written: {cause}. What was there before is untouched.")

    def _conclude(self, errors: list[str | None]) -> str | None:
        """Give it its name if no process has failed; return the first failure."""
        failed = next((error for error in errors if error is not None), None)
        if self._new is None:
            return failed
        try:
            self._new.publish() if failed is None else self._new.discard()
        except OSError as error:
            return _cause(error)
        return failed


def _cause(error: BaseException) -> str:
    """Return which process failed and why; torch raises what it has collected of all processes on each of them."""
    number, first = dist.get_rank(), error
    if isinstance(error, CheckpointException):
        number, (first, _) = next(iter(error.failures.items()))
    return f"process {number} says {type(first).__name__}: {first}"


def load_checkpoint(
    path: Path, model: nn.Module, optimizers: list[Optimizer], *, strict: bool = True
) -> dict[str, Any]:
    """Load the states of a model and its optimizers, in place, whatever layout saved them; return the rest.

    A parameter that an optimizer had no state for yet begins with none.

    Args:
        path: A directory that ``CheckpointSave`` wrote.
        model: Spread over the present layout.
        optimizers: Those of the present run; none where only weights are wanted.
        strict: Whether the checkpoint must hold exactly the model's tensors.

    Raises:
        FileNotFoundError: If there is no checkpoint at ``path``.
        ValueError: If it holds other tensors than the model, or cannot be read.
    """
    path = existing_checkpoint(path)
    state = {"state_dict": model_state(model)}
    # one without parameters is that of a pipeline's stage on which nothing is trained
    own = {
        index: optimizer
        for index, optimizer in enumerate(optimizers)
        if any(group["params"] for group in optimizer.param_groups)
    }
    for index, optimizer in own.items():
        with _without_empty_groups(optimizer):
            state[f"optimizer_{index}"] = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    trainer_state = read_trainer_state(path / TRAINER_STATE_FILE)
    try:
        reader = PlainReader(path)
        metadata = reader.read_metadata()
        _check_tensors(metadata, state["state_dict"], path, strict=strict)
        dcp.load(state, storage_reader=reader, planner=PlainPlanner(allow_partial_load=True))
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise ValueError(f"checkpoint {path} cannot be read: {type(cause).__name__}: {cause}") from None
    set_model_state_dict(model, state["state_dict"], options=StateDictOptions(strict=strict))
    for index, optimizer in own.items():
        with _without_empty_groups(optimizer):
            set_optimizer_state_dict(model, optimizer, state[f"optimizer_{index}"], options=_OPTIONS)
        _drop_invented_state(model, optimizer, f"optimizer_{index}.state.", metadata)
    return trainer_state


@contextmanager
def _without_empty_groups(optimizer: Optimizer) -> Iterator[None]:
    """Take groups that hold nothing here out of an optimizer for a while: torch reads each one's first parameter."""
    empty = {index: group for index, group in enumerate(optimizer.param_groups) if not group["params"]}
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
    try:
        yield
    finally:
        for index, group in empty.items():
            optimizer.param_groups.insert(index, group)


def _drop_invented_state(model: nn.Module, optimizer: Optimizer, prefix: str, metadata: Metadata) -> None:
    """Forget state that torch made for parameters of which the checkpoint has none: it counts a step never taken."""
    saved = [name.removeprefix(prefix) for name in metadata.state_dict_metadata if name.startswith(prefix)]
    for name, parameter in model.named_parameters():
        if not any(entry.startswith(f"{name}.") for entry in saved):
            optimizer.state.pop(parameter, None)


def _plain_numbers(state: Any) -> Any:
    """Return a state with Python's numbers in place of NumPy's, which schedulers are apt to compute with."""
    return tree_map(lambda value: value.item() if isinstance(value, numpy.generic) else value, state)


def existing_checkpoint(path: Path) -> Path:
    """Return the directory to load: the one asked for, or what a save was about to replace when it was killed.

    Raises:
        FileNotFoundError: If neither is a checkpoint.
    """
    # a name, also of "."
    for candidate in (path, set_aside(path.absolute())):
        if (candidate / TRAINER_STATE_FILE).is_file():
            return candidate
    kind = "is a single file" if path.is_file() else "has no meta.pt" if path.is_dir() else "does not exist"
    inside = [file.parent.name for file in path.glob(f"*/{TRAINER_STATE_FILE}")]
    raise FileNotFoundError(
        f"checkpoint {path} {kind}; strategy 'boost' loads the directories that it saves (Trainer.save_checkpoint,"
        f" ModelCheckpoint).{f' Those in it: {_some(inside)}.' if inside else ''}"
    )


def _check_tensors(metadata: Metadata, state: dict[str, Any], path: Path, *, strict: bool) -> None:
    """Compare names, shapes and dtypes of the model's tensors with those that were saved."""
    prefix = "state_dict."
    saved = {
        name.removeprefix(prefix): entry
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and not isinstance(entry, BytesStorageMetadata)
    }
    wanted = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    # a pipeline's processes hold different layers
    names = _of_all_processes(wanted)
    if not saved.keys() & names:
        raise ValueError(f"checkpoint {path} holds none of the model's tensors; it has {_some(saved)}.")
    if strict and saved.keys() != names:
        raise ValueError(
            f"checkpoint {path} is of another model: missing {_some(names - saved.keys())}; not in the model"
            f" {_some(saved.keys() - names)}. Set strict_loading=False to load what fits."
        )
    for name in saved.keys() & wanted.keys():
        there, here = saved[name], wanted[name]
        assert isinstance(there, TensorStorageMetadata)
        if there.size != here.shape or there.properties.dtype != here.dtype:
            raise ValueError(
                f"{name} is {tuple(there.size)} {there.properties.dtype} in checkpoint {path} and"
                f" {tuple(here.shape)} {here.dtype} in the model. Load it into a model of the same configuration and"
                " precision."
            )


def _of_all_processes(names: Iterable[str]) -> set[str]:
    everyones: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, list(names))
    return {name for given in everyones for name in given}


def _some(names: Any) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    return ", ".join(listed[:5]) + more if listed else "nothing"


def _write_trainer_state(trainer_state: dict[str, Any], path: Path) -> None:
    """Write what is no tensor, and read it again.

    Raises:
        OSError: If it cannot be written.
        ValueError: If it would not load.
    """
    content = io.BytesIO()
    try:
        torch.save(trainer_state, content)
        # by itself: torch's writer does not say why it could not
        path.write_bytes(content.getvalue())
        read_trainer_state(path)
    except (ValueError, RuntimeError, pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            "the checkpoint would not load again: a module's hyper-parameters, a scheduler or a callback holds an"
            f" object that is no plain type. Keep plain types in save_hyperparameters and state_dict. ({error})"
        ) from None


def read_trainer_state(path: Path) -> dict[str, Any]:
    """Read what is no tensor, from the file that holds it.

    Raises:
        ValueError: If it cannot be read, or holds anything but plain types and this package's configurations.
    """
    try:
        with torch.serialization.safe_globals(_OWN_TYPES):
            trainer_state: dict[str, Any] = torch.load(path, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        # torch's reader fails with "Invalid argument" where a file is cut
        raise ValueError(f"{path} cannot be read: {without_advice(error)}") from None
    return trainer_state
