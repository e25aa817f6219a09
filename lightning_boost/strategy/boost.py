"""``Trainer(strategy="boost")``: bottleneck-aware parallel training of an unchanged LightningModule."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed import ReduceOp
from torch.optim import Optimizer
from typing_extensions import override

from lightning_boost.data_parallel import DataAxis, catch_up_with_replicas, set_gradient_sync
from lightning_boost.gradients import clip_gradients_by_norm, scale_gradients
from lightning_boost.kernels.dispatch import KernelMode, check_kernels, choose_kernels
from lightning_boost.layout import Decoder, DecoderLayout
from lightning_boost.mesh import DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS, AutoSize, ParallelSizes, build_mesh
from lightning_boost.pipeline_parallel.options import PipelineOptions, Schedule
from lightning_boost.recompute import LatentStore, Recompute, RecomputeOptions
from lightning_boost.strategy.accumulation import short_window_factor
from lightning_boost.strategy.faults import PeerWatch, watch_starter
from lightning_boost.strategy.lightning_internals import (
    IS_INTERACTIVE,
    CheckedLauncher,
    is_at_last_batch,
    without_recorded_names,
)
from lightning_boost.strategy.module_checks import (
    check_called_as_whole,
    check_none_outside,
    check_optimizers,
    check_same_dtype,
)
from lightning_boost.strategy.random_numbers import agree_on_random_numbers
from lightning_boost.strategy.resumable import ResumableStrategy
from lightning_boost.strategy.signals import stop_at_step_borders
from lightning_boost.strategy.sizes import RequestedSizes
from lightning_boost.strategy.spreading import decoder_of, find_spread, let_metrics_sum_over_replicas, spread_over_mesh
from lightning_boost.strategy.trainer_checks import check_anomaly_detection, check_callbacks
from lightning_boost.tensor_parallel.scheme import SchemeName

PRECISIONS = ("32-true", "bf16-true", "bf16-mixed")
"""Lightning's names of the precisions that keep training exact to their rounding."""

_CHILDREN_GRACE_SECONDS = 5.0


