"""The check: two runs, their distance, and what of it is allowed."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from lightning_boost.config import LlamaConfig
from lightning_boost.data_parallel import DataAxis
from lightning_boost.layout import find_decoder
from lightning_boost.mesh import AutoSize
from lightning_boost.model.llama import LlamaForCausalLM
from lightning_boost.parity.runs import BATCH_SIZE, OPTIMIZERS, Precision, train_on_layout, train_on_one_process
from lightning_boost.parity.trajectory import compare
from lightning_boost.strategy.boost import BoostParallelStrategy

FP32_TOLERANCE = 1e-5
FP64_TOLERANCE = 1e-10

BF16_FACTOR = 2.0
"""In bf16 a layout may be this much farther from the fp32 oracle than one process in bf16 is."""


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
    """Whose gradient or change comes nearest to failing."""

    replicas_equal: bool

    @property
    def passed(self) -> bool:
        """Whether every error is within tolerance, and losses and gradient norms are the same on every process."""
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
    pipeline_parallel_size: int = 1,
    data_axis: DataAxis = "replicate",
    num_processes: int = 1,
    precision: Precision = "32-true",
    steps: int = 3,
    **options: Any,
) -> ParityReport:
    """Train a small model a few steps with SGD and with AdamW, on one process and on the layout, and compare.

    Every process calls this and returns the same report; Lightning starts the processes where nothing else did.

    Args:
        config: The model.
        tensor_parallel_size: As the strategy takes it.
        data_parallel_size: As the strategy takes it; must divide the batch of four rows.
        pipeline_parallel_size: As the strategy takes it.
        data_axis: As the strategy takes it.
        num_processes: Of this node.
        precision: Lightning's name. In fp32 errors must stay below 1e-5, in fp64, where rounding hides nothing, below
            1e-10. In bf16 the measure is how far one process in bf16 is from one in fp32: the layout may be twice as
            far.
        steps: Optimizer steps.
        options: Further ones, of the pipeline, recompute, the scheme or kernels, as the strategy takes them.

    Raises:
        ValueError: If ``steps`` is below 1, or the replicas cannot share the batch evenly.
    """
    if steps < 1:
        raise ValueError(f"steps ({steps}) must be at least 1: without a step nothing is compared.")
    runs = []
    for name in OPTIMIZERS:
        strategy = BoostParallelStrategy(
            tensor_parallel_size,
            data_parallel_size=data_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            data_axis=data_axis,
            **options,
        )
        _check_batch(strategy, config, num_processes)
        runs.append(_compare_runs(config, strategy, num_processes, precision, steps, name))
    return max(runs, key=lambda report: report.worst_of_tolerance)


def _check_batch(strategy: BoostParallelStrategy, config: LlamaConfig, num_processes: int) -> None:
    with torch.device("meta"):
        decoder = find_decoder(LlamaForCausalLM(config))
    num_replicas = strategy.requested.resolve(decoder, num_processes, num_nodes=1).data_parallel_size
    if BATCH_SIZE % num_replicas:
        raise ValueError(f"data_parallel_size ({num_replicas}) must divide the batch of {BATCH_SIZE} rows.")


def _compare_runs(
    config: LlamaConfig,
    strategy: BoostParallelStrategy,
    num_processes: int,
    precision: Precision,
    steps: int,
    optimizer_name: str,
) -> ParityReport:
    parallel = train_on_layout(config, strategy, optimizer_name, num_processes, precision, steps)
    is_fp64 = precision == "64-true"
    oracle_dtype = torch.float64 if is_fp64 else torch.float32
    oracle = train_on_one_process(config, optimizer_name, precision, steps, dtype=oracle_dtype)
    errors = compare(parallel, oracle)
    gradient_tolerance = weight_tolerance = FP64_TOLERANCE if is_fp64 else FP32_TOLERANCE
    if precision == "bf16-true":
        narrow = compare(train_on_one_process(config, optimizer_name, precision, steps, dtype=torch.bfloat16), oracle)
        gradient_tolerance, weight_tolerance = BF16_FACTOR * narrow.gradient, BF16_FACTOR * narrow.weight
    is_weight_worse = errors.weight / weight_tolerance > errors.gradient / gradient_tolerance
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
        worst_parameter=errors.worst_weight if is_weight_worse else errors.worst_gradient,
        replicas_equal=replicas_equal,
    )
