"""Proof that a layout trains the one-process model: every gradient, and every weight after steps.

The oracle is the plain model in a plain loop, one process, no Lightning. The other side runs through the strategy as a
user's run does: built on meta, swapped, its optimizer made and its gradients clipped by Lightning. Losses prove little,
since Adam hides a wrong scale; what is compared are gradients, gathered whole, and the change of the weights.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset, Subset
from typing_extensions import override

from lightning_boost.config import IGNORED_LABEL, LlamaConfig
from lightning_boost.data_parallel import DataAxis
from lightning_boost.gradients import clip_gradients_by_norm
from lightning_boost.mesh import AutoSize
from lightning_boost.model.initialization import initialize
from lightning_boost.model.llama import LlamaForCausalLM
from lightning_boost.strategy.boost import BoostParallelStrategy

Precision = Literal["32-true", "bf16-true"]

FP32_TOLERANCE = 1e-5
BF16_FACTOR = 2.0
"""In bf16 a layout may be this much farther from the fp32 oracle than one process in bf16 is."""

SMALLEST_CHANGE = 0.01
"""Share of a weight below which fp32 does not know a change to 1e-5."""

CLIP_NORM = 0.5
"""Below the first gradients' norm, so that clipping acts and a wrong norm shows in the weights."""

BATCH_SIZE = 4
SEQUENCE_LENGTH = 24
SEED = 7


