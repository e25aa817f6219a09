"""What the tensor axis should move in a training step, by the formula, for the part of the model that stands here."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_boost.config import LlamaConfig
from lightning_boost.cost import Move, TensorAxis, Volume, add_up, border_moves, end_moves, layer_moves
from lightning_boost.kernels.statistic import statistic_columns
from lightning_boost.mesh import TENSOR_AXIS
from lightning_boost.model.llama import CrossingDecoderLayer, DecoderLayer, LlamaForCausalLM, find_llama
from lightning_boost.pipeline_parallel.places import Absent, AbsentEmbedding
from lightning_boost.pipeline_parallel.schedule import find_pipeline
from lightning_boost.recompute import RecomputeOptions
from lightning_boost.tensor_parallel.vocabulary import CHUNK_TOKENS

Volumes = dict[tuple[str, str, str], Volume]
"""By (operation, chunk, pass)."""


@dataclass(frozen=True)
class ModelCall:
    """One forward of the model in a training step."""

    num_runs: int
    """Micro-batches of a pipeline, or 1."""

    tokens: int
    """Of each of them."""

    has_labels: bool
    is_trained: bool


class TrafficFormula:
    """The formula for one process.

    Args:
        trainer: Tells recompute and precision.
        pl_module: The module, its model on the mesh.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule) -> None:
        mesh, model = pl_module.device_mesh, find_llama(pl_module)
        self.size = mesh[TENSOR_AXIS].size() if mesh is not None and TENSOR_AXIS in (mesh.mesh_dim_names or ()) else 1
        self._model = model
        self.missing_because = _why_missing(model, trainer)
        """Why there is no formula; ``None`` if there is one."""

        if model is None or self.size == 1:
            return
        stream = next(model.parameters()).dtype
        gemm = torch.bfloat16 if str(trainer.precision) == "bf16-mixed" else stream
        self._axis = TensorAxis(
            size=self.size,
            gemm_dtype=gemm,
            stream_dtype=stream,
            gemm_columns=statistic_columns(gemm, self.size),
            stream_columns=statistic_columns(stream, self.size),
        )
        self._recompute, self._scheme = recompute_of(trainer), given_scheme(trainer)
        self._part = part_of(model)
        # batches of one shape after another
        self._of_call = lru_cache(maxsize=64)(self._moved_by)

    @contextmanager
    def calls_noted(self) -> Iterator[list[ModelCall]]:
        """Note the model's forwards until the context ends; yields the growing list."""
        calls: list[ModelCall] = []
        model = self._model

        def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
            assert model is not None
            input_ids: Tensor = args[0] if args else kwargs["input_ids"]
            pipeline = find_pipeline(model)
            cut = None if pipeline is None else pipeline.last_cut
            num_runs, rows = (1, input_ids.shape[0]) if cut is None else cut
            labels = args[1] if len(args) > 1 else kwargs.get("labels")
            calls.append(ModelCall(num_runs, rows * input_ids.shape[1], labels is not None, torch.is_grad_enabled()))

        if model is None or self.size == 1 or self.missing_because is not None:
            yield calls
            return
        handle = model.register_forward_hook(note, with_kwargs=True)
        try:
            yield calls
        finally:
            handle.remove()

    def expected(self, calls: list[ModelCall]) -> Volumes:
        """Return what the calls and their backwards move."""
        total: Volumes = {}
        for call in calls:
            for key, volume in self._of_call(call).items():
                before = total.get(key, (0, 0, 0))
                total[key] = Volume(*(one + other for one, other in zip(before, volume, strict=True)))
        return total

    def _moved_by(self, call: ModelCall) -> Volumes:
        layers, has_embedding, has_head = self._part
        model = self._model
        assert model is not None
        config = model.config
        chosen = self._recompute.choose(config.num_hidden_layers) if call.is_trained else []
        moves: list[Move] = []
        for layer in layers:
            kind = self._recompute.kind if layer in chosen else "none"
            latents = self._recompute.store_latents
            moves += layer_moves(config, layer, self._axis, recompute=kind, store_latents=latents, scheme=self._scheme)
        moves += end_moves(
            config,
            self._axis,
            tokens=call.tokens,
            output="loss" if call.has_labels else "logits",
            loss_tokens=CHUNK_TOKENS,
            has_embedding=has_embedding,
            has_head=has_head,
            scheme=self._scheme,
        )
        moves += border_moves(config, self._axis, layers, call.tokens)
        if not call.is_trained:
            moves = [move for move in moves if move.pass_ == "forward"]
        once = add_up(moves, call.tokens)
        return {key: Volume(*(count * call.num_runs for count in volume)) for key, volume in once.items()}


def recompute_of(trainer: Trainer) -> RecomputeOptions:
    """Return what the strategy computes again in backward; nothing, where it is another strategy."""
    requested = getattr(trainer.strategy, "requested", None)
    return getattr(requested, "recompute", None) or RecomputeOptions()


def given_scheme(trainer: Trainer) -> str | None:
    """Return the scheme that the strategy was given; ``None`` where it chooses by the model."""
    scheme: str = getattr(getattr(trainer.strategy, "requested", None), "scheme", "auto")
    return None if scheme == "auto" else scheme


def config_of(pl_module: LightningModule) -> LlamaConfig | None:
    """Return the sizes of a module's model, if the formulas know it."""
    model = find_llama(pl_module)
    return None if model is None else model.config


def _why_missing(model: LlamaForCausalLM | None, trainer: Trainer) -> str | None:
    if model is None:
        return "the module has no LlamaForCausalLM of this package, or several"
    if getattr(trainer.strategy, "requested", None) is None:
        return f"{type(trainer.strategy).__name__} does not split the model as 'boost' does"
    if any(not parameter.requires_grad for parameter in model.parameters()):
        return "some parameters are frozen"
    return None


def part_of(model: LlamaForCausalLM) -> tuple[list[int], bool, bool]:
    """Return the layers that stand here, and whether embedding and head do."""
    layers = [
        index
        for index, layer in enumerate(model.model.layers)
        if isinstance(layer, DecoderLayer | CrossingDecoderLayer)
    ]
    has_embedding = not isinstance(model.model.embed_tokens, AbsentEmbedding)
    return layers, has_embedding, not isinstance(model.model.norm, Absent)
