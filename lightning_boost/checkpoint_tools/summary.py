"""What a checkpoint holds, from its description alone: no tensor is read and no model is built."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_boost.checkpoint_tools.stored import MODEL_PREFIX, StoredCheckpoint, StoredTensor
from lightning_boost.strategy.run_state import saved_replicas

_LAYER = re.compile(r"\.(\d+)(?=\.)")


@dataclass(frozen=True)
class TensorKind:
    """Tensors of the same name, shape and dtype in different layers, or a single one.

    Args:
        name: Its name, ``*`` for the number of the layer.
        layers: Numbers of the layers; none: it is in no layer.
        shape: Of each.
        dtype: Torch's name of it.
        num_bytes: Of all of them.
    """

    name: str
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


class OptimizerSummary(NamedTuple):
    """What a checkpoint holds of an optimizer."""

    name: str
    num_tensors: int
    num_bytes: int
    states: dict[str, int]
    """How many tensors there are of each kind of state."""


class CheckpointSummary(NamedTuple):
    """What a checkpoint holds."""

    kinds: list[TensorKind]
    num_tensors: int
    num_values: int
    num_bytes: int
    optimizers: list[OptimizerSummary]
    num_files: int
    global_step: int | None
    epoch: int | None
    num_replicas: int | None
    """Of the run that saved; none: not noted."""

    positions: list[dict[str, Any]]
    """Of the first replica's training loaders: epoch, batches of it that were trained on, their size; empty where a
    loader keeps its position in a way of its own."""


def summarize(stored: StoredCheckpoint) -> CheckpointSummary:
    """Summarize a checkpoint.

    Raises:
        ValueError: If a file is missing or cannot be read.
    """
    stored.check_files()
    tensors = list(stored.model_tensors.values())
    replicas = saved_replicas(stored.trainer_state)
    return CheckpointSummary(
        kinds=group_by_layer(tensors),
        num_tensors=len(tensors),
        num_values=sum(tensor.num_values for tensor in tensors),
        num_bytes=sum(tensor.num_bytes for tensor in tensors),
        optimizers=_optimizers(stored),
        num_files=len(stored.files),
        global_step=stored.trainer_state.get("global_step"),
        epoch=stored.trainer_state.get("epoch"),
        num_replicas=len(replicas) or None,
        positions=[_position(loader) for loader in replicas[0]] if replicas else [],
    )


def group_by_layer(tensors: Iterable[StoredTensor]) -> list[TensorKind]:
    """Put tensors together that differ in the number of their layer alone."""
    groups: dict[tuple[str, tuple[int, ...], str], list[tuple[int, StoredTensor]]] = defaultdict(list)
    for tensor in sorted(tensors, key=lambda tensor: natural_order(tensor.name)):
        layer = _LAYER.search(tensor.name)
        name = _LAYER.sub(".*", tensor.name, count=1)
        dtype = str(tensor.dtype).removeprefix("torch.")
        groups[name, tensor.shape, dtype].append((int(layer[1]) if layer else -1, tensor))
    return [
        TensorKind(
            name=name,
            layers=tuple(layer for layer, _ in members if layer >= 0),
            shape=shape,
            dtype=dtype,
            num_bytes=sum(tensor.num_bytes for _, tensor in members),
        )
        for (name, shape, dtype), members in groups.items()
    ]


def each_by_itself(tensors: Iterable[StoredTensor]) -> list[TensorKind]:
    """Put no tensors together."""
    return [
        TensorKind(tensor.name, (), tensor.shape, str(tensor.dtype).removeprefix("torch."), tensor.num_bytes)
        for tensor in sorted(tensors, key=lambda tensor: natural_order(tensor.name))
    ]


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return what names are sorted by, so that layer 10 comes behind layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _optimizers(stored: StoredCheckpoint) -> list[OptimizerSummary]:
    states: dict[str, list[StoredTensor]] = defaultdict(list)
    for key in stored.other_values:
        if not key.startswith(MODEL_PREFIX):
            states[key.partition(".")[0]] += []
    for key, tensor in stored.tensors.items():
        if not key.startswith(MODEL_PREFIX):
            states[key.partition(".")[0]].append(tensor)
    summaries = []
    for name, tensors in sorted(states.items()):
        kinds = [tensor.key.rpartition(".")[2] for tensor in tensors if ".state." in tensor.key]
        counts = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
        summaries.append(OptimizerSummary(name, len(tensors), sum(tensor.num_bytes for tensor in tensors), counts))
    return summaries


def _position(loader: Any) -> dict[str, Any]:
    fields = ("epoch", "num_batches", "batch_size")
    is_known = isinstance(loader, dict) and set(fields) <= loader.keys()
    return {field: loader[field] for field in fields} if is_known else {}
