"""``parity``: prove on this machine that a layout trains the one-process model."""

import contextlib
import json as json_format
import sys
from typing import Literal

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from lightning_boost.config import LlamaConfig, LowRankConfig, LowRankKind
from lightning_boost.parity import ParityReport, check_parity


def parity(
    *,
    kind: LowRankKind = "cola",
    tensor_parallel_size: int = 2,
    precision: Literal["32-true", "bf16-true"] = "32-true",
    steps: int = 3,
    keep_outer_activation: bool | None = None,
    bias: bool = False,
    json: bool = False,
) -> int:
    """Compare every gradient, and every weight after steps, between one process and a layout.

    A model of three layers with odd sizes is trained on random tokens whose labels are masked unevenly, with SGD and
    with AdamW, clipped. Returns 0 when all errors are within tolerance, else 1.

    Args:
        kind: Of the factor pairs.
        tensor_parallel_size: Processes that share each layer; all are started on this machine.
        precision: Lightning's name.
        steps: Optimizer steps.
        keep_outer_activation: Whether the MLP keeps SiLU on its gate; none: as the kind does.
        bias: Whether projections have biases.
        json: Whether the last line of standard output is one JSON object, and all else goes to standard error.
    """
    config = LlamaConfig(
        vocab_size=131,
        hidden_size=64,
        intermediate_size=173,
        num_hidden_layers=3,
        num_attention_heads=8,
        attention_bias=bias,
        mlp_bias=bias,
        low_rank=LowRankConfig(kind=kind, bottleneck_size=15, keep_outer_activation=keep_outer_activation),
    )
    with contextlib.redirect_stdout(sys.stderr):
        report = check_parity(
            config,
            tensor_parallel_size=tensor_parallel_size,
            num_processes=tensor_parallel_size,
            precision=precision,
            steps=steps,
        )
    if dist.get_rank() != 0:
        # a process other than 0 that ends with an error would count as a crash
        return 0
    if json:
        print(json_format.dumps(report.as_dict()))
    else:
        _show(report, kind)
    return 0 if report.passed else 1


def _show(report: ParityReport, kind: str) -> None:
    table = Table(title=f"{kind}, {report.layout}, {report.precision}, {report.steps} steps of {report.optimizer}")
    table.add_column("worst relative error of")
    table.add_column("found", justify="right")
    table.add_column("allowed", justify="right")
    rows = (
        ("a gradient", report.worst_gradient_relative_error, report.gradient_tolerance),
        ("the global gradient norm", report.worst_gradient_norm_relative_error, report.gradient_tolerance),
        ("a weight's change", report.worst_weight_relative_error, report.weight_tolerance),
        ("a loss", report.worst_loss_relative_error, report.gradient_tolerance),
    )
    for name, found, allowed in rows:
        table.add_row(name, f"{found:.1e}", f"{allowed:.1e}")
    console = Console()
    console.print(table)
    console.print(
        f"worst gradient: {report.worst_parameter}; processes agree: {'yes' if report.replicas_equal else 'no'}"
    )
    console.print("PARITY HOLDS" if report.passed else "PARITY FAILS")
