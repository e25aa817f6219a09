"""The runs of one call of a block: the first in forward, the second in backward."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

DIFFERS = (
    "the second run of a recomputed layer, in backward, is not what the first was in forward. With recompute a layer"
    " must compute the same from the same arguments and torch's random stream: counters, attributes that are set before"
    " a call, Python's random and a torch.Generator of its own are not set back. Draw from torch's default generator,"
    " hand in as arguments what changes from call to call, or set recompute to 'none'."
)
_TORCHS_WORDS = "encountered during backward but not found in storage"


class Runs:
    """Sees that the second run may be what the first was.

    Args:
        layer: The block.
        may_repeat: Whether backward may go through the block again, as where the second run uses up nothing.
    """

    def __init__(self, layer: nn.Module, *, may_repeat: bool) -> None:
        self._layer = layer
        self._may_repeat = may_repeat
        self._num_begun = 0
        self._versions: list[tuple[nn.Parameter, int]] = []

    @contextmanager
    def next(self) -> Iterator[None]:
        """Let a run happen inside.

        Raises:
            RuntimeError: If it is not the first, and is known to differ or finds nothing kept.
        """
        self._num_begun += 1
        if self._num_begun == 1:
            yield
            # behind it, for a layer that scales its own weights
            self._versions = [(parameter, parameter._version) for parameter in self._layer.parameters()]
            return
        self._check()
        try:
            yield
        except RuntimeError as error:
            if _TORCHS_WORDS in str(error):
                raise RuntimeError(DIFFERS) from error
            raise
        # torch leaves it as soon as it has what backward needs
        raise RuntimeError(DIFFERS)

    def _check(self) -> None:
        if self._num_begun > 2 and not self._may_repeat:
            raise RuntimeError(
                "recompute ('low_rank') must be 'block' or 'none' where backward goes twice through a block"
                " (retain_graph=True): the first backward uses up what was kept. Go backward once, from the sum of all"
                " losses, or set recompute to 'block'."
            )
        for parameter, version in self._versions:
            if parameter._version != version:
                names = [name for name, other in self._layer.named_parameters() if other is parameter]
                layer = type(self._layer).__name__
                raise RuntimeError(
                    f"{', '.join(names) or 'a weight'} of a {layer} was changed between forward and backward, where"
                    " recompute would compute with its new values. Go backward from all losses before an optimizer"
                    " steps, or run the model again behind it."
                )
