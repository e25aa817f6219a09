"""What a run was and what came of it, on one screen at its end."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lightning_boost.collectives import CollectiveLog, Traffic, count_collectives
from lightning_boost.config import LlamaConfig
from lightning_boost.cost import CHUNKS, count_parameters, layer_traffic, second_run_traffic
from lightning_boost.mesh import TENSOR_AXIS
from lightning_boost.model.generation import generate
from lightning_boost.model.llama import DecoderLayer
from lightning_boost.recompute import RecomputeOptions
from lightning_boost.tensor_parallel.statistic import statistic_columns
from lightning_boost.tensor_parallel.verification import NormDifference, verify_norms

Row = tuple[str, str]


class RunSummary(Callback):
    """Print the layout, the counted communication, the norms' difference, the losses and a sample of text.

    Made for a ``LowRankLanguageModel`` on a ``TextDataModule``. The first training step is counted, and the norms are
    compared on the last batch of every validation; other steps are left alone. With ``num_sanity_val_steps=-1`` the
    loss before training is known too.

    Args:
        prompt: Text that the sample follows.
        sample_tokens: Length of the sample; 0 for none.
        next_command: The command to try next; ``{checkpoint}`` in it becomes the path of the last checkpoint and
            ``{python}`` that of the interpreter. Left out if no checkpoint was saved.
    """

    def __init__(self, *, prompt: str = "The ", sample_tokens: int = 200, next_command: str | None = None) -> None:
        super().__init__()
        self.prompt = prompt
        self.sample_tokens = sample_tokens
        self.next_command = next_command
        self._watch = ExitStack()
        self._losses: dict[str, float] = {}
        self._validated_at = 0
        self._log: CollectiveLog | None = None
        self._tokens_of_step = self._num_runs = 0
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
        if self._log is None:
            self._tokens_of_step = batch["input_ids"].numel()
            self._log = self._watch.enter_context(count_collectives())
            first, *_ = _own_layers(pl_module).values()
            # micro-batches of a pipeline; what backward runs again calls forward alone
            self._watch.callback(first.register_forward_hook(self._count_run).remove)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop counting."""
        self._watch.close()

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

    def _count_run(self, *_: Any) -> None:
        self._num_runs += 1

    def _sample(self, trainer: Trainer, pl_module: LightningModule) -> str | None:
        datamodule: Any = getattr(trainer, "datamodule", None)
        tokenizer = getattr(datamodule, "tokenizer", None)
        if tokenizer is None or self.sample_tokens == 0:
            return None
        prompt = torch.tensor([tokenizer.encode(self.prompt)], device=pl_module.device)
        tokens = generate(pl_module, prompt, self.sample_tokens, max_context=datamodule.sequence_length)
        text: str = tokenizer.decode([int(token) for token in tokens])
        return text

    def _rows(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[Row]:
        config = _config(pl_module)
        size = pl_module.device_mesh[TENSOR_AXIS].size() if pl_module.device_mesh is not None else 1
        recompute = getattr(getattr(trainer.strategy, "requested", None), "recompute", RecomputeOptions())
        sizes = str(getattr(trainer.strategy, "sizes", "one process"))
        yield "layout", sizes if recompute.kind == "none" else f"{sizes}; {recompute}"
        yield "model", _describe(config)
        low, full = count_parameters(config), count_parameters(config, full_rank=True)
        yield "parameters", f"{low:,}; with full-rank matrices {full:,} ({full / low:.2f} times as many)"
        if size > 1 and self._log is not None:
            dtype = torch.bfloat16 if str(trainer.precision).startswith("bf16") else torch.float32
            columns = statistic_columns(dtype, size)
            axis = {"tensor_parallel_size": size, "statistic_columns": columns}
            layers = list(_own_layers(pl_module))
            counted = {pass_: _of_layers(self._log, pass_) for pass_ in ("forward", "backward")}
            for pass_, (launches, values) in _formula(config, recompute, layers, axis).items():
                yield (
                    f"{pass_}, a block",
                    f"{counted[pass_].launches / len(layers) / self._num_runs:g} collectives,"
                    f" {counted[pass_].values / len(layers) / self._tokens_of_step:.0f} values per token counted;"
                    f" formula {launches:g} and {values:.0f}",
                )
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


def _own_layers(pl_module: LightningModule) -> dict[int, DecoderLayer]:
    """Return the layers that stand on this process by index; on a pipeline those of its stages."""
    named = {name: module for name, module in pl_module.named_modules() if isinstance(module, DecoderLayer)}
    return {int(name.rpartition(".")[2]): layer for name, layer in named.items()}


def _of_layers(log: CollectiveLog, pass_: str) -> Traffic:
    return sum((log.total(chunk=chunk, pass_=pass_) for chunk in CHUNKS), Traffic())


def _formula(
    config: LlamaConfig, recompute: RecomputeOptions, layers: Sequence[int], axis: Mapping[str, int]
) -> dict[str, tuple[float, float]]:
    """Return by pass the collectives of one of the layers on average, and the values that it hands in for a token."""
    formulas: list[Mapping[tuple[str, str, str], float]] = [layer_traffic(config, layer, **axis) for layer in layers]
    formulas += [
        second_run_traffic(config, layer, recompute=recompute.kind, store_latents=recompute.store_latents, **axis)
        for layer in recompute.choose(config.num_hidden_layers)
        if layer in layers
    ]
    found = {}
    for pass_ in ("forward", "backward"):
        values = [values for formula in formulas for key, values in formula.items() if key[2] == pass_]
        found[pass_] = len(values) / len(layers), sum(values) / len(layers)
    return found
