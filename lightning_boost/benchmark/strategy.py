"""``benchmark strategy``: a Trainer's step beside a bare loop's, both around the same parallel model."""

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_boost.benchmark.blocks import DTYPES, SCHEMES, BlockSizes, block_config, make_model
from lightning_boost.benchmark.processes import is_under_torchrun
from lightning_boost.benchmark.report import Report, compare
from lightning_boost.benchmark.setup import Setup
from lightning_boost.benchmark.timing import Timings, wait_for
from lightning_boost.benchmark.training import CLIP_NORM, Batch, TrainingLoop, make_optimizer
from lightning_boost.model.llama import LlamaForCausalLM
from lightning_boost.strategy.boost import BoostParallelStrategy

NUM_LAYERS = 4
VOCAB_SIZE = 2048
_WARMUP = 3


def measure_strategy(setup: Setup) -> Report | None:
    """Time a Trainer's steps, and between them those of a loop around a second model of the same kind."""
    with contextlib.redirect_stdout(sys.stderr):
        found = setup.run(_measure)
    if found is None:
        return None
    times = {name: Timings(*pair) for name, pair in zip(("Trainer", "loop"), found, strict=True)}
    title = f"a training step of {NUM_LAYERS} layers: {setup.described}"
    return compare(title, times, [("Trainer", "loop")], figures={"sizes": setup.figures})


class _Module(LightningModule):
    """The least that a user writes."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch)
        return loss

    @override
    def configure_optimizers(self) -> Optimizer:
        return make_optimizer(self.model)


class _LoopBetween(Callback):
    """Runs a step of the bare loop after each of the Trainer's; what lies between two of them is the Trainer's."""

    def __init__(self, step: Callable[[Batch], None], device: torch.device) -> None:
        self.step, self.device = step, device
        self.trainer_seconds: list[list[float]] = []
        self.loop_seconds: list[list[float]] = []
        self.since: list[float] = []

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        if self.since:
            self.trainer_seconds.append(self._elapsed(self.since))
        dist.barrier()
        begin = self._now()
        self.step(batch)
        self.loop_seconds.append(self._elapsed(begin))
        dist.barrier()
        self.since = self._now()

    def _now(self) -> list[float]:
        wait_for(self.device)
        return [time.perf_counter(), time.process_time()]

    def _elapsed(self, since: list[float]) -> list[float]:
        return [now - then for now, then in zip(self._now(), since, strict=True)]


def _measure(device: torch.device, setup: Setup) -> list[tuple[list[float], list[float]]]:
    # as on the command line: Lightning 2.6 calls what torch has since renamed
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    given = setup.sizes
    if not is_under_torchrun():
        _tell_lightning()
    num_local = int(os.environ["LOCAL_WORLD_SIZE"])
    config = block_config(given, "cola", num_layers=NUM_LAYERS, vocab_size=VOCAB_SIZE)
    loop = TrainingLoop(config, SCHEMES["bottleneck"], DTYPES[given.dtype], device)
    between = _LoopBetween(loop.step, device)
    trainer = Trainer(
        accelerator=device.type,
        devices=num_local,
        num_nodes=setup.num_processes // num_local,
        strategy=BoostParallelStrategy(setup.num_processes),
        precision="bf16-true" if given.dtype == "bfloat16" else "32-true",
        max_epochs=1,
        gradient_clip_val=CLIP_NORM,
        use_distributed_sampler=False,
        callbacks=[between],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # of the first step the Trainer's part is not known
    trainer.fit(_Module(make_model(config, torch.float32)), _batches(given, _WARMUP + setup.repetitions + 1))
    return [
        _timings(seconds[-setup.repetitions :], device) for seconds in (between.trainer_seconds, between.loop_seconds)
    ]


def _tell_lightning() -> None:
    """Set what torchrun would set: Lightning then starts no processes of its own."""
    index, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"LOCAL_RANK": index, "RANK": index, "WORLD_SIZE": size}
    os.environ |= {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": size, "TORCHELASTIC_RUN_ID": "benchmark"}


def _batches(sizes: BlockSizes, count: int) -> DataLoader[Batch]:
    generator = torch.Generator().manual_seed(0)
    shape = (count * sizes.num_sequences, sizes.sequence_length)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(VOCAB_SIZE, shape, generator=generator)]
    return DataLoader(rows, batch_size=sizes.num_sequences)  # type: ignore[arg-type]


def _timings(seconds: list[list[float]], device: torch.device) -> tuple[list[float], list[float]]:
    """Return each step's wall time of the slowest process, and its mean CPU time."""
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    total = slowest.clone()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return slowest[:, 0].tolist(), (total[:, 1] / dist.get_world_size()).tolist()
