"""How many tokens a second a run trains on."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class TokenThroughput(Callback):
    """Log ``tokens_per_second`` of the whole run, also as ``tok/s`` on the bar, and ``device_tokens_per_second``.

    Tokens are positions of ``input_ids``, padding included. Validation, checkpoints and the first steps, in which
    memory is first taken, are left out.

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
        self._started = 0.0
        self._recent: list[tuple[float, int]] = []

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock of a step."""
        self._started = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop the clock and log the rates of the window."""
        elapsed = time.perf_counter() - self._started
        self._steps_seen += 1
        if self._steps_seen <= self.warmup_steps:
            return
        self._recent = [*self._recent, (elapsed, batch["input_ids"].numel())][-self.window :]
        seconds = sum(elapsed for elapsed, _ in self._recent)
        replicas: int = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        rate = replicas * sum(tokens for _, tokens in self._recent) / seconds
        pl_module.log("tokens_per_second", rate)
        pl_module.log("tok/s", rate, prog_bar=True, logger=False)
        pl_module.log("device_tokens_per_second", rate / trainer.world_size)
