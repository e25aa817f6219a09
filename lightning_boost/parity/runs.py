"""The two runs that are compared: through the strategy on a layout, and in a plain loop on one process."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset, Subset
from typing_extensions import override

from lightning_boost.config import IGNORED_LABEL, LlamaConfig
from lightning_boost.gradients import clip_gradients_by_norm
from lightning_boost.kernels.dispatch import plain_kernels
from lightning_boost.model.initialization import initialize
from lightning_boost.model.llama import LlamaForCausalLM
from lightning_boost.parity.trajectory import Trajectory
from lightning_boost.strategy.boost import BoostParallelStrategy

Precision = Literal["32-true", "bf16-true", "64-true"]
"""Lightning's names. A strategy that trains takes no fp64; here it tells rounding from defects."""

CLIP_NORM = 0.5
"""Below the first gradients' norm, so that clipping acts and a wrong norm shows in the weights."""

BATCH_SIZE = 4
SEQUENCE_LENGTH = 24
SEED = 7


def _sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=3.0)


def _adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    # a larger eps than usual: with 1e-8 one process in fp32 is as far from fp64 as a defect would be
    return AdamW(parameters, lr=1e-2, eps=1e-4, weight_decay=0.01)


OPTIMIZERS = {"SGD": _sgd, "AdamW": _adamw}


Loader = DataLoader[dict[str, Tensor]]


class _Batches(Dataset[dict[str, Tensor]]):
    """Random tokens; from row to row more labels are ignored, from none to most."""

    def __init__(self, vocab_size: int, steps: int) -> None:
        generator = torch.Generator().manual_seed(SEED)
        shape = (steps * BATCH_SIZE, SEQUENCE_LENGTH)
        self.input_ids = torch.randint(vocab_size, shape, generator=generator)
        share_ignored = torch.linspace(0.0, 0.9, BATCH_SIZE).repeat(steps)[:, None]
        ignored = torch.rand(shape, generator=generator) < share_ignored
        self.labels = self.input_ids.masked_fill(ignored, IGNORED_LABEL)

    def __len__(self) -> int:
        return len(self.input_ids)

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.input_ids[index], "labels": self.labels[index]}


def _loader(config: LlamaConfig, steps: int, *, num_replicas: int = 1, replica: int = 0) -> Loader:
    """Return the batches, or of each the rows that one of several replicas sees."""
    batches = _Batches(config.vocab_size, steps)
    rows = [index for index in range(len(batches)) if index % num_replicas == replica]
    return DataLoader(Subset(batches, rows), batch_size=BATCH_SIZE // num_replicas)


class _RecordingModule(LightningModule):
    """Trains a model and notes what parity compares."""

    def __init__(self, model: LlamaForCausalLM, optimizer_name: str, steps: int) -> None:
        super().__init__()
        self.model = model
        self.steps = steps
        self.optimizer_name = optimizer_name
        self.trajectory = Trajectory()
        self.start: dict[str, Tensor] = {}

    @override
    def train_dataloader(self) -> Loader:
        position = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return _loader(self.model.config, self.steps, num_replicas=position["num_replicas"], replica=position["rank"])

    @override
    def on_train_start(self) -> None:
        self.start = _whole_parameters(self.model)
        self.trajectory.weight_norms = {name: weight.norm().item() for name, weight in self.start.items()}

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch)
        self.trajectory.losses.append(self.trainer.strategy.reduce(loss.detach().clone()).item())
        return loss

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if not self.trajectory.gradients:
            self.trajectory.gradients = _whole_gradients(self.model)

    @override
    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        strategy = self.trainer.strategy
        assert isinstance(strategy, BoostParallelStrategy)
        assert strategy.gradient_norm is not None
        self.trajectory.gradient_norms.append(strategy.gradient_norm.item())

    @override
    def on_train_end(self) -> None:
        self.trajectory.changes = _changes(self.start, self.model)

    @override
    def configure_optimizers(self) -> Optimizer:
        return OPTIMIZERS[self.optimizer_name](self.parameters())


def train_on_layout(
    config: LlamaConfig,
    strategy: BoostParallelStrategy,
    optimizer_name: str,
    num_processes: int,
    precision: Precision,
    steps: int,
) -> Trajectory:
    """Train through the strategy, as a user does; every process returns the whole model's trajectory."""
    # not torch's own: Lightning seeds anew from what seed_everything has left in the environment
    seed_everything(SEED, verbose=False)
    is_fp64 = precision == "64-true"
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.float64 if is_fp64 else torch.float32)
        module = _RecordingModule(model, optimizer_name, steps)
    trainer = Trainer(
        strategy=strategy,
        devices=num_processes,
        # 32-true leaves parameters as they are
        precision="32-true" if is_fp64 else precision,
        max_steps=steps,
        gradient_clip_val=CLIP_NORM,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    return _of_all_stages(module.trajectory) if strategy.sizes.pipeline_parallel_size > 1 else module.trajectory


def _of_all_stages(mine: Trajectory) -> Trajectory:
    """Put together what the processes of a pipeline hold of the parameters."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (mine.gradients, mine.changes, mine.weight_norms))
    merged = [{name: value for each in everyones for name, value in each[part].items()} for part in range(3)]
    return replace(mine, gradients=merged[0], changes=merged[1], weight_norms=merged[2])


@plain_kernels()
def train_on_one_process(
    config: LlamaConfig, optimizer_name: str, precision: Precision, steps: int, *, dtype: torch.dtype
) -> Trajectory:
    """Train the plain model in a plain loop, computing in ``dtype``, with torch's own operations."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    initialize(model, std=config.initializer_range, seed=SEED)
    # in bf16 both sides start from rounded weights, whatever they compute in
    model.to(torch.bfloat16 if precision == "bf16-true" else dtype).to(dtype)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    start = _whole_parameters(model)
    trajectory = Trajectory(weight_norms={name: weight.norm().item() for name, weight in start.items()})
    for batch in _loader(config, steps):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        trajectory.gradients = trajectory.gradients or _whole_gradients(model)
        trajectory.losses.append(loss.item())
        trajectory.gradient_norms.append(clip_gradients_by_norm(model.parameters(), CLIP_NORM).item())
        optimizer.step()
    trajectory.changes = _changes(start, model)
    return trajectory


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone().cpu()


def _whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: _whole(parameter) for name, parameter in model.named_parameters()}


def _whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: _whole(gradient) for name, gradient in gradients.items() if gradient is not None}


def _changes(start: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.double() - start[name].double() for name, weight in _whole_parameters(model).items()}
