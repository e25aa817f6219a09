"""The model in a run's checkpoint, seen like one in other files."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_boost.checkpoint_tools.stored import StoredCheckpoint, StoredTensor
from lightning_boost.interchange.keys import EMBEDDING, HEAD
from lightning_boost.interchange.own import state_options
from lightning_boost.interchange.source import SourceModel, describe
from lightning_boost.strategy.run_state import saved_ties


@dataclass(frozen=True)
class RunTensor:
    """A tensor of a run's checkpoint, under the protocol of those in other files."""

    stored: StoredCheckpoint
    tensor: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """That of one process."""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of its values."""
        return self.tensor.dtype

    def read(self, dim: int, start: int, stop: int) -> Tensor:
        """Read it whole, to check its sum, and return a slice.

        Raises:
            ValueError: If it is damaged.
        """
        try:
            return self.stored.read_tensor(self.tensor).narrow(dim, start, stop - start)
        except ValueError as error:
            raise ValueError(f"checkpoint {self.stored.path}: {self.tensor.name}: {error}.") from None


def exported_names(names: list[str]) -> dict[str, str]:
    """Return the name of each tensor of a ``state_dict`` outside of its LightningModule.

    The module's attribute in front (``model.``) is left out where the names are then Hugging Face's, which have
    ``lm_head.weight`` and ``model.embed_tokens.weight``. Other names stay as they are.
    """
    for name in names:
        prefix = name.removesuffix(HEAD)
        is_hugging_face = prefix != name and f"{prefix}{EMBEDDING}" in names
        if is_hugging_face and all(other.startswith(prefix) for other in names):
            return {other: other.removeprefix(prefix) for other in names}
    return {name: name for name in names}


def describe_run(stored: StoredCheckpoint, format_name: str | None = None) -> SourceModel:
    """Look at the model of a run.

    Args:
        stored: The run's checkpoint.
        format_name: Format of its names; ``None``: told by them.

    Raises:
        ValueError: If the run has not noted its model's configuration, or that of another one.
    """
    hyper_parameters = stored.trainer_state.get("hyper_parameters", {})
    options = hyper_parameters.get("config")
    if not options or not isinstance(options, Mapping):
        raise ValueError(
            f"checkpoint {stored.path}: the run has not noted its model's configuration (save_hyperparameters with a"
            " config). Write its weights by checkpoint export, put the model's config.json beside them, and convert"
            " that."
        )
    names, ties = exported_names(list(stored.model_tensors)), saved_ties(stored.trainer_state)
    tensors = {
        names[name]: RunTensor(stored, tensor) for name, tensor in stored.model_tensors.items() if name not in ties
    }
    stated = {**hyper_parameters.get("source_options", {}), **state_options(options)}
    return describe(stored.path, tensors, stated, format_name)
