"""A pipeline behind the model's own ``forward``: one call runs every micro-batch through every stage.

``loss = model(input_ids, labels=labels)`` goes forward and backward in the order of a ``torch.distributed.pipelining``
schedule and returns the loss on every process, tied to a node whose backward adds the gradients that are made already:
accumulation, clipping, factors on the loss and manual optimisation stay what they are.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from typing_extensions import override

from lightning_boost.mesh import DATA_AXIS, PIPELINE_AXIS
from lightning_boost.model.loss import check_loss_arguments, mean_loss_of
from lightning_boost.pipeline_parallel.borders import MarkedStage
from lightning_boost.pipeline_parallel.commit import Commit, gradients_set_aside
from lightning_boost.pipeline_parallel.latents import LatentBorder
from lightning_boost.pipeline_parallel.microbatches import Microbatches, bind, cut_batch
from lightning_boost.pipeline_parallel.options import PipelineOptions
from lightning_boost.pipeline_parallel.outputs import LossOutput, merge_outputs
from lightning_boost.pipeline_parallel.stage import Stage
from lightning_boost.pipeline_parallel.trees import map_tensors

_KEPT_SHAPES = 4
"""Shapes of batches whose buffers are kept; those of others are made anew."""

_PIPELINE = "_pipeline"


@dataclass
class _Run:
    """One batch on its way through the pipeline."""

    microbatches: Microbatches
    weights: list[Tensor]
    """What each micro-batch's mean loss counts; empty without labels."""

    autocast: dict[str, Any]
    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    returns_output: bool = False
    """Whether the loss came among other outputs."""


