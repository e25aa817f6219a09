"""Text from a model."""

import torch
from torch import Tensor, nn


@torch.inference_mode()
def generate_greedily(model: nn.Module, prompt: Tensor, num_tokens: int, max_context: int) -> Tensor:
    """Return the ``num_tokens`` most likely tokens, one after the other, that follow ``prompt``.

    The whole context is run again for each token.

    Args:
        model: Gives logits ``[B, T, V]``, the same on every process.
        prompt: ``[B, T]``.
        num_tokens: How many to add.
        max_context: Tokens of context at most; older ones are dropped.
    """
    token_ids = prompt
    for _ in range(num_tokens):
        logits = model(token_ids[:, -max_context:])
        token_ids = torch.cat([token_ids, logits[:, -1:].argmax(-1)], dim=1)
    return token_ids[:, prompt.shape[1] :]