class BoostParallelStrategy(ResumableStrategy):
    """Train a low-rank language model on several processes exactly as on one.

    The LightningModule stays as it is. Its decoder is found by the names of its parts and its layers are replaced by
    parallel twins when the Trainer sets up; parameters keep their names and become DTensors with their global shapes.

    Args:
        tensor_parallel_size: Processes that share each layer; ``"auto"``: the largest size that the model allows and
            that divides the processes of a node.
        scheme: How they share it: ``"auto"`` cut at the bottleneck, or in Megatron's form where all layers are
            dense; others are there to be compared with (docs/benchmarks.md).
        data_parallel_size: Replicas, each of which sees its own part of the data; ``"auto"``: all processes that the
            other axes leave.
        data_axis: How replicas keep parameters: ``"replicate"`` whole, ``"shard"`` each a share, gathered layer by
            layer, ``"hybrid"`` shared out inside a node and replicated across nodes.
        pipeline_parallel_size: Stages of consecutive layers, on processes of their own.
        pipeline_schedule: Order in which micro-batches go through them: ``"1f1b"``, ``"gpipe"``, or
            ``"interleaved_1f1b"`` with several stages on each process.
        num_microbatches: Parts of a batch; ``None``: the most, up to four for each stage, that divide it.
        virtual_stages: Stages on each process; above 1 with ``"interleaved_1f1b"``.
        layers_per_stage: Number of layers of each stage; ``None``: balanced by their cost.
        recompute: Activations that are computed again in backward instead of being kept: ``"none"``, all of a block but
            its input and latents (``"low_rank"``: no collective runs twice), or all of it (``"block"``).
        recompute_every: In which blocks: every so many, or a share of them below 1.
        keep_attention: Whether ``"low_rank"`` keeps attention's output too.
        store_latents: Whether each process that shares a layer keeps its latents ``"whole"``, or ``"sharded"``: a share
            of them, which backward gathers again.
        kernels: ``"auto"``: fused ones in Triton on GPUs; ``"reference"``: torch's own operations; ``"triton"``: fused
            ones anywhere; or the names of those that may be fused (docs/how_it_works/kernels.md).
        compile: Whether each layer is compiled, in place; names stay (docs/how_it_works/compile.md).
        save_in_background: Whether training goes on while a checkpoint is written, from copies of all states.
        layout: Names of the decoder's parts, where they are not LLaMA's.
        process_group_backend: ``None``: NCCL on GPUs, gloo on the CPU.
        timeout: After which a collective that a process does not join is an error.

    Raises:
        ValueError: If a size is neither ``"auto"`` nor a whole number of at least 1, the data axis is unknown, or an
            option of pipeline, recompute or kernels is out of range.
    """

    strategy_name = "boost"
    materializes_parameters = True
    """A module may leave its parameters on the meta device: this strategy fills them."""

    def __init__(
        self,
        tensor_parallel_size: AutoSize = "auto",
        *,
        scheme: SchemeName = "auto",
        data_parallel_size: AutoSize = "auto",
        data_axis: DataAxis = "replicate",
        pipeline_parallel_size: int = 1,
        pipeline_schedule: Schedule = "1f1b",
        num_microbatches: int | None = None,
        virtual_stages: int = 1,
        layers_per_stage: Sequence[int] | None = None,
        recompute: Recompute = "none",
        recompute_every: float = 1,
        keep_attention: bool = False,
        store_latents: LatentStore = "whole",
        kernels: KernelMode | Sequence[str] = "auto",
        compile: bool = False,
        save_in_background: bool = False,
        layout: DecoderLayout | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self.timeout = timeout
        self.requested = self._own_requests = RequestedSizes(
            tensor_parallel_size=tensor_parallel_size,
            data_parallel_size=data_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            data_axis=data_axis,
            pipeline=PipelineOptions(
                schedule=pipeline_schedule,
                num_microbatches=num_microbatches,
                virtual_stages=virtual_stages,
                layers_per_stage=layers_per_stage,
            ),
            scheme=scheme,
            compiles=compile,
            recompute=RecomputeOptions(
                kind=recompute, every=recompute_every, keep_attention=keep_attention, store_latents=store_latents
            ),
        )
        self.sizes = ParallelSizes()
        """The mesh's sizes, once set up."""

        self._watch: PeerWatch | None = None
        self.gradient_norm: Tensor | None = None
        """Global norm at the last clipping, before it."""

        self.layout = layout
        self._saves_in_background = save_in_background
        check_kernels(kernels)
        self._kernels = kernels

    # ---- before processes start ----------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        watch_starter()
        if self.cluster_environment.creates_processes_externally or self.num_processes * self.num_nodes == 1:
            return
        if IS_INTERACTIVE:
            raise ValueError(
                f"devices ({self.num_processes}) must be 1 in a notebook: strategy 'boost' starts its other processes"
                " by running the script again, and a notebook is no script."
                " Move the Trainer into a .py file and run that, or set devices=1."
            )
        self._launcher = CheckedLauncher(
            self.check_before_start, self.cluster_environment, self.num_processes, self.num_nodes
        )

    def check_before_start(self, trainer: Trainer) -> None:
        """Refuse what cannot work while there is one process and no group yet; the module is connected.

        Raises:
            ValueError: If the precision, a callback, recompute, the sizes or the decoder cannot be trained so.
        """
        precision = self.precision_plugin.precision
        if precision not in PRECISIONS:
            fp16 = ": the range of fp16 does not hold the sums of squares that online RMSNorm carries"
            raise ValueError(
                f"precision ({precision!r}) must be one of {', '.join(PRECISIONS)} with strategy"
                f" 'boost'{fp16 if precision.startswith('16') else ''}."
            )
        self.requested = self._own_requests.joined_by(getattr(trainer, "callbacks", []))
        self.requested.check_world(self._num_all_processes, self.num_nodes)
        module = self._module
        check_callbacks(trainer, module, self._num_all_processes)
        try:
            decoder = decoder_of(module, self.layout)
        except ValueError:
            if is_overridden("configure_model", module):
                return
            raise
        check_anomaly_detection(trainer, self._resolve_sizes(decoder))

    def _resolve_sizes(self, decoder: Decoder) -> ParallelSizes:
        """Check the decoder and return the mesh's sizes for it."""
        spread = find_spread(decoder.root)
        if spread is not None:
            self.requested.check_same(spread.sizes, spread.requested)
            spread.sizes.check_world(self._num_all_processes)
            return spread.sizes
        sizes = self.requested.resolve(decoder, self.num_processes, self.num_nodes)
        if sizes.world_size > 1:
            check_none_outside(self._module, decoder)
        return sizes

    @property
    def _num_all_processes(self) -> int:
        return self.num_processes * self.num_nodes

    # ---- set-up --------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        """Start the process group; the mesh waits for the model, which tells the sizes it allows."""
        self.check_before_start(self._module.trainer)
        self._has_failed = False
        self._setup_distributed()
        if self._num_all_processes > 1:
            self._watch = PeerWatch(self.global_rank, self.timeout)
            self._watch.start()
        trainer = self._module.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            stop_at_step_borders(trainer, self.root_device)

    @override
    def setup(self, trainer: Trainer) -> None:
        """Spread the model over the mesh, once, and make the optimizers on what results."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        choose_kernels(self._kernels)
        with without_recorded_names(trainer):
            self._parallelize()
        check_anomaly_detection(trainer, self.sizes)
        self.model_to_device()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _parallelize(self) -> None:
        module = self._module
        decoder, spread = decoder_of(module, self.layout), find_spread(module)
        self.sizes = sizes = self._resolve_sizes(decoder)
        if self._device_mesh is None:
            self._device_mesh = build_mesh(sizes, self.root_device.type, self.timeout)
        module._device_mesh = self._device_mesh
        before = next(decoder.root.parameters()).dtype
        self.model = self.precision_plugin.convert_module(module)
        if spread is None:
            spread_over_mesh(module, decoder, self.device_mesh, sizes, self.requested, self.root_device)
        elif sizes.data_parallel_size > 1 or sizes.pipeline_parallel_size > 1:
            check_same_dtype(before, next(decoder.root.parameters()).dtype)
        self._root = decoder.root
        for axis in (TENSOR_AXIS, PIPELINE_AXIS):
            agree_on_random_numbers(self._device_mesh[axis].get_group(), self.root_device)
        let_metrics_sum_over_replicas(module, self.device_mesh)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Call ``configure_optimizers`` on the spread model.

        Raises:
            ValueError: If an optimizer holds parameters from before, or works on whole ones.
        """
        super().setup_optimizers(trainer)
        check_optimizers(self._module, self.optimizers)

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        # Lightning's own would take the norm of this process's shares
        setattr(self.precision_plugin, Precision.clip_grad_by_norm.__name__, self._clip_by_norm)

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self.gradient_norm = clip_gradients_by_norm(self.precision_plugin.main_params(optimizer), clip_val)

    # ---- training ------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step``; on a data axis, see to it that the model was called as a whole."""
        if self.sizes.pipeline_parallel_size > 1:
            self._release_gradients()
        if self.sizes.data_parallel_size == 1:
            return super().training_step(*args, **kwargs)
        assert self._root is not None
        with check_called_as_whole(self._root):
            return super().training_step(*args, **kwargs)

    def _release_gradients(self) -> None:
        """Drop the last step's gradients before a pipeline makes new ones; Lightning does so only after the loss."""
        module, trainer = self._module, self._module.trainer
        batch_idx = trainer.fit_loop.epoch_loop.batch_idx
        if module.automatic_optimization and batch_idx % trainer.accumulate_grad_batches == 0:
            for optimizer in self.optimizers:
                module.optimizer_zero_grad(trainer.current_epoch, batch_idx, optimizer)

    # ---- backward ------------------------------------------------------------------------------------------------

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Go backward; a last window of accumulation that is shorter than the others weighs as much as they do."""
        plugin, module = self.precision_plugin, self._module
        self.pre_backward(closure_loss)
        closure_loss = plugin.pre_backward(closure_loss, module)
        plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        factor = short_window_factor(module.trainer)
        if optimizer is not None and factor != 1.0:
            # whoever looks at gradients from on_after_backward on finds them complete
            scale_gradients(plugin.main_params(optimizer), factor)
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Leave gradients on each replica while they are accumulated; they are averaged once, with the last of them."""
        assert self._root is not None
        set_gradient_sync(self._root, False)
        try:
            yield
        finally:
            set_gradient_sync(self._root, True)

    # ---- evaluation ----------------------------------------------------------------------------------------------

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().validation_step(*args, **kwargs)
        self._catch_up_after_last_batch()
        return result

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().test_step(*args, **kwargs)
        self._catch_up_after_last_batch()
        return result

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().predict_step(*args, **kwargs)
        self._catch_up_after_last_batch()
        return result

    def _catch_up_after_last_batch(self) -> None:
        # before metrics are summed up over replicas, which all of them must come to
        if is_at_last_batch(self._module.trainer):
            assert self._root is not None
            catch_up_with_replicas(self._root)

    # ---- what processes agree on ---------------------------------------------------------------------------------

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Reduce over the data axis; the processes of a replica hold the same values already."""
        if group is None and self._device_mesh is not None:
            if self._device_mesh[DATA_AXIS].size() == 1:
                return tensor
            group = self._device_mesh[DATA_AXIS].get_group()
        return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather over the data axis: one value from each replica."""
        # a LightningModule asks for all processes where nothing else was said
        if group in (None, dist.group.WORLD) and self._device_mesh is not None:
            group = self._device_mesh[DATA_AXIS].get_group()
        return super().all_gather(tensor, group, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all processes, or any, say yes; the same on every one."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, op=ReduceOp.MIN if all else ReduceOp.MAX)
        return bool(votes)

    # ---- ending --------------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Tell which process failed first, and leave none behind."""
        super().on_exception(exception)
        launcher = self._launcher if isinstance(self._launcher, CheckedLauncher) else None
        seconds = _CHILDREN_GRACE_SECONDS
        if self._watch is not None and not isinstance(exception, SIGTERMException):
            seconds = self._watch.report(exception, launcher.killed_child() if launcher else None)
        if launcher is not None:
            launcher.end_children(seconds)

    @override
    def teardown(self) -> None:
        """Leave the run, whether it ended well or not."""
        super().teardown()
        if self._watch is not None:
            self._watch.stop()
