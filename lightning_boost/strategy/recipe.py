"""The options of a run, saved with it and compared with those of the run that goes on from it."""

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_warn

from lightning_boost.options import differences, flat, plain

_KEY = "boost_recipe"
_OF_THE_TRAINER = ("gradient_clip_val", "gradient_clip_algorithm", "max_steps", "max_epochs")


def recipe_of(module: LightningModule, precision: str, num_replicas: int) -> dict[str, Any]:
    """Return what a run's numbers depend on, and the layout does not: options in plain types by dotted names.

    Of the module and the data module these are what they give to ``save_hyperparameters``.

    Args:
        module: Attached to its Trainer.
        precision: Lightning's name.
        num_replicas: Counted into the global batch, and not kept for itself.
    """
    trainer = module.trainer
    data: Any = getattr(trainer, "datamodule", None)
    of_the_trainer: dict[str, Any] = {"precision": precision}
    of_the_trainer |= {name: getattr(trainer, name) for name in _OF_THE_TRAINER}
    recipe: dict[str, Any] = {
        "model": dict(module.hparams),
        "data": dict(getattr(data, "hparams", {})),
        "trainer": of_the_trainer,
        "seed_everything": int(os.environ.get("PL_GLOBAL_SEED", 0)),
    }
    # with a schedule of its own it is another one in each epoch
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    if not any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
        of_the_trainer["accumulate_grad_batches"] = trainer.accumulate_grad_batches
        batch_size = getattr(data, "batch_size", None)
        if isinstance(batch_size, int):
            recipe["global_batch_size"] = batch_size * num_replicas * trainer.accumulate_grad_batches
    return flat(plain(recipe))


def add_recipe(checkpoint: dict[str, Any], recipe: dict[str, Any]) -> None:
    """Put it into what is saved."""
    checkpoint[_KEY] = recipe


def report_differences(path: Path, trainer_state: dict[str, Any], now: dict[str, Any]) -> None:
    """Warn, once, of every option that is not that of the run which saved; one line for each.

    Args:
        path: Of the checkpoint, to be named.
        trainer_state: What is no tensor of it; an older one, without options, is compared with nothing.
        now: Those of the present run.
    """
    if _KEY not in trainer_state:
        return
    found = differences(trainer_state[_KEY], now)
    if found:
        lines = [f"  {name}: {before} in the checkpoint, {after} now" for name, (before, after) in found.items()]
        rank_zero_warn(f"The run goes on from {path} with other options:\n" + "\n".join(lines))