class Pipeline:
    """Runs a model that is cut into stages.

    Args:
        root: The model, cut to this process's stages.
        stages: Those, in order.
        mesh: All processes.
        device: Where this process computes.
        options: Schedule and number of micro-batches.
        width: Features of the hidden stream on one process.
        is_shared_out: Whether replicas on the data axis share out parameters.
    """

    def __init__(
        self,
        root: nn.Module,
        stages: Sequence[Stage],
        mesh: DeviceMesh,
        *,
        device: torch.device,
        options: PipelineOptions,
        width: int,
        is_shared_out: bool = False,
    ) -> None:
        self._model_forward = MethodType(type(root).forward, root)
        self._stages = stages
        self._axis, self._data_axis = mesh[PIPELINE_AXIS], mesh[DATA_AXIS]
        self._device = device
        self._options = options
        self._width = width
        self._is_shared_out = is_shared_out
        self._dtype = next(root.parameters()).dtype
        self._loss_dtype = torch.promote_types(self._dtype, torch.float32)
        # once: between a unit's gathering and its release the modules show other parameters
        self._parameters = [parameter for stage in stages for parameter in stage.parameters()]
        self._schedules: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._run: _Run | None = None
        self._returns_output: bool | None = None
        """Whether with labels the model returns its loss among other outputs; known once a loss has been."""

        self.last_cut: tuple[int, int] | None = None
        """Micro-batches of the last batch, and rows of each."""

        for stage in stages:
            stage.call = self._call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch; the result is the same on every process of the pipeline.

        Communication: on each border between stages ``b T D/tp`` values of every micro-batch, forward and, if trained,
        backward, and where latents cross what ``LatentBorder`` tells; then one all-reduce of the loss over the pipeline
        axis, or a broadcast of the outputs.

        Raises:
            RuntimeError: If outputs are asked for with gradients.
            TypeError: If with labels the model returns no mean loss, or not always in the same form.
            ValueError: If with labels it is told to take another loss.
        """
        arguments = bind(self._model_forward, args, kwargs)
        has_labels = isinstance(arguments.get("labels"), Tensor)
        is_trained = torch.is_grad_enabled()
        if is_trained and not has_labels:
            raise RuntimeError(
                "a model on a pipeline gives no outputs to take a loss from: gradients are made while micro-batches"
                " pass the stages. Call it with labels, loss = model(…, labels=…), or under torch.no_grad()."
            )
        if has_labels:
            check_loss_arguments(arguments)
        num_samples = len(next(iter(arguments.values())))
        microbatches = cut_batch(arguments, self._count_for(num_samples, is_trained=is_trained))
        self.last_cut = len(microbatches), microbatches.rows
        weights = self._weights(microbatches, over_replicas=is_trained) if has_labels else []
        self._run = run = _Run(microbatches, weights, self._autocast_state())
        try:
            # torch's backward would run inside the autocast of training_step; the stages enter it for themselves
            with torch.autocast(self._device.type, enabled=False):
                if is_trained:
                    return self._train(run)
                self._step(run, is_trained=False)
                return self._in_form(self._sum_of_losses(run)) if has_labels else self._outputs(run)
        finally:
            self._run = None

    def __deepcopy__(self, memo: Any) -> "Pipeline":
        raise TypeError(
            "a model on a pipeline cannot be copied: it is tied to other processes. Copy it before Trainer.fit, or copy"
            " its state_dict()."
        )

    def _count_for(self, num_samples: int, *, is_trained: bool) -> int:
        """Return the number of micro-batches: where replicas share out parameters, all gather them as often."""
        count = self._options.count_for(num_samples, self._axis.size())
        if not is_trained and len(self._stages) == 1:
            # forward alone runs in no order that asks for as many as there are processes
            count = min(count, num_samples)
        if not self._is_shared_out:
            return count
        counts = torch.tensor(count, device=self._device)
        dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=self._data_axis.get_group())
        return int(counts)

    def _train(self, run: _Run) -> Tensor | LossOutput:
        with gradients_set_aside(self._parameters) as made:
            self._step(run, is_trained=True)
        loss = self._sum_of_losses(run)
        return self._in_form(Commit.apply(torch.zeros((), requires_grad=True), loss, self._parameters, made))

    def _step(self, run: _Run, *, is_trained: bool) -> None:
        count = len(run.microbatches)
        schedule = self._schedule_for(run.microbatches, is_trained=is_trained)
        numbers = torch.arange(count)
        is_last = any(stage.is_last for stage in self._stages)
        targets = {"target": numbers} if is_trained and is_last else {}
        try:
            schedule.step(number=numbers, return_outputs=False, **targets)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            # torch wraps what a stage raises in an error that lists the stage's tensors
            raise error.__cause__ from None

    def _call(self, number: int) -> Tensor:
        """Run the model's forward on a micro-batch; what comes back here comes from the last stage."""
        run = self._run
        assert run is not None
        with torch.autocast(self._device.type, **run.autocast):
            output = self._model_forward(**run.microbatches.arguments[number])
        if not run.weights:
            run.outputs.append(output)
            return torch.zeros((), dtype=self._loss_dtype, device=self._device)
        mean = mean_loss_of(output)
        run.returns_output = output is not mean
        if self._returns_output not in (None, run.returns_output):
            raise TypeError("a model on a pipeline must return its loss in one form: alone, or among other outputs.")
        loss = mean.to(self._loss_dtype) * run.weights[number]
        run.losses.append(loss.detach())
        return loss

    def _weights(self, microbatches: Microbatches, *, over_replicas: bool) -> list[Tensor]:
        """Return what makes the sum over micro-batches, and the mean over replicas, the mean over valid tokens."""
        valid = torch.stack(microbatches.num_valid).to(self._loss_dtype)
        everyones = valid.sum()
        num_replicas = self._data_axis.size()
        if over_replicas and num_replicas > 1:
            dist.all_reduce(everyones, group=self._data_axis.get_group())
            everyones /= num_replicas
        # 1, were there no valid token at all
        return list(valid / everyones.clamp(min=1.0 / num_replicas))

    def _sum_of_losses(self, run: _Run) -> Tensor:
        total = torch.zeros(2, dtype=self._loss_dtype, device=self._device)
        if run.losses:
            total[0] = torch.stack(run.losses).sum()
            total[1] = run.returns_output
        dist.all_reduce(total, group=self._axis.get_group())
        if self._returns_output is None:
            self._returns_output = bool(total[1])
        return total[0]

    def _in_form(self, loss: Tensor) -> Tensor | LossOutput:
        """Return a loss as the model does: other stages have not seen it."""
        return LossOutput(loss) if self._returns_output else loss

    def _outputs(self, run: _Run) -> Any:
        last, group = self._axis.size() - 1, self._axis.get_group()
        merged = merge_outputs(run.outputs, run.microbatches) if run.outputs else None
        return _share(merged, group, last, self._device)

    def _autocast_state(self) -> dict[str, Any]:
        kind = self._device.type
        return {"enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}

    def _schedule_for(self, microbatches: Microbatches, *, is_trained: bool) -> Any:
        """Return a schedule with buffers for micro-batches of this shape: torch's know one shape only."""
        latents_dtype = self._latents_dtype()
        key = (microbatches.rows, microbatches.num_tokens, len(microbatches), is_trained, latents_dtype)
        if key not in self._schedules:
            while len(self._schedules) >= _KEPT_SHAPES:
                self._schedules.popitem(last=False)
            self._schedules[key] = self._make_schedule(microbatches, latents_dtype, is_trained=is_trained)
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _latents_dtype(self) -> torch.dtype:
        """Return what latents are in: what matrices multiply in."""
        assert self._run is not None
        autocast: torch.dtype = self._run.autocast["dtype"]
        return autocast if self._run.autocast["enabled"] else self._dtype

    def _make_schedule(self, microbatches: Microbatches, latents_dtype: torch.dtype, *, is_trained: bool) -> Any:
        rows, num_tokens = microbatches.rows, microbatches.num_tokens

        def empty(*shape: int, dtype: torch.dtype = self._dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=is_trained)

        def crossing(border: LatentBorder | None) -> tuple[Tensor, ...]:
            """Return what is sent over a border, or received."""
            hidden = empty(rows, num_tokens, self._width)
            if border is None:
                return (hidden,)
            return hidden, empty(border.num_rows(rows * num_tokens), border.width, dtype=latents_dtype)

        loss = empty(dtype=self._loss_dtype)
        num_stages = self._axis.size() * len(self._stages)
        stages = [
            MarkedStage(
                stage,
                self._axis.get_local_rank() + turn * self._axis.size(),
                num_stages,
                self._device,
                input_args=() if stage.is_first else crossing(stage.latents_before),
                output_args=(loss,) if stage.is_last else crossing(stage.latents_behind),
                group=self._axis.get_group(),
            )
            for turn, stage in enumerate(self._stages)
        ]
        loss_fn = _as_it_is if is_trained else None
        if len(stages) > 1:
            return ScheduleInterleaved1F1B([*stages], len(microbatches), loss_fn=loss_fn, scale_grads=False)
        kind = Schedule1F1B if is_trained and self._options.schedule == "1f1b" else ScheduleGPipe
        return kind(stages[0], len(microbatches), loss_fn=loss_fn, scale_grads=False)


def _as_it_is(loss: Tensor, _: Tensor) -> Tensor:
    return loss


def _share(tree: Any, group: dist.ProcessGroup, source: int, device: torch.device) -> Any:
    """Give one process's tensors, in whatever tuples, lists and dicts, to all others of a group."""
    is_mine = dist.get_rank(group) == source
    form = [map_tensors(lambda tensor: tensor.to("meta"), tree) if is_mine else None]
    dist.broadcast_object_list(form, group=group, group_src=source)

    def shared(tensor: Tensor) -> Tensor:
        value = tensor.contiguous() if is_mine else torch.empty_like(tensor, device=device)
        dist.broadcast(value, group=group, group_src=source)
        return value

    return map_tensors(shared, tree if is_mine else form[0])


def install_pipeline(root: nn.Module, pipeline: Pipeline) -> None:
    """Let calls of a model run the pipeline."""
    model_class = type(root)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[_PIPELINE](*args, **kwargs)

    root.__dict__[_PIPELINE] = pipeline
    root.__class__ = type(model_class.__name__, (model_class,), {"forward": override(forward)})


def find_pipeline(root: nn.Module) -> Pipeline | None:
    """Return what runs the calls of a model, if that is a pipeline."""
    return root.__dict__.get(_PIPELINE)
