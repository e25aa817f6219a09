"""``parity``: prove on this machine that a layout trains the one-process model."""

import contextlib
import json as json_format
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from lightning_boost.config import LlamaConfig, LowRankConfig, LowRankKind, RopeScaling
from lightning_boost.data_parallel import DataAxis
from lightning_boost.parity import SEQUENCE_LENGTH, ParityReport, check_parity
from lightning_boost.pipeline_parallel.options import Schedule

Shape = Literal[
    "plain",
    "biased",
    "grouped_queries",
    "one_key_value_head",
    "tied",
    "uneven",
    "mixed",
    "smoothed",
    "head_size",
    "rope_scaled",
]

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "grouped_queries": {"num_key_value_heads": 4},
    "one_key_value_head": {"num_key_value_heads": 1, "bottleneck_size": 8},
    "tied": {"tie_word_embeddings": True},
    "uneven": {
        "attention_bottleneck_size": 11,
        "mlp_bottleneck_size": 23,
        "other_bottleneck_sizes": {"k_proj": 7, "layers.1.up_proj": 30, "layers.2": 13},
    },
    "mixed": {
        "other_bottleneck_sizes": {
            "layers.0.q_proj": "dense",
            "layers.0.down_proj": "dense",
            "layers.1.up_proj": "dense",
            "layers.2.o_proj": "dense",
        }
    },
    "smoothed": {"label_smoothing": 0.1},
    "head_size": {"head_dim": 12},
    "rope_scaled": {
        "rope_scaling": RopeScaling(
            rope_type="dynamic", factor=2.0, original_max_position_embeddings=SEQUENCE_LENGTH // 2
        )
    },
}
"""What a parity model has beside its kind; sizes are odd where they may be."""

LAYOUTS: tuple[tuple[int, int, int, DataAxis], ...] = (
    (1, 1, 1, "replicate"),
    (2, 1, 1, "replicate"),
    (4, 1, 1, "replicate"),
    (1, 2, 1, "replicate"),
    (2, 2, 1, "replicate"),
    (1, 1, 2, "replicate"),
    (1, 1, 2, "shard"),
    (2, 1, 2, "replicate"),
    (2, 1, 2, "shard"),
    (1, 2, 2, "shard"),
)
"""Tensor size, pipeline size, data size and data axis of the matrix."""


def parity(
    *,
    kind: LowRankKind = "cola",
    shape: Shape = "plain",
    tensor_parallel_size: int = 2,
    pipeline_parallel_size: int = 1,
    data_parallel_size: int = 1,
    data_axis: DataAxis = "replicate",
    pipeline_schedule: Schedule = "1f1b",
    virtual_stages: int = 1,
    precision: Literal["32-true", "bf16-true"] = "32-true",
    steps: int = 3,
    keep_outer_activation: bool | None = None,
    matrix: bool = False,
    json: bool = False,
) -> int:
    """Compare every gradient, and every weight after steps, between one process and a layout.

    A model of three layers with odd sizes is trained on random tokens whose labels are masked unevenly, with SGD and
    with AdamW, clipped. The exit code is 0 when all errors are within tolerance, else 1.

    Args:
        kind: Of the model's linears.
        shape: What the model has beside it.
        tensor_parallel_size: Processes that share each layer; all are started on this machine.
        pipeline_parallel_size: Stages of layers.
        data_parallel_size: Replicas.
        data_axis: How replicas keep parameters.
        pipeline_schedule: Order in which micro-batches go through the stages.
        virtual_stages: Stages on each process, above 1 with ``interleaved_1f1b``.
        precision: Lightning's name.
        steps: Optimizer steps.
        keep_outer_activation: Whether the MLP keeps SiLU on its gate; none: as the kind does.
        matrix: Whether to go through all shapes and layouts of up to four processes, and print a table.
        json: Whether the last line of standard output is one JSON object, and all else goes to standard error.
    """
    if matrix:
        return _matrix(kind, precision, steps, json)
    with contextlib.redirect_stdout(sys.stderr):
        report = check_parity(
            model_config(kind, shape, keep_outer_activation),
            tensor_parallel_size=tensor_parallel_size,
            data_parallel_size=data_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            data_axis=data_axis,
            num_processes=tensor_parallel_size * pipeline_parallel_size * data_parallel_size,
            precision=precision,
            steps=steps,
            pipeline_schedule=pipeline_schedule,
            virtual_stages=virtual_stages,
        )
    is_first = dist.get_rank() == 0
    # together, so that none finds its peers gone while it still has something to say
    dist.barrier()
    dist.destroy_process_group()
    if not is_first:
        # a process other than 0 that ends with an error would count as a crash
        return 0
    if json:
        print(json_format.dumps(report.as_dict()))
    else:
        _show(report, kind)
    return 0 if report.passed else 1


