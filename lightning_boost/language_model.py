"""A low-rank language model as a LightningModule."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import LRSchedulerConfigType, OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import Metric
from typing_extensions import override

from lightning_boost.config import TRAINING_OPTIONS, LlamaConfig, llama_config, structure
from lightning_boost.gradients import global_gradient_norm
from lightning_boost.interchange.source import carried_options, open_model
from lightning_boost.model.initialization import initialize
from lightning_boost.model.llama import LlamaForCausalLM
from lightning_boost.model.loss import count_valid, next_tokens
from lightning_boost.optimization import GroupPlan, check_patterns, choose_trained, warmup_then_cosine
from lightning_boost.options import differences, plain

Batch = dict[str, Tensor]


class TokenLoss(Metric):
    """Mean loss over all valid tokens seen, from batches' mean losses and token counts; summed in fp64."""

    higher_is_better = False
    total: Tensor
    num_tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_tokens", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    @override
    def update(self, loss: Tensor, num_tokens: Tensor) -> None:
        """Add a batch.

        Args:
            loss: Mean loss over its valid tokens, scalar.
            num_tokens: How many those are, scalar.
        """
        self.total += loss.detach().double() * num_tokens
        self.num_tokens += num_tokens

    @override
    def compute(self) -> Tensor:
        """Return the mean over everything added, fp32."""
        return (self.total / self.num_tokens).float()


class Perplexity(TokenLoss):
    """Exponential of the mean loss over all valid tokens seen."""

    @override
    def compute(self) -> Tensor:
        """Return the perplexity of everything added, fp32."""
        return super().compute().exp()


