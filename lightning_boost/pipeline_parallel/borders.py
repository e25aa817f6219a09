"""What crosses the borders between stages: hidden states forward, their gradients backward.

torch sends both alike, so gradients are marked for whoever watches.
"""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from typing_extensions import override

_MARK = "_lightning_boost_border_gradient"


class MarkedStage(PipelineStage):
    """A stage whose sent and received gradients are marked."""

    @override
    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what sends the gradients of a micro-batch."""
        return _marked(super().get_bwd_send_ops(bwd_chunk_id))

    @override
    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what receives them."""
        return _marked(super().get_bwd_recv_ops(bwd_chunk_id))


def is_border_gradient(tensor: Tensor) -> bool:
    """Tell whether a tensor that is sent or received is a gradient."""
    return getattr(tensor, _MARK, False)


def _marked(operations: list[dist.P2POp]) -> list[dist.P2POp]:
    for operation in operations:
        setattr(operation.tensor, _MARK, True)
    return operations