@dataclass
class Trajectory:
    """What one run of a few steps leaves behind."""

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step, whole, before clipping."""

    changes: dict[str, Tensor] = field(default_factory=dict)
    """Of every weight since the start, whole."""

    weight_norms: dict[str, float] = field(default_factory=dict)
    """Of every weight at the start."""


@dataclass(frozen=True)
class Errors:
    """The worst relative errors of one run against the oracle, and where they are."""

    loss: float
    gradient_norm: float
    gradient: float
    weight: float
    worst_parameter: str


@dataclass(frozen=True)
class ParityReport:
    """What ``check_parity`` found; of its two runs the one that came nearer to failing."""

    layout: str
    precision: str
    optimizer: str

    steps: int
    gradient_tolerance: float
    weight_tolerance: float
    worst_loss_relative_error: float
    worst_gradient_norm_relative_error: float
    worst_gradient_relative_error: float
    worst_weight_relative_error: float
    worst_parameter: str
    replicas_equal: bool

    @property
    def passed(self) -> bool:
        """Whether every error is within tolerance and the processes agree bit for bit."""
        return self.worst_of_tolerance <= 1.0

    @property
    def worst_of_tolerance(self) -> float:
        """The largest error as a multiple of what is allowed; above 1, or infinite, where parity fails."""
        if not self.replicas_equal:
            return float("inf")
        gradients = (
            self.worst_gradient_relative_error,
            self.worst_gradient_norm_relative_error,
            self.worst_loss_relative_error,
        )
        return max(max(gradients) / self.gradient_tolerance, self.worst_weight_relative_error / self.weight_tolerance)

    def as_dict(self) -> dict[str, object]:
        """Return the fields and ``passed`` as plain types."""
        return {"passed": self.passed, **asdict(self)}


def check_parity(
    config: LlamaConfig,
    *,
    tensor_parallel_size: AutoSize = "auto",
    data_parallel_size: AutoSize = "auto",
    data_axis: DataAxis = "replicate",
    num_processes: int = 1,
    precision: Precision = "32-true",
    steps: int = 3,
) -> ParityReport:
    """Train a small model a few steps with SGD and with AdamW, on one process and on the layout, and compare.

    Every process calls this and returns the same report; Lightning starts the processes where nothing else did.

    Args:
        config: The model.
        tensor_parallel_size: As the strategy takes it.
        data_parallel_size: As the strategy takes it; must divide the batch of four rows.
        data_axis: As the strategy takes it.
        num_processes: Of this node.
        precision: Lightning's name. In fp32 errors must stay below 1e-5. In bf16 the measure is how far one process in
            bf16 is from one in fp32: the layout may be twice as far.
        steps: Optimizer steps.

    Raises:
        ValueError: If ``steps`` is below 1, or the replicas cannot share the batch evenly.
    """
    if steps < 1:
        raise ValueError(f"steps ({steps}) must be at least 1: without a step nothing is compared.")
    if data_parallel_size != "auto" and BATCH_SIZE % data_parallel_size:
        raise ValueError(f"data_parallel_size ({data_parallel_size}) must divide the batch of {BATCH_SIZE} rows.")
    runs = []
    for name in OPTIMIZERS:
        strategy = BoostParallelStrategy(
            tensor_parallel_size, data_parallel_size=data_parallel_size, data_axis=data_axis
        )
        runs.append(_compare_runs(config, strategy, num_processes, precision, steps, name))
    return max(runs, key=lambda report: report.worst_of_tolerance)


def _compare_runs(
    config: LlamaConfig,
    strategy: BoostParallelStrategy,
    num_processes: int,
    precision: Precision,
    steps: int,
    optimizer_name: str,
) -> ParityReport:
    parallel = _train_on_layout(config, strategy, optimizer_name, num_processes, precision, steps)
    oracle = _train_on_one_process(config, optimizer_name, precision, steps, dtype=torch.float32)
    errors = compare(parallel, oracle)
    gradient_tolerance = weight_tolerance = FP32_TOLERANCE
    if precision == "bf16-true":
        narrow = compare(_train_on_one_process(config, optimizer_name, precision, steps, dtype=torch.bfloat16), oracle)
        gradient_tolerance, weight_tolerance = BF16_FACTOR * narrow.gradient, BF16_FACTOR * narrow.weight
    mine = (parallel.losses, parallel.gradient_norms)
    replicas_equal = strategy.reduce_boolean_decision(mine == strategy.broadcast(mine))
    return ParityReport(
        layout=str(strategy.sizes),
        precision=precision,
        optimizer=optimizer_name,
        steps=steps,
        gradient_tolerance=gradient_tolerance,
        weight_tolerance=weight_tolerance,
        worst_loss_relative_error=errors.loss,
        worst_gradient_norm_relative_error=errors.gradient_norm,
        worst_gradient_relative_error=errors.gradient,
        worst_weight_relative_error=errors.weight,
        worst_parameter=errors.worst_parameter,
        replicas_equal=replicas_equal,
    )


def compare(found: Trajectory, expected: Trajectory) -> Errors:
    """Return the relative errors of one run against another.

    Of a gradient: ``‖a - b‖ / max(‖b‖, 1e-6 · norm of all)``, so that rounding noise is not held against its own size.
    Of a weight: the same on its change since the start, which counts as a hundredth of the weight at least: fp32 holds
    a weight to 6e-8 of itself, and so a smaller change not to 1e-5. Of a number: ``|a - b| / |b|``.

    Raises:
        ValueError: If the runs do not hold the same parameters.
    """
    if found.gradients.keys() != expected.gradients.keys() or not expected.gradients:
        different = sorted(found.gradients.keys() ^ expected.gradients.keys())
        raise ValueError(f"the two runs do not have gradients of the same parameters: {different[:5]}.")
    gradients = _relative_errors(found.gradients, expected.gradients, floors={})
    floors = {name: SMALLEST_CHANGE * norm for name, norm in expected.weight_norms.items()}
    changes = _relative_errors(found.changes, expected.changes, floors=floors)
    return Errors(
        loss=_worst_relative(found.losses, expected.losses),
        gradient_norm=_worst_relative(found.gradient_norms, expected.gradient_norms),
        gradient=max(gradients.values()),
        weight=max(changes.values()),
        worst_parameter=max(gradients, key=lambda name: gradients[name]),
    )


def _relative_errors(
    found: dict[str, Tensor], expected: dict[str, Tensor], floors: dict[str, float]
) -> dict[str, float]:
    total = torch.stack([tensor.double().norm() for tensor in expected.values()]).norm().item()
    errors = {}
    for name, tensor in expected.items():
        scale = max(tensor.double().norm().item(), 1e-6 * total, floors.get(name, 0.0))
        error = ((found[name].double() - tensor.double()).norm() / scale).item()
        # a number that is none must not pass as small
        errors[name] = error if error == error else float("inf")
    return errors


def _worst_relative(found: list[float], expected: list[float]) -> float:
    pairs = zip(found, expected, strict=True)
    errors = [abs(mine - right) / abs(right) for mine, right in pairs]
    return max(error if error == error else float("inf") for error in errors)


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


def _train_on_layout(
    config: LlamaConfig,
    strategy: BoostParallelStrategy,
    optimizer_name: str,
    num_processes: int,
    precision: Precision,
    steps: int,
) -> Trajectory:
    # not torch's own: Lightning seeds anew from what seed_everything has left in the environment
    seed_everything(SEED, verbose=False)
    with torch.device("meta"):
        module = _RecordingModule(LlamaForCausalLM(config), optimizer_name, steps)
    trainer = Trainer(
        strategy=strategy,
        devices=num_processes,
        precision=precision,
        max_steps=steps,
        gradient_clip_val=CLIP_NORM,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    return module.trajectory


def _train_on_one_process(
    config: LlamaConfig, optimizer_name: str, precision: Precision, steps: int, *, dtype: torch.dtype
) -> Trajectory:
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
