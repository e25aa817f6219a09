"""What a run was and what came of it, on one screen at its end."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lightning_boost.callbacks.traffic_formula import given_scheme, part_of, recompute_of
from lightning_boost.collectives import CollectiveLog, Traffic, count_collectives
from lightning_boost.config import LlamaConfig
from lightning_boost.cost import CHUNKS, TensorAxis, count_parameters, layer_moves
from lightning_boost.kernels.dispatch import describe_kernels
from lightning_boost.kernels.statistic import statistic_columns
from lightning_boost.mesh import TENSOR_AXIS
from lightning_boost.model.generation import generate
from lightning_boost.model.llama import find_llama
from lightning_boost.pipeline_parallel.schedule import find_pipeline
from lightning_boost.recompute import RecomputeOptions
from lightning_boost.tensor_parallel.verification import NormDifference, verify_norms

Row = tuple[str, str]

_MOST_TOKENS_OF_PIPELINE = 50
"""Length of a sample on a pipeline, which has no cache of keys and values: each token passes all stages by itself."""


class RunSummary(Callback):
    """Print the layout, the counted communication, the norms' difference, the losses and a sample of text.

    Made for a ``LowRankLanguageModel`` on a ``TextDataModule``. The first training step is counted, and the norms are
    compared on the last batch of every validation; other steps are left alone. With ``num_sanity_val_steps=-1`` the
    loss before training is known too.

    Args:
        prompt: Text that the sample follows.
        sample_tokens: Length of the sample, at most 50 on a pipeline, where each token takes the whole context through
            all stages; 0 for none.
        next_command: The command to try next; ``{checkpoint}`` in it becomes the path of the last checkpoint and
            ``{python}`` that of the interpreter. Left out if no checkpoint was saved.

    Raises:
        ValueError: If ``sample_tokens`` is below 0.
    """

    def __init__(self, *, prompt: str = "The ", sample_tokens: int = 200, next_command: str | None = None) -> None:
        super().__init__()
        if sample_tokens < 0:
            raise ValueError(f"sample_tokens ({sample_tokens}) must be at least 0, which makes no sample.")
        self.prompt = prompt
        self.sample_tokens = sample_tokens
        self.next_command = next_command
        self._watch = ExitStack()
        self._losses: dict[str, float] = {}
        self._validated_at = 0
        self._log: CollectiveLog | None = None
        self._num_runs = self._tokens_of_run = 0
        self._norms: list[NormDifference] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the module tells its sizes, before time is spent.

        Raises:
            TypeError: If it has no ``LlamaConfig``.
        """
        _config(pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count the first step's collectives."""
        # once more where the batch before it was skipped
        self._watch.close()
        if self._num_runs == 0:
            self._log = self._watch.enter_context(count_collectives())

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop counting."""
        self._watch.close()
        if self._num_runs == 0:
            model, (rows, tokens) = find_llama(pl_module), batch["input_ids"].shape
            pipeline = None if model is None else find_pipeline(model)
            cut = None if pipeline is None else pipeline.last_cut
            self._num_runs, rows = cut or (1, rows)
            self._tokens_of_run = rows * tokens

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Compare the norms on the last batch."""
        num_batches = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        if batch_idx == num_batches[dataloader_idx] - 1:
            self._norms = self._watch.enter_context(verify_norms(pl_module))

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Stop comparing."""
        self._watch.close()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the loss."""
        loss = trainer.callback_metrics.get("val_loss")
        if loss is not None:
            self._losses["before" if trainer.sanity_checking else "after"] = loss.item()
            self._validated_at = trainer.global_step

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing open."""
        self._watch.close()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the summary on process 0; every process takes part in making the sample."""
        sample = self._sample(trainer, pl_module)
        if not trainer.is_global_zero:
            return
        table = Table(title="what this run was", show_header=False, title_justify="left")
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in self._rows(trainer, pl_module):
            table.add_row(name, text)
        if sample is not None:
            table.add_row(f"after {self.prompt!r}", sample, end_section=True)
        path = _last_checkpoint(trainer)
        table.add_row("checkpoint", path or "none was saved")
        console = Console()
        console.print(table)
        if self.next_command and path:
            command = self.next_command.format(python=_short(sys.executable), checkpoint=path)
            # not in the table, which would break the line
            console.print(f"To try next:\n{command}", soft_wrap=True, highlight=False)

    def _sample(self, trainer: Trainer, pl_module: LightningModule) -> str | None:
        datamodule: Any = getattr(trainer, "datamodule", None)
        tokenizer = getattr(datamodule, "tokenizer", None)
        if tokenizer is None or self.sample_tokens == 0:
            return None
        prompt = torch.tensor([tokenizer.encode(self.prompt)], device=pl_module.device)
        model = find_llama(pl_module)
        is_piped = model is not None and find_pipeline(model) is not None
        num_tokens = min(self.sample_tokens, _MOST_TOKENS_OF_PIPELINE) if is_piped else self.sample_tokens
        tokens = generate(pl_module, prompt, num_tokens, max_context=datamodule.sequence_length)
        text: str = tokenizer.decode([int(token) for token in tokens])
        return text

    def _rows(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[Row]:
        config = _config(pl_module)
        size = pl_module.device_mesh[TENSOR_AXIS].size() if pl_module.device_mesh is not None else 1
        recompute, scheme = recompute_of(trainer), given_scheme(trainer)
        sizes = str(getattr(trainer.strategy, "sizes", "one process"))
        yield "layout", sizes if recompute.kind == "none" else f"{sizes}; {recompute}"
        yield "model", _describe(config)
        stream = next(pl_module.parameters()).dtype
        gemm = torch.bfloat16 if str(trainer.precision).startswith("bf16") else stream
        yield "kernels", describe_kernels(pl_module.device, gemm)
        if getattr(getattr(trainer.strategy, "requested", None), "compiles", False):
            yield "layers", "compiled, each as one graph"
        low, full = count_parameters(config), count_parameters(config, full_rank=True)
        yield "parameters", f"{low:,}; with full-rank matrices {full:,} ({full / low:.2f} times as many)"
        if size > 1 and self._log is not None:
            columns = (statistic_columns(dtype, size) for dtype in (gemm, stream))
            axis = TensorAxis(size=size, gemm_columns=next(columns), stream_columns=next(columns))
            model = find_llama(pl_module)
            layers = [*range(config.num_hidden_layers)] if model is None else part_of(model)[0]
            runs = self._num_runs, self._tokens_of_run
            yield from _communication(self._log, config, recompute, scheme, layers, runs, axis)
        if self._norms:
            worst = max(self._norms, key=lambda norm: norm.max_absolute)
            yield (
                "online RMSNorm",
                f"at most {worst.max_absolute:.1e} from the exact norm, on latents of up to {worst.max_exact:.1f}"
                f" ({len(self._norms)} norms, last validation batch)",
            )
        before, after = self._losses.get("before"), self._losses.get("after")
        at_start = "" if before is None else f"{before:.3f} before training, "
        at_end = "none during it" if after is None else f"{after:.3f} after {self._validated_at} steps"
        yield "validation loss", f"{at_start}{at_end} (nats per token; the run took {trainer.global_step} steps)"


def _describe(config: LlamaConfig) -> str:
    places = [(layer, name) for layer in range(config.num_hidden_layers) for name in config.projection_shapes()]
    sizes = {config.bottleneck_size_of(*place) for place in places}
    written = ", ".join("dense" if size is None else str(size) for size in sorted(sizes, key=lambda size: size or 0))
    return f"{config.low_rank.kind}, bottleneck size {written} of hidden size {config.hidden_size}"


def _config(pl_module: LightningModule) -> LlamaConfig:
    config = getattr(pl_module, "config", None)
    if not isinstance(config, LlamaConfig):
        raise TypeError(
            f"RunSummary reads the sizes from the module's config, a LlamaConfig; {type(pl_module).__name__} has none."
        )
    return config


def _last_checkpoint(trainer: Trainer) -> str:
    callback = trainer.checkpoint_callback
    if not isinstance(callback, ModelCheckpoint):
        return ""
    return _short(callback.last_model_path or callback.best_model_path)


def _short(path: str) -> str:
    """Write a path relative to the working directory where it lies below it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if path and Path(path).is_relative_to(here) else path


def _communication(
    log: CollectiveLog,
    config: LlamaConfig,
    recompute: RecomputeOptions,
    scheme: str | None,
    layers: list[int],
    runs: tuple[int, int],
    axis: TensorAxis,
) -> Iterator[Row]:
    """Yield what the collectives of a block that stands here were counted to move, beside the formula.

    ``runs`` are forwards and tokens of each: micro-batches of a pipeline.
    """
    num_runs, tokens = runs[0] * len(layers), runs[1]
    again = {"recompute": recompute.kind, "store_latents": recompute.store_latents}
    chosen = recompute.choose(config.num_hidden_layers)
    moves = [
        move
        for layer in layers
        for move in layer_moves(config, layer, axis, scheme=scheme, **(again if layer in chosen else {}))
    ]
    for pass_ in ("forward", "backward"):
        counted = sum((log.total(chunk=chunk, pass_=pass_) for chunk in CHUNKS), Traffic())
        widths = [move.width for move in moves if move.pass_ == pass_ and move.width]
        yield (
            f"{pass_}, a block",
            f"{counted.launches / num_runs:g} collectives, {counted.values / num_runs / tokens:.0f} values per token"
            f" counted; formula {len(widths) / len(layers):g} and {float(sum(widths)) / len(layers):.0f}",
        )
