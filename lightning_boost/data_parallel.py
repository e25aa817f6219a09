"""The data axis: replicas of the model that see different batches, kept equal by torch's own machinery.

Every decoder layer, and then the whole model, becomes a unit of ``fully_shard`` or of its replicating form. Gradients
are averaged over the axis while backward goes on.
"""

import inspect
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from typing_extensions import override

from lightning_boost.mesh import DATA_AXIS, REPLICATE_AXIS, SHARD_AXIS
from lightning_boost.model.loss import (
    check_loss_arguments,
    count_valid,
    mean_loss_of,
    next_tokens,
    with_loss,
    with_some_valid,
)

DataAxis = Literal["replicate", "shard", "hybrid"]
"""``replicate``: whole parameters on every replica; ``shard``: each holds a share and gathers a layer while it runs;
``hybrid``: shared out inside a node, replicated across nodes."""


def apply_data_axis(root: nn.Module, layers: list[nn.Module], mesh: DeviceMesh, data_axis: DataAxis) -> None:
    """Make a model one of several replicas, in place; its parameters become DTensors on the data axis as well.

    Communication: once per optimizer step, an all-reduce of the gradients of each unit (``replicate``) or a
    reduce-scatter (``shard``); with ``shard`` also an all-gather of a unit's parameters before each of its forwards and
    backwards.

    Args:
        root: The model, whose ``forward`` is called.
        layers: Its decoder layers.
        mesh: All processes.
        data_axis: How parameters are kept.
    """
    for unit in (*layers, root):
        if data_axis == "replicate":
            replicate(unit, mesh=mesh[DATA_AXIS])
        else:
            # where each pipeline stage stands in one node, hybrid has nothing to replicate
            is_hybrid = REPLICATE_AXIS in (mesh.mesh_dim_names or ())
            axes = mesh[REPLICATE_AXIS, SHARD_AXIS] if is_hybrid else mesh[DATA_AXIS]
            # the root's own parameters are used at both ends of forward: gathering them twice would gain nothing
            fully_shard(unit, mesh=axes, reshard_after_forward=unit is not root)
    root.register_forward_hook(_end_evaluation)


def _end_evaluation(root: nn.Module, *_: object) -> None:
    """Put parameters back where no backward will do so: whoever asks for them next must not find gathered copies."""
    if torch.is_grad_enabled():
        return
    for unit in root.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


class EqualCalls:
    """Has replicas that share out parameters call the model equally often in evaluation, whatever batches they have.

    Every one of them is needed to gather parameters. One that has no batch left calls the model with its last one
    again, for nothing, as long as another goes on.

    Communication: one all-reduce of one number over the data axis in each forward that is not trained on.

    Args:
        root: The model, whose ``forward`` is called.
        mesh: The data axis.
        device: Where this process computes.
    """

    def __init__(self, root: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
        self._group, self._device = mesh.get_group(), device
        self._last: tuple[Any, Any] | None = None
        self._is_catching_up = False
        root.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        root.__dict__[_EQUAL_CALLS] = self

    def _before(self, root: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() and not self._is_catching_up:
            self._last = args, kwargs
            self._vote(1)

    def catch_up(self, root: nn.Module) -> None:
        """Call the model until no replica does any more; this one has no batch left.

        Raises:
            RuntimeError: If others call it, and this one never has.
        """
        self._is_catching_up = True
        try:
            while self._vote(0).item():
                if self._last is None:
                    raise RuntimeError(
                        "other replicas call the model in evaluation, and this one has not once: with data_axis"
                        " 'shard' or 'hybrid' each needs a batch at least."
                    )
                root(*self._last[0], **self._last[1])
        finally:
            self._last, self._is_catching_up = None, False

    def _vote(self, goes_on: int) -> Tensor:
        votes = torch.tensor(goes_on, device=self._device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group)
        return votes


_EQUAL_CALLS = "_boost_equal_calls"


def catch_up_with_replicas(root: nn.Module) -> None:
    """Where replicas need one another to evaluate, go on as long as another does; call it after the last batch."""
    calls: EqualCalls | None = root.__dict__.get(_EQUAL_CALLS)
    if calls is not None:
        calls.catch_up(root)


def set_gradient_sync(root: nn.Module, enabled: bool) -> None:
    """Turn the averaging of gradients over the data axis on or off, for the backwards to come."""
    if isinstance(root, FSDPModule):
        root.set_requires_gradient_sync(enabled)


class TokenWeights:
    """Weighs a replica's mean loss so that the mean over replicas is that over all their valid tokens.

    Without it a replica whose batch has few valid tokens would count as much as one with many. Evaluation is left
    alone, since replicas may have different numbers of batches there; metrics weigh by tokens themselves.

    Communication: one all-reduce of one number over the data axis for each loss that is trained on.

    Args:
        mesh: The data axis.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def weighted(self, loss: Tensor, labels: Tensor) -> Tensor:
        """Return this replica's share of the mean.

        Args:
            loss: Mean over this replica's valid next tokens.
            labels: ``[B, T]``.
        """
        if not torch.is_grad_enabled():
            return loss
        # bf16 could not count beyond 256
        mine = count_valid(next_tokens(labels)).to(torch.promote_types(loss.dtype, torch.float32))
        everyones = mine.clone()
        dist.all_reduce(everyones, group=self._mesh.get_group())
        return loss * (mine * self._mesh.size() / everyones.clamp(min=1.0))

    def attach(self, model: nn.Module) -> None:
        """Weigh the loss that a model returns when it is called with ``labels``, as ``loss_of`` finds it.

        What ``ValueError`` and ``TypeError`` a call may raise: ``check_loss_arguments`` and ``mean_loss_of``.
        """
        names = list(inspect.signature(model.forward).parameters)
        given: list[Tensor] = []

        def keep_labels(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given.clear()
            arguments = dict(zip(names, args, strict=False)) | kwargs
            labels = arguments.get("labels")
            if not isinstance(labels, Tensor) or not torch.is_grad_enabled():
                return args, kwargs
            check_loss_arguments(arguments)
            given.append(labels)
            valid = with_some_valid(labels)
            if "labels" in kwargs:
                return args, kwargs | {"labels": valid}
            place = names.index("labels")
            return (*args[:place], valid, *args[place + 1 :]), kwargs

        def weigh(_: nn.Module, __: Any, output: Any) -> Any:
            return with_loss(output, self.weighted(mean_loss_of(output), given.pop())) if given else output

        model.register_forward_pre_hook(keep_labels, with_kwargs=True)
        model.register_forward_hook(weigh)


class TokenWeightedLoss(nn.Module):
    """In the place of this package's loss, wherever in a model it is called.

    Args:
        loss: Gives the mean over its own valid tokens.
        weights: Of the replicas.
    """

    def __init__(self, loss: nn.Module, weights: TokenWeights) -> None:
        super().__init__()
        self.loss = loss
        self.__dict__["weights"] = weights

    @override
    def forward(self, hidden: Tensor, head_weight: Tensor, labels: Tensor) -> Tensor:
        """Return this replica's share of the mean; arguments as ``NextTokenLoss``."""
        weights: TokenWeights = self.__dict__["weights"]
        return weights.weighted(self.loss(hidden, head_weight, labels), labels)
