"""How what stands in a norm's place hands to each projection of its group what it has computed for it.

A model's own ``forward`` stands between the two and passes one tensor on: all outputs travel with that.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_boost.torch_internals import private

_at_compile_time = private("torch._dynamo.comptime", "comptime")

_PARTS = "_lightning_boost_parts"
"""Of a group's outputs: whose they are, and the part of each member."""

_VERSION = "_lightning_boost_version"
"""Of a group's outputs until the first member takes its part: torch's count of changes in place as they were given."""

_OTHER = (
    "a projection must read its norm's output as it is, and got something else: the model's forward does more between"
    " the two than the layout says. Describe its parts with a DecoderLayout, or set tensor_parallel_size to 1."
)


class GroupMember(nn.Module):
    """In the place of a projection of a group: takes its own part of the group's outputs."""

    index: int
    members: list["GroupMember"]
    """All of the group, in order; no submodules, since each stands in a place of its own."""

    def join(self, members: list["GroupMember"]) -> None:
        """Become the next of ``members``."""
        self.index = len(members)
        self.members = members
        members.append(self)

    @override
    def forward(self, outputs: Tensor) -> Tensor:
        """Take ``[…, w_i]`` out of ``[…, w]``."""
        if not self.is_given(outputs):
            raise RuntimeError(_OTHER)
        _, parts = getattr(outputs, _PARTS)
        part: Tensor = parts[self.index]
        return part

    def is_given(self, outputs: Tensor) -> bool:
        """Tell whether ``outputs`` are the group's, as they were handed out."""
        owner, _ = getattr(outputs, _PARTS, (None, []))
        if owner is not self.members:
            return False
        if torch.compiler.is_compiling():
            _at_compile_time(_check_traced)
            return True
        return _is_unchanged(outputs)


class GroupedNorm(nn.Module):
    """In the place of a norm that a group of projections reads: computes what each of them takes its part of.

    Args:
        norm: The norm that is replaced.
        eps: Its eps.
        members: What stands in its projections' places, in order; the very list that they joined.
        group: Name of the tensor axis's group.
        chunk: Label of the collectives.
    """

    def __init__(self, norm: nn.Module, eps: float, members: list[GroupMember], group: str, chunk: str) -> None:
        super().__init__()
        self.weight = norm.get_parameter("weight")
        self.eps = eps
        self.members: list[Any] = members
        self.group = group
        self.chunk = chunk


def hand_out(
    parts: Sequence[Tensor], shape: Sequence[int], members: list[GroupMember], hidden: Tensor | None = None
) -> Tensor:
    """Return a tensor from which each member of a group takes its part, and by which it knows that it may.

    Args:
        parts: Of the members, in order: ``[N, w_i]``.
        shape: The dims that rows stand for.
        members: Of the group.
        hidden: The norm's own output ``[N, D]``, if it is at hand: what else reads it finds it.

    Returns:
        ``hidden``, ``[…, D]``, or the first part, ``[…, w_1]``, with all of them behind it.
    """
    # a view of its own: what a tensor keeps as an attribute must not keep the tensor, or neither would be freed
    first = parts[0] if hidden is None else hidden
    outputs = first.view(*shape, first.shape[-1])
    setattr(outputs, _PARTS, (members, [part.view(*shape, part.shape[-1]) for part in parts]))
    if torch.compiler.is_compiling():
        _at_compile_time(_note_traced)
    else:
        _note_version(outputs)
    return outputs


def _note_version(outputs: Tensor) -> None:
    # in inference mode torch counts no changes
    setattr(outputs, _VERSION, None if outputs.is_inference() else outputs._version)


def _is_unchanged(outputs: Tensor) -> bool:
    """Tell whether nothing was done in place to a group's outputs, as a dropout can."""
    given = getattr(outputs, _VERSION)
    if given is not None and given != outputs._version:
        return False
    # outputs can be a view of the first part, and its projection's reader may change that
    setattr(outputs, _VERSION, None)
    return True


def _note_traced(context: Any) -> None:
    _note_version(context.get_local("outputs").as_fake())


def _check_traced(context: Any) -> None:
    # in a graph the count is known to the compiler alone
    if not _is_unchanged(context.get_local("outputs").as_fake()):
        raise RuntimeError(_OTHER)
