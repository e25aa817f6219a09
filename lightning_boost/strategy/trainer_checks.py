"""What a Trainer may be told to do that does not go with parameters that are spread over processes."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)

from lightning_boost.mesh import ParallelSizes
from lightning_boost.strategy.lightning_internals import detects_anomalies

_AVERAGES: dict[type[Callback], str] = dict.fromkeys(
    (WeightAveraging, StochasticWeightAveraging),
    "it copies the module before that is spread over processes or given its first values. Keep an average of your own,"
    " as docs/lightning_features.md shows.",
)
"""Refused on one process too where the module is on the meta device."""

_REFUSED: dict[type[Callback], str] = {
    **_AVERAGES,
    ModelPruning: "it renames parameters and compares their values, of which each process has a share. Prune on one"
    " process, and load the result.",
    BaseFinetuning: "it compares the values of parameters, of which each process has a share. Freeze in"
    " configure_optimizers, by requires_grad_(False), what is to stay as it is.",
    BatchSizeFinder: "running out of memory ends one process and leaves the others waiting. Find batch_size on one.",
    OnExceptionCheckpoint: "saving takes all processes, and an exception may be that of one. Save every so many steps,"
    " with ModelCheckpoint(every_n_train_steps=…).",
}


def check_callbacks(trainer: Trainer, module: LightningModule, num_processes: int) -> None:
    """Check that no callback does what only works on whole parameters, or by one process alone.

    Raises:
        ValueError: If one does.
    """
    if num_processes > 1:
        refused, where = _REFUSED, f"on {num_processes} processes"
    elif any(parameter.is_meta for parameter in module.parameters()):
        refused, where = _AVERAGES, "for a module on the meta device"
    else:
        return
    callbacks: list[Callback] = getattr(trainer, "callbacks", [])
    for callback in callbacks:
        for kind, reason in refused.items():
            if isinstance(callback, kind):
                raise ValueError(
                    f"callback {type(callback).__name__} does not work with strategy 'boost' {where}: {reason}"
                )
        if isinstance(callback, ModelCheckpoint) and callback.save_on_exception and num_processes > 1:
            raise ValueError(
                f"save_on_exception (True) of ModelCheckpoint must be False with {num_processes} processes:"
                f" {_REFUSED[OnExceptionCheckpoint]}"
            )


def check_anomaly_detection(trainer: Trainer, sizes: ParallelSizes) -> None:
    """Check that gradients are not searched for NaN where torch cannot.

    Raises:
        ValueError: If they are to be.
    """
    if detects_anomalies(trainer) and sizes.tensor_parallel_size > 1:
        raise ValueError(
            f"detect_anomaly (True) must be False with tensor_parallel_size ({sizes.tensor_parallel_size}) above 1:"
            " torch does not search DTensors for NaN. Search on one process, or on replicas."
        )