class LowRankLanguageModel(LightningModule):
    """Training of a low-rank LLaMA: AdamW, linear warm-up, cosine to a tenth of the peak.

    It starts anew, or from weights in files. Logs ``train_loss`` and ``gradient_norm`` on each step, and ``val_loss``
    and ``val_perplexity`` (or ``test_…``) as means over all valid tokens. A batch is a dict of ``input_ids`` and
    ``labels``, each ``[B, T]``, and of what else the model takes, such as ``document_ids``.

    Args:
        config: Sizes and kind of the model. With ``checkpoint`` they are those of the files: only dropout and label
            smoothing are taken from here, and other options left out, or the same as in the files.
        checkpoint: Directory or file of weights to start from, of any format that ``convert`` reads. Each process
            reads its share of them.
        learning_rate: Peak of the schedule.
        warmup_steps: Steps over which the rate rises to its peak.
        max_steps: Step at which the cosine ends; ``None``: where the Trainer stops.
        betas: AdamW's.
        weight_decay: AdamW's, on matrices.
        decay_all_parameters: Whether norms and biases decay too, as in CoLA's published runs.
        trained_parameters: Patterns of the names of the network's parameters, with ``*`` for anything; what matches
            none is frozen, and has neither gradients nor optimizer state.
        frozen_parameters: Patterns of names that are frozen all the same.
        learning_rate_factors: By pattern of names, what the rate is multiplied by; the first that matches counts.

    Raises:
        ValueError: If a rate or a number of steps is negative, or the checkpoint cannot be read or is another model's.
    """

    def __init__(
        self,
        config: LlamaConfig = LlamaConfig(),  # noqa: B008, it is frozen
        *,
        checkpoint: str | None = None,
        learning_rate: float = 3e-3,
        warmup_steps: int = 100,
        max_steps: int | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.01,
        decay_all_parameters: bool = False,
        trained_parameters: Sequence[str] = ("*",),
        frozen_parameters: Sequence[str] = (),
        learning_rate_factors: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("learning_rate", learning_rate), ("warmup_steps", warmup_steps)):
            if value < 0:
                raise ValueError(f"{name} ({value}) must not be negative.")
        # as Lightning's load_from_checkpoint gives it back
        config = llama_config(config) if isinstance(config, Mapping) else config
        source = None if checkpoint is None else open_model(Path(checkpoint))
        if source is not None:
            config = _agreed(config, source.config, source.path)
        # without the checkpoint: a run that goes on has no need of it
        self.save_hyperparameters(
            {
                "config": plain(config),
                "learning_rate": learning_rate,
                "warmup_steps": warmup_steps,
                "max_steps": max_steps,
                "betas": plain(betas),
                "weight_decay": weight_decay,
                "decay_all_parameters": decay_all_parameters,
                "trained_parameters": list(trained_parameters),
                "frozen_parameters": list(frozen_parameters),
                "learning_rate_factors": dict(learning_rate_factors or {}),
                # for whoever reads the model again in its own format
                "source_options": {} if source is None else carried_options(source.stated),
            }
        )
        self.config = config
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.max_steps = max_steps
        self.betas = betas
        self.weight_decay = weight_decay
        # no values yet: a strategy may want to make only its share of them
        with torch.device("meta"):
            self.model = LlamaForCausalLM(config, values=None if source is None else source.values)
        choose_trained(self.model, trained_parameters, frozen_parameters)
        factors = dict(learning_rate_factors or {})
        check_patterns("learning_rate_factors", factors, [name for name, _ in self.model.named_parameters()])
        self._group_plan = GroupPlan(self.model, decay_all=decay_all_parameters, factors=factors)
        self.metrics = nn.ModuleDict()
        self._set_names = [""]

    @override
    def configure_model(self) -> None:
        """Give the parameters their values, unless the strategy is about to do so."""
        strategy = self.trainer.strategy if self._trainer is not None else None
        if getattr(strategy, "materializes_parameters", False) or not self._is_without_values:
            return
        initialize(self.model, std=self.config.initializer_range)

    @property
    def _is_without_values(self) -> bool:
        return any(parameter.is_meta for parameter in self.model.parameters())

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights; parameters that have no values yet get some first, since nothing can be copied into them."""
        if self._is_without_values:
            initialize(self.model, std=self.config.initializer_range)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    @override
    def setup(self, stage: str) -> None:
        """Check that the data fits the vocabulary, and make metrics for its sets."""
        datamodule = getattr(self.trainer, "datamodule", None)
        self.check_vocabulary(datamodule)
        self._set_names = getattr(datamodule, "validation_names", None) or [""]
        for index in range(len(self._set_names)):
            for stage_name in ("val", "test"):
                self._metric(stage_name, "loss", index)
                self._metric(stage_name, "perplexity", index)

    def _metric(self, stage: str, quantity: str, index: int) -> TokenLoss:
        """Return the metric of a set, made if it is not there yet."""
        key = f"{stage}_{quantity}_{index}"
        if key not in self.metrics:
            self.metrics[key] = (Perplexity() if quantity == "perplexity" else TokenLoss()).to(self.device)
        metric = self.metrics[key]
        assert isinstance(metric, TokenLoss)
        return metric

    def check_vocabulary(self, datamodule: object) -> None:
        """Check that the model has a token for every id of the data.

        Raises:
            ValueError: If the data module's tokenizer has more.
        """
        data_vocab_size = getattr(datamodule, "vocab_size", None)
        if data_vocab_size is not None and data_vocab_size > self.config.vocab_size:
            raise ValueError(
                f"model.config.vocab_size ({self.config.vocab_size}) must be at least the tokenizer's"
                f" ({data_vocab_size}). With weights from a checkpoint give the tokenizer that belongs to them."
            )

    @override
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **others: Tensor) -> Tensor:
        """Return logits ``[B, T, V]``, or with labels the mean loss; ``others`` of the batch go to the model."""
        output: Tensor = self.model(input_ids, labels=labels, **others)
        return output

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss of a batch."""
        loss: Tensor = self.model(**batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add a batch to ``val_loss`` and ``val_perplexity``, of a named set to ``val_loss/name`` and so on."""
        self._evaluate(batch, "val", dataloader_idx)

    @override
    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add a batch to ``test_loss`` and ``test_perplexity``, of a named set to ``test_loss/name`` and so on."""
        self._evaluate(batch, "test", dataloader_idx)

    def _evaluate(self, batch: Batch, stage: str, index: int) -> None:
        loss = self.model(**batch)
        num_tokens = count_valid(next_tokens(batch["labels"]))
        set_name = self._set_names[index] if index < len(self._set_names) else str(index)
        suffix = f"/{set_name}" if set_name else ""
        for quantity in ("loss", "perplexity"):
            metric = self._metric(stage, quantity, index)
            metric.update(loss, num_tokens)
            is_shown = quantity == "loss" and not suffix
            self.log(f"{stage}_{quantity}{suffix}", metric, prog_bar=is_shown, add_dataloader_idx=False)

    @override
    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return logits ``[B, T, V]``."""
        return self.forward(**{name: values for name, values in batch.items() if name != "labels"})

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Log the norm of all gradients, before clipping."""
        self.log("gradient_norm", global_gradient_norm(self.parameters()))

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return AdamW and its schedule."""
        groups = self._group_plan.groups(self.model, learning_rate=self.learning_rate, weight_decay=self.weight_decay)
        optimizer = AdamW(groups, lr=self.learning_rate, betas=self.betas, foreach=True)
        total_steps = self.max_steps or self.trainer.estimated_stepping_batches
        schedule = LambdaLR(optimizer, lambda step: warmup_then_cosine(step, self.warmup_steps, total_steps))
        lr_scheduler = LRSchedulerConfigType(scheduler=schedule, interval="step")
        return OptimizerLRSchedulerConfig(optimizer=optimizer, lr_scheduler=lr_scheduler)


def _agreed(given: LlamaConfig, stored: LlamaConfig, path: Path) -> LlamaConfig:
    """Return the stored configuration, with those options of training that are given.

    Raises:
        ValueError: If another model is given than is stored.
    """
    default = LlamaConfig()
    found = differences(structure(stored), structure(given))
    if found and structure(given) != structure(default):
        name = next(name for name in structure(stored) if name in found)
        in_files, now = found[name]
        raise ValueError(
            f"model.config is another model than checkpoint {path}: {name} is {in_files} there and {now} in config"
            f"{f', and {len(found) - 1} more differ' if len(found) > 1 else ''}. Leave model.config out."
        )
    options = {name: getattr(given, name) for name in TRAINING_OPTIONS}
    return replace(stored, **{name: value for name, value in options.items() if value != getattr(default, name)})
