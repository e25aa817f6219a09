"""How many tokens a second a run trains on, and what share of its devices' peak that is."""

import resource
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_boost.callbacks.peak_flops import peak_flops_of
from lightning_boost.callbacks.traffic_formula import config_of, recompute_of
from lightning_boost.config import LlamaConfig
from lightning_boost.cost import recompute_flops, training_flops
from lightning_boost.mesh import PIPELINE_AXIS
from lightning_boost.pipeline_parallel.options import PipelineOptions
from lightning_boost.pipeline_parallel.schedule import Pipeline, find_pipeline
from lightning_boost.recompute import RecomputeOptions

_GIB = 2**30

FlopsPerToken = Callable[[int], tuple[int, int]]
"""From the length of a sequence to the operations for a token: of the model, and with what is computed again."""


class _Step(NamedTuple):
    seconds: float
    tokens: int
    """Of this process's replica, as are the operations."""

    flops: int
    executed_flops: int


class TokenThroughput(Callback):
    """Log ``tokens_per_second`` of the whole run, also as ``tok/s`` on the bar, and ``device_tokens_per_second``.

    Tokens are positions of ``input_ids``, padding included. Time is that of the whole training loop, waiting for data
    included. Validation, checkpoints and the first steps, in which memory is first taken, are left out; so is what the
    step after a validation or a checkpoint waits for data, which cannot be told from it.

    With this package's ``LlamaForCausalLM`` and a known peak of the device it logs ``mfu``, the share of all devices'
    peak that the operations of the model take (those of its factor pairs, and half of attention, which is causal), and
    ``hfu``, with what is computed a second time. On a pipeline ``pipeline_bubble_formula`` is the share of a step in
    which a process has nothing to do, by the formula of its schedule. ``peak_memory_gib`` on GPUs, what torch has
    allocated there, and ``peak_resident_gib`` on the CPU, what the process has held, are the largest of all processes;
    they are logged after the first window and at the end of each epoch.

    Args:
        window: Steps over which the rate is taken; of accumulated gradients each batch is one.
        warmup_steps: Those of each run that are left out.
        peak_flops: Operations per second that one device can do at most. ``None``: that of the card for dense bf16,
            where it is known, and where not that is said; a CPU's is not.

    Raises:
        ValueError: If ``window`` is below 1, ``warmup_steps`` below 0, or ``peak_flops`` not above 0.
    """

    def __init__(self, *, window: int = 20, warmup_steps: int = 2, peak_flops: float | None = None) -> None:
        super().__init__()
        if window < 1:
            raise ValueError(f"window ({window}) must be at least 1 step.")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps ({warmup_steps}) must be at least 0 steps.")
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(f"peak_flops ({peak_flops}) must be above 0, or None for that of the card.")
        self.window = window
        self.warmup_steps = warmup_steps
        self.peak_flops = peak_flops
        self._steps_seen = 0
        self._started: float | None = None
        self._recent: list[_Step] = []
        self._peak: float | None = None
        self._flops_per_token: FlopsPerToken | None = None
        self._pipeline: Pipeline | None = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock, unless it runs since the step before.

        Raises:
            TypeError: If the batch has no ``input_ids``.
        """
        _input_ids(batch)
        if self._started is None:
            self._started = time.perf_counter()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget an earlier run, and find out what can be told of this one."""
        self._started = None
        self._steps_seen = 0
        self._recent = []
        config = config_of(pl_module)
        self._peak = self.peak_flops or _peak_of(pl_module.device)
        self._flops_per_token = None if config is None else _flops_per_token(config, recompute_of(trainer))
        self._pipeline = next(filter(None, map(find_pipeline, pl_module.modules())), None)
        if self._peak is not None and config is None:
            rank_zero_info(
                "TokenThroughput leaves MFU out: the operations of a model are known for this package's"
                f" LlamaForCausalLM, and {type(pl_module).__name__} has none, or several."
            )

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
        if self._steps_seen == self.warmup_steps + self.window:
            _log_peak_memory(pl_module, at_end_of_epoch=False)
            self._started = time.perf_counter()
        # a callback before this one may have saved a checkpoint within the step
        if self._steps_seen <= self.warmup_steps or started is None:
            return
        step = self._step(now - started, _input_ids(batch))
        self._recent = [*self._recent, step][-self.window :]
        seconds = sum(step.seconds for step in self._recent)
        replicas: int = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        rate = replicas * sum(step.tokens for step in self._recent) / seconds
        pl_module.log("tokens_per_second", rate)
        pl_module.log("tok/s", rate, prog_bar=True, logger=False)
        pl_module.log("device_tokens_per_second", rate / trainer.world_size)
        if self._peak is not None and self._flops_per_token is not None:
            most = self._peak * trainer.world_size * seconds / replicas
            pl_module.log("mfu", sum(step.flops for step in self._recent) / most)
            pl_module.log("hfu", sum(step.executed_flops for step in self._recent) / most)
        if self._pipeline is not None and self._pipeline.last_cut is not None:
            options = trainer.strategy.requested.pipeline  # type: ignore[attr-defined]
            pl_module.log("pipeline_bubble_formula", _bubble(options, self._pipeline.last_cut[0], pl_module))

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the peak of memory."""
        _log_peak_memory(pl_module, at_end_of_epoch=True)

    def _step(self, seconds: float, input_ids: torch.Tensor) -> _Step:
        tokens = input_ids.numel()
        flops, executed = (0, 0) if self._flops_per_token is None else self._flops_per_token(input_ids.shape[-1])
        return _Step(seconds, tokens, tokens * flops, tokens * executed)


def _peak_of(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = peak_flops_of(name)
    if known is None:
        rank_zero_info(
            f"TokenThroughput leaves MFU out: it does not know the peak of {name!r}. Give peak_flops, the dense bf16"
            " operations per second of one such device by its data sheet."
        )
    return known


def _input_ids(batch: Any) -> torch.Tensor:
    try:
        input_ids: torch.Tensor = batch["input_ids"]
    except (IndexError, KeyError, TypeError):
        raise TypeError(
            f"TokenThroughput counts the positions of a batch's 'input_ids'; this batch ({type(batch).__name__}) has"
            " none. Give batches that have, or leave the callback out."
        ) from None
    return input_ids


def _flops_per_token(config: LlamaConfig, recompute: RecomputeOptions) -> FlopsPerToken:
    layers = recompute.choose(config.num_hidden_layers)

    @lru_cache(maxsize=64)
    def of_length(length: int) -> tuple[int, int]:
        flops = training_flops(config, length)
        again = recompute_flops(
            config, length, kind=recompute.kind, layers=layers, keep_attention=recompute.keep_attention
        )
        return flops, flops + again

    return of_length


def _bubble(options: PipelineOptions, num_microbatches: int, pl_module: LightningModule) -> float:
    assert pl_module.device_mesh is not None
    return options.bubble_share(num_microbatches, pl_module.device_mesh[PIPELINE_AXIS].size())


def _log_peak_memory(pl_module: LightningModule, *, at_end_of_epoch: bool) -> None:
    """Log the largest peak of all processes, all of which must call this."""
    is_cuda = pl_module.device.type == "cuda"
    mine = torch.cuda.max_memory_allocated(pl_module.device) if is_cuda else _peak_resident()
    everyones: list[Any] = [mine]
    if dist.is_initialized():
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
    name = "peak_memory_gib" if is_cuda else "peak_resident_gib"
    # the same on all processes, but Lightning would advise to say so
    pl_module.log(name, max(everyones) / _GIB, sync_dist=at_end_of_epoch)


def _peak_resident() -> int:
    """Return the most bytes of this process that have been in memory at once."""
    # Linux tells kibibytes, macOS bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
