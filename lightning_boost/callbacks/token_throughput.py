"""How many tokens a second a run trains on."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class TokenThroughput(Callback):
    """Log ``tokens_per_second`` of the whole run, also as ``tok/s`` on the bar, and ``device_tokens_per_second``.

    Tokens are positions of ``input_ids``, padding included. Time is that of the whole training loop, waiting for data
    included. Validation, checkpoints and the first steps, in which memory is first taken, are left out; so is what the
    step after a validation or a checkpoint waits for data, which cannot be told from it.

    Args:
        window: Steps over which the rate is taken.
        warmup_steps: Steps of each run that are left out.

    Raises:
        ValueError: If ``window`` is below 1.
    """

    def __init__(self, *, window: int = 20, warmup_steps: int = 2) -> None:
        super().__init__()
        if window < 1:
            raise ValueError(f"window ({window}) must be at least 1 step.")
        self.window = window
        self.warmup_steps = warmup_steps
        self._steps_seen = 0
        self._started: float | None = None
        self._recent: list[tuple[float, int]] = []

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock, unless it runs since the step before."""
        if self._started is None:
            self._started = time.perf_counter()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget an earlier run."""
        self._started = None
        self._steps_seen = 0
        self._recent = []

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._started = None

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Stop the clock."""
        self._started = None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the time of a step, from the end of the one before, and log the rates of the window."""
        now, started = time.perf_counter(), self._started
        self._started = now
        self._steps_seen += 1
        # a callback before this one may have saved a checkpoint within the step
        if self._steps_seen <= self.warmup_steps or started is None:
            return
        self._recent = [*self._recent, (now - started, batch["input_ids"].numel())][-self.window :]
        seconds = sum(elapsed for elapsed, _ in self._recent)
        replicas: int = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        rate = replicas * sum(tokens for _, tokens in self._recent) / seconds
        pl_module.log("tokens_per_second", rate)
        pl_module.log("tok/s", rate, prog_bar=True, logger=False)
        pl_module.log("device_tokens_per_second", rate / trainer.world_size)