def model_config(kind: LowRankKind, shape: str, keep_outer_activation: bool | None = None) -> LlamaConfig:
    """Return the model of a cell of the matrix: three layers with odd sizes."""
    options = dict(SHAPES[shape])
    pairs = {name: options.pop(name) for name in list(options) if "bottleneck_size" in name}
    low_rank = {"kind": kind, "bottleneck_size": 15, "keep_outer_activation": keep_outer_activation, **pairs}
    sizes: dict[str, Any] = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 173, "num_hidden_layers": 3}
    return LlamaConfig(**sizes, num_attention_heads=8, low_rank=LowRankConfig(**low_rank), **options)


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
    console.print(f"worst gradient: {report.worst_parameter}", soft_wrap=True)
    console.print(f"processes agree: {'yes' if report.replicas_equal else 'no'}")
    console.print("PARITY HOLDS" if report.passed else "PARITY FAILS")


def _matrix(kind: LowRankKind, precision: str, steps: int, json: bool) -> int:
    """Run every cell in processes of its own, since each needs another number of them."""
    table = Table(title=f"{kind}, {precision}: worst relative error of a gradient / of a weight's change")
    table.add_column("shape")
    for tensor, pipeline, data, data_axis in LAYOUTS:
        heading = f"tensor {tensor}\npipeline {pipeline}\ndata {data}" + (f"\n{data_axis}" if data > 1 else "")
        table.add_column(heading, justify="right")
    reports: dict[str, list[dict[str, Any]]] = {}
    for shape in SHAPES:
        reports[shape] = list(_cells(kind, shape, precision, steps))
        table.add_row(shape, *(_cell(report) for report in reports[shape]))
    passed = all(report["passed"] for row in reports.values() for report in row)
    if json:
        print(json_format.dumps({"passed": passed, "shapes": reports}))
    else:
        console = Console()
        console.print(table)
        console.print("PARITY HOLDS" if passed else "PARITY FAILS")
    return 0 if passed else 1


def _cells(kind: str, shape: str, precision: str, steps: int) -> Iterator[dict[str, Any]]:
    for tensor, pipeline, data, data_axis in LAYOUTS:
        if shape == "tied" and pipeline > 1:
            # refused: embedding and head stand on different stages
            continue
        options = {
            "kind": kind,
            "shape": shape,
            "precision": precision,
            "steps": steps,
            "tensor_parallel_size": tensor,
            "pipeline_parallel_size": pipeline,
            "data_parallel_size": data,
            "data_axis": data_axis,
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", "lightning_boost", "parity", *arguments, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not done.stdout.strip():
            layout = f"tensor {tensor} × pipeline {pipeline} × data {data}"
            raise ValueError(f"shape {shape} on {layout} did not run: {done.stderr[-2000:]}")
        report: dict[str, Any] = json_format.loads(done.stdout.splitlines()[-1])
        sys.stderr.write(f"{shape}, tensor {tensor}, pipeline {pipeline}, data {data} {data_axis}: {_cell(report)}\n")
        yield report


def _cell(report: dict[str, Any]) -> str:
    errors = f"{report['worst_gradient_relative_error']:.0e} / {report['worst_weight_relative_error']:.0e}"
    return errors if report["passed"] else f"FAILS {errors}"
