"""What a model on a pipeline returns: outputs of all micro-batches put together, or a loss in the model's form."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_boost.pipeline_parallel.microbatches import Microbatches, has_rows
from lightning_boost.pipeline_parallel.trees import dict_like, sequence_like


class LossOutput:
    """The loss of a model that returns it among other outputs: as ``loss``, ``["loss"]`` or ``[0]``.

    Args:
        loss: Mean over the batch.
    """

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss

    def __getitem__(self, key: str | int) -> Tensor:
        if key in ("loss", 0):
            return self.loss
        raise RuntimeError(_only_loss(key))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_only_loss(name))


def _only_loss(name: str | int) -> str:
    return (
        f"a model on a pipeline gives its loss alone where it is called with labels, and {name!r} was asked for. Call"
        " it without labels, under torch.no_grad(), for its other outputs."
    )


def merge_outputs(outputs: Sequence[Any], microbatches: Microbatches) -> Any:
    """Put the outputs of all micro-batches together: tensors ``[b, …]`` become one ``[B, …]``.

    Raises:
        TypeError: If an output is neither a tensor nor a tuple, list or dict. What else a dict holds is left out.
        ValueError: If an output has not one row for each sample.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        if not has_rows(first, microbatches.rows):
            raise ValueError(
                f"an output of shape {list(first.shape)} has no row for each of the {microbatches.rows} samples of a"
                " micro-batch, and is another one for each of them. Let a model on a pipeline return one row for each"
                " sample, or set pipeline_parallel_size to 1."
            )
        return torch.cat(list(outputs))[: microbatches.num_samples]
    if isinstance(first, dict):
        # a cache of keys and values holds those of this stage's layers only: it is left out
        kept = [key for key in first if first[key] is None or isinstance(first[key], Tensor | dict | tuple | list)]
        return dict_like(first, {key: merge_outputs([each[key] for each in outputs], microbatches) for key in kept})
    if isinstance(first, tuple | list):
        return sequence_like(first, [merge_outputs(parts, microbatches) for parts in zip(*outputs, strict=True)])
    if first is None:
        return None
    raise TypeError(
        f"a model on a pipeline must return tensors, or tuples, lists or dicts of them, and returned"
        f" {type(first).__name__}."
    )
