"""What a user's attention keeps beside its projections, on a process that has some of the heads."""

from torch import Tensor, nn
from typing_extensions import override

from lightning_boost.model.norm import normalize
from lightning_boost.tensor_parallel.dense import own_rows


class HeadNorm(nn.Module):
    """RMSNorm over the features of each of this process's heads, its weight the same on all processes.

    Communication: forward none, backward one all-reduce of the weight's ``E`` values: each process's heads give a part
    of its gradient. None where every process has all heads.

    Args:
        norm: The norm that is replaced.
        eps: Its eps.
        group: Name of the tensor axis's group.
        chunk: Label of the collective.
        is_sharded: Whether a process has some of the heads.
    """

    def __init__(self, norm: nn.Module, eps: float, group: str, chunk: str, *, is_sharded: bool) -> None:
        super().__init__()
        self.is_sharded = is_sharded
        self.weight = norm.get_parameter("weight")
        self.eps = eps
        self.group = group
        self.chunk = chunk

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map ``[…, E]`` to ``[…, E]``."""
        rows = (0, len(self.weight)) if self.is_sharded else None
        weight = own_rows(self.weight, rows, self.group, self.chunk)
        return weight * normalize(x, self.eps)


def count_own_heads(attention: nn.Module, heads: tuple[int, int], size: int) -> None:
    """Let the numbers of heads that an attention module keeps be those of one of ``size`` processes.

    Hugging Face's names; what a module does not have, or uses for something else, stays.

    Args:
        attention: Holds the projections.
        heads: Attention heads and key/value heads of the whole model.
        size: Of the tensor axis.
    """
    whole, whole_key_value = heads
    own, own_key_value = whole // size, max(1, whole_key_value // size)
    width = whole * getattr(attention, "head_dim", 0)
    counts = {
        "num_heads": (whole, own),
        "num_attention_heads": (whole, own),
        "num_key_value_heads": (whole_key_value, own_key_value),
        "num_key_value_groups": (whole // whole_key_value, own // own_key_value),
        "hidden_size": (width, width // size),
    }
    for name, (everyones, mine) in counts.items():
        if vars(attention).get(name) == everyones:
            setattr(attention, name, mine)
