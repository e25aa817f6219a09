"""``parity``: prove on this machine that a layout trains the one-process model."""

import contextlib
import json as json_format
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from lightning_boost.config import GateKind, LlamaConfig, LowRankConfig, LowRankKind, PairKind, RopeScaling
from lightning_boost.data_parallel import DataAxis
from lightning_boost.kernels.dispatch import KernelMode
from lightning_boost.parity import SEQUENCE_LENGTH, ParityReport, Precision, check_parity
from lightning_boost.pipeline_parallel.options import Schedule
from lightning_boost.tensor_parallel.scheme import SchemeName

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


class Layout(NamedTuple):
    """A column of the matrix."""

    name: str
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    data_axis: DataAxis = "replicate"


LAYOUTS = (
    Layout("T1"),
    Layout("T2", tensor=2),
    Layout("T4", tensor=4),
    Layout("P2", pipeline=2),
    Layout("T2 P2", tensor=2, pipeline=2),
    Layout("D2 replicate", data=2),
    Layout("D2 shard", data=2, data_axis="shard"),
    Layout("T2 D2 replicate", tensor=2, data=2),
    Layout("T2 D2 shard", tensor=2, data=2, data_axis="shard"),
    Layout("P2 D2 shard", pipeline=2, data=2, data_axis="shard"),
)

_WIDTH = 120
"""Of the table where the output is no terminal."""


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
    scheme: SchemeName = "auto",
    kernels: KernelMode = "auto",
    compile: bool = False,
    precision: Precision = "32-true",
    steps: int = 3,
    keep_outer_activation: bool | None = None,
    crossing_base: PairKind = "cola",
    crossing_gate: GateKind = "tensor",
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
        scheme: How the tensor axis splits layers, as the strategy takes it.
        kernels: Which run, as the strategy takes it; the one process has torch's own operations.
        compile: Whether the layout's layers are compiled; those of the one process are not.
        precision: Lightning's name; 64-true, in which no run trains, tells rounding from a defect.
        steps: Optimizer steps.
        keep_outer_activation: Whether the MLP keeps SiLU on its gate; none: as the kind does.
        crossing_base: With kind ``lax``, what stands on a latent.
        crossing_gate: With kind ``lax``, the gate; shape ``uneven`` takes ``linear``, the one that changes widths.
        matrix: Whether to go through all shapes and layouts of up to four processes, and print a table.
        json: Whether the last line of standard output is one JSON object, and all else goes to standard error.
    """
    model: dict[str, Any] = {
        "kind": kind,
        "keep_outer_activation": keep_outer_activation,
        "crossing_base": crossing_base,
        "crossing_gate": crossing_gate,
    }
    name = _named(model, scheme, compile)
    if matrix:
        chosen = {"scheme": scheme, "kernels": kernels, "compile": compile, "precision": precision, "steps": steps}
        return _matrix(name, {**model, **chosen}, json)
    with contextlib.redirect_stdout(sys.stderr):
        report = check_parity(
            model_config(shape=shape, **model),
            tensor_parallel_size=tensor_parallel_size,
            data_parallel_size=data_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            data_axis=data_axis,
            num_processes=tensor_parallel_size * pipeline_parallel_size * data_parallel_size,
            precision=precision,
            steps=steps,
            pipeline_schedule=pipeline_schedule,
            virtual_stages=virtual_stages,
            scheme=scheme,
            kernels=kernels,
            compile=compile,
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
        _show(report, name)
    return 0 if report.passed else 1


def model_config(
    kind: LowRankKind,
    shape: str,
    *,
    keep_outer_activation: bool | None = None,
    crossing_base: PairKind = "cola",
    crossing_gate: GateKind = "tensor",
) -> LlamaConfig:
    """Return the model of a cell of the matrix: three layers with odd sizes."""
    options = dict(SHAPES[shape])
    pairs = {name: options.pop(name) for name in list(options) if "bottleneck_size" in name}
    # the only gate between latents of different widths
    gate = "linear" if (kind, shape) == ("lax", "uneven") else crossing_gate
    low_rank = {"kind": kind, "bottleneck_size": 15, "keep_outer_activation": keep_outer_activation, **pairs}
    low_rank |= {"crossing_base": crossing_base, "crossing_gate": gate}
    sizes: dict[str, Any] = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 173, "num_hidden_layers": 3}
    return LlamaConfig(**sizes, num_attention_heads=8, low_rank=LowRankConfig(**low_rank), **options)


def _named(model: Mapping[str, Any], scheme: SchemeName, compiles: bool) -> str:
    """Write what is said of a model's kind, the scheme where one is asked for, and whether layers are compiled."""
    names = ("kind", "crossing_base", "crossing_gate") if model["kind"] == "lax" else ("kind",)
    words = [model[name] for name in names]
    return ", ".join(words + [scheme] * (scheme != "auto") + ["compiled"] * compiles)


