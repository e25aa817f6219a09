"""What a run saves and goes on from: states of any layout, positions in the data, random numbers."""

from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed import ProcessGroup
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_boost import checkpoint as checkpoints
from lightning_boost.mesh import DATA_AXIS
from lightning_boost.new_directory import link, remove
from lightning_boost.strategy.arrivals import await_all_to_save
from lightning_boost.strategy.data_position import correct_epochs, keep_position
from lightning_boost.strategy.lightning_internals import link_by
from lightning_boost.strategy.random_numbers import TrainingRandomNumbers
from lightning_boost.strategy.recipe import add_recipe, recipe_of, report_differences
from lightning_boost.strategy.run_state import add_replicas, add_ties, take_replica

_WRITING_TIMEOUT = timedelta(minutes=30)
"""For which processes wait, at least, for the slowest one to write its share of a checkpoint."""


class ResumableStrategy(ModelParallelStrategy):
    """Saves checkpoints that any layout loads, and goes on as if a run had not been interrupted."""

    _root: Module | None = None
    """The model, once it is set up."""

    timeout: timedelta
    """After which a collective that a process does not join is an error."""

    _has_failed = False
    _saves_in_background = False
    _saving_group: ProcessGroup | None = None
    _saving: checkpoints.CheckpointSave | None = None

    @cached_property
    def _outdated(self) -> list[Path]:
        """Checkpoints to remove once the present save is complete."""
        return []

    @cached_property
    def _links(self) -> dict[Path, Path]:
        """Names of ``save_last="link"``, and what each is to lead to once the present save is complete."""
        return {}

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @cached_property
    def random_numbers(self) -> TrainingRandomNumbers:
        """Those of training."""
        return TrainingRandomNumbers(self.root_device)

    # ---- data and random numbers ---------------------------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Let a loader know its position in training, to be saved."""
        return keep_position(dataloader, self._module.trainer, self.random_numbers)

    @override
    def on_train_start(self) -> None:
        """Go on with the random numbers of the run that was saved."""
        self.random_numbers.begin()
        for callback in self._linking_callbacks:
            link_by(callback, self._link)

    @override
    def on_validation_start(self) -> None:
        """Put training's random numbers aside: how often is validated must not change what is trained."""
        self.random_numbers.put_aside()

    @override
    def on_validation_end(self) -> None:
        """Go on with training's random numbers."""
        self.random_numbers.take_back()

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return checkpoints.model_state(self._module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        bare = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return checkpoints.optimizer_state(self._module, bare)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save as a directory that any layout loads."""
        if self._root is None:
            # a callback that saves whenever something is raised must not hide what kept the model from being set up
            return
        if storage_options is not None:
            raise ValueError("storage_options must be None with strategy 'boost': it writes the directory itself.")
        await_all_to_save(self.timeout)
        tensors = {"state_dict": checkpoint.pop("state_dict")}
        tensors |= {f"optimizer_{index}": state for index, state in enumerate(checkpoint.pop("optimizer_states", []))}
        correct_epochs(checkpoint)
        add_replicas(checkpoint, self.device_mesh, self.root_device)
        add_ties(checkpoint, self._module)
        add_recipe(checkpoint, self._recipe())
        path = _local_path(self.broadcast(filepath))
        self.finish_saving()
        self._saving = checkpoints.CheckpointSave(
            path, tensors, checkpoint, group=self._own_group_for_saving(), in_background=self._saves_in_background
        )
        if not self._saves_in_background:
            self.finish_saving()

    def _own_group_for_saving(self) -> ProcessGroup | None:
        if self._saving_group is None:
            # training goes on over the others meanwhile, and a slow disk may take longer than a collective
            self._saving_group = dist.new_group(backend="gloo", timeout=max(self.timeout, _WRITING_TIMEOUT))
        return self._saving_group

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is complete; every process must call this.

        Raises:
            OSError: If it could not be written.
        """
        saving, self._saving = self._saving, None
        links, outdated = dict(self._links), list(self._outdated)
        # forgotten first: where the new one fails, the old ones are all there is
        self._links.clear()
        self._outdated.clear()
        if saving is not None:
            saving.finish()
        if self.is_global_zero:
            for path, target in links.items():
                link(path, target)
            for path in outdated:
                remove(path)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, but not before one that is being written in its place is complete and linked to."""
        self._outdated.append(_local_path(filepath))
        if self._saving is None and not self._linking_callbacks:
            self.finish_saving()

    def _link(self, path: Path, target: Path) -> None:
        """Have a name lead to a checkpoint once it is complete."""
        if path.absolute() != target.absolute():
            self._links[path] = target
        if self._saving is None:
            self.finish_saving()

    @property
    def _linking_callbacks(self) -> list[ModelCheckpoint]:
        callbacks: list[Any] = getattr(self._module.trainer, "checkpoint_callbacks", [])
        return [each for each in callbacks if isinstance(each, ModelCheckpoint) and each.save_last == "link"]

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load what any layout saved; optimizers only where training goes on."""
        self.finish_saving()
        path = _local_path(self.broadcast(checkpoint_path))
        is_training = self._module.trainer.state.fn == TrainerFn.FITTING
        if is_training:
            # before the weights: where they do not fit, the options tell why
            state_file = checkpoints.existing_checkpoint(path) / checkpoints.TRAINER_STATE_FILE
            report_differences(path, checkpoints.read_trainer_state(state_file), self._recipe())
        optimizers = self.optimizers if is_training else []
        checkpoint = checkpoints.load_checkpoint(path, self._module, optimizers, strict=self._module.strict_loading)
        states = take_replica(checkpoint, self.device_mesh)
        self.random_numbers.next = states if is_training else None
        return checkpoint

    def _recipe(self) -> dict[str, Any]:
        return recipe_of(self._module, self.precision_plugin.precision, self.device_mesh[DATA_AXIS].size())

    @override
    def teardown(self) -> None:
        """Wait for the last checkpoint, unless this process has failed: its peers may be gone."""
        if not self._has_failed:
            self.finish_saving()
        super().teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Remember that there is no waiting for other processes any more."""
        self._has_failed = True
        super().on_exception(exception)


def _local_path(path: Any) -> Path:
    if "://" in str(path):
        raise ValueError(
            f"checkpoint path ({path}) must be a path of this machine's file system with strategy 'boost'."
        )
    return Path(path)
