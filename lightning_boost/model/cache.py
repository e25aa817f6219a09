"""Keys and values of tokens that a model has seen, so that the next token does without running them again."""

import torch
from torch import Tensor


class LayerCache:
    """Of one layer; grows by doubling.

    Keys and values are this process's heads where layers are shared.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values ``[B, K, T, E]`` of the next tokens; return those of all tokens so far."""
        start, self.num_tokens = self.num_tokens, self.num_tokens + keys.shape[2]
        self._keys = _with_room(self._keys, keys, self.num_tokens)
        self._values = _with_room(self._values, values, self.num_tokens)
        self._keys[:, :, start : self.num_tokens] = keys
        self._values[:, :, start : self.num_tokens] = values
        return self._keys[:, :, : self.num_tokens], self._values[:, :, : self.num_tokens]


class KeyValueCache:
    """Of every layer of a model.

    Args:
        num_layers: Layers of the model.
    """

    def __init__(self, num_layers: int) -> None:
        self.layers = [LayerCache() for _ in range(num_layers)]

    @property
    def num_tokens(self) -> int:
        """Tokens seen so far."""
        return self.layers[0].num_tokens


def _with_room(buffer: Tensor | None, like: Tensor, num_tokens: int) -> Tensor:
    """Return a buffer for ``num_tokens`` that holds what the given one does."""
    if buffer is not None and buffer.shape[2] >= num_tokens:
        return buffer
    batch, heads, _, size = like.shape
    larger = like.new_empty(batch, heads, 2 * num_tokens, size)
    if buffer is not None:
        larger[:, :, : buffer.shape[2]] = buffer
    return larger


def causal_mask(num_seen: int, num_new: int, device: torch.device) -> Tensor | None:
    """Return which tokens each new one sees, ``[num_new, num_seen + num_new]``: all seen, itself and those before it.

    ``None`` where attention's own causal form, or no mask at all, says the same: nothing seen yet, or one new token.
    """
    if num_seen == 0 or num_new == 1:
        return None
    return torch.ones(num_new, num_seen + num_new, dtype=torch.bool, device=device).tril(num_seen)
