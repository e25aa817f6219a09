"""A window of accumulation: its gradient is the mean over the batches it has, not over those it might have had."""

from lightning.pytorch import Trainer


def short_window_factor(trainer: Trainer) -> float:
    """Return what the gradients of a window must be multiplied by, now that the present batch has gone backward.

    Lightning divides the loss of each batch by the length of a full window; that the last one of an epoch is shorter
    may be known with its last batch only, since a stream has no length. 1 before that, and for full windows.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    num_batches, window = progress.current.ready, trainer.accumulate_grad_batches
    rest = num_batches % window
    is_last = progress.is_last_batch or num_batches == trainer.num_training_batches
    return window / rest if rest and is_last else 1.0