def _show(report: ParityReport, model: str) -> None:
    table = Table(title=f"{model}, {report.layout}, {report.precision}, {report.steps} steps of {report.optimizer}")
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
    console.print(f"worst parameter: {report.worst_parameter}", soft_wrap=True)
    console.print(f"processes agree: {'yes' if report.replicas_equal else 'no'}")
    console.print("PARITY HOLDS" if report.passed else "PARITY FAILS")


def _matrix(name: str, options: Mapping[str, Any], json: bool) -> int:
    """Run every cell in processes of its own, since each needs another number of them."""
    reports: dict[str, dict[str, dict[str, Any]]] = {}
    for shape in SHAPES:
        reports[shape] = {}
        for layout in LAYOUTS:
            # refused: embedding and head would stand on different stages; a baseline has no dense projections
            is_refused = (shape == "tied" and layout.pipeline > 1) or (
                shape == "mixed" and options["scheme"].startswith("vanilla")
            )
            if not is_refused:
                reports[shape][layout.name] = _run_cell(options, shape, layout)
    passed = all(report["passed"] for row in reports.values() for report in row.values())
    if json:
        print(json_format.dumps({"passed": passed, "shapes": reports}))
    else:
        _show_matrix(f"{name}, {options['precision']}: worst relative error of a gradient", reports, passed)
    return 0 if passed else 1


def _run_cell(options: Mapping[str, Any], shape: str, layout: Layout) -> dict[str, Any]:
    every = {
        **options,
        "shape": shape,
        "tensor_parallel_size": layout.tensor,
        "pipeline_parallel_size": layout.pipeline,
        "data_parallel_size": layout.data,
        "data_axis": layout.data_axis,
    }
    arguments = [f"--{name}={json_format.dumps(value).strip(chr(34))}" for name, value in every.items()]
    command = [sys.executable, "-m", "lightning_boost", "parity", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise ValueError(f"shape {shape} on {layout.name} did not run: {done.stderr[-2000:]}")
    report: dict[str, Any] = json_format.loads(done.stdout.splitlines()[-1])
    sys.stderr.write(f"{shape}, {layout.name}: {_cell(report)}\n")
    return report


def _show_matrix(title: str, reports: dict[str, dict[str, dict[str, Any]]], passed: bool) -> None:
    table = Table(title=title)
    table.add_column("shape", no_wrap=True)
    for layout in LAYOUTS:
        table.add_column(layout.name.replace(" ", "\n"), justify="right")
    for shape, row in reports.items():
        table.add_row(shape, *(_cell(row[layout.name]) if layout.name in row else "-" for layout in LAYOUTS))
    worst = max(report["worst_weight_relative_error"] for row in reports.values() for report in row.values())
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(table)
    console.print(
        "T: tensor, P: pipeline, D: data axis. -: refused; tied embeddings would stand on different stages, and schemes"
        " 'vanilla' take no dense projections."
    )
    console.print(f"worst relative error of a weight's change: {worst:.0e}")
    console.print("PARITY HOLDS" if passed else "PARITY FAILS")


def _cell(report: dict[str, Any]) -> str:
    error = f"{report['worst_gradient_relative_error']:.0e}"
    return error if report["passed"] else f"FAILS {error}"
