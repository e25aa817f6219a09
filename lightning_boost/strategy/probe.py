"""A last check of a swap on the model itself: it must still compute what it did.

The layout's names tell where parts are, not how a ``forward`` puts them together. One that reads a norm's output twice,
or counts features where it should not, would train something else without a word.
"""

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

NUM_TOKENS = 16
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-10, torch.bfloat16: 0.5}
"""Relative error that splitting may cost a deep model with large weights. Defects that matter cost more; in bf16 only
coarse ones are told apart from rounding."""


def probe_before(model: nn.Module, vocab_size: int) -> Tensor | None:
    """Return what the model gives before the swap; ``None``, with a warning, if nothing can be learned from that.

    A model on the meta device has nothing to give yet, and nothing is said.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return None
    reason = "it gives neither logits nor an object that holds them"
    try:
        first, second = (probe(model, vocab_size, seed=seed) for seed in (0, 1))
    except Exception as error:  # a user's forward may raise anything
        first, reason = None, f"{type(error).__name__}: {error}"
    else:
        if first is not None and second is not None and not torch.equal(first, second):
            first, reason = None, "it gives something else each time, in evaluation mode too"
    if first is None:
        rank_zero_warn(
            f"Strategy 'boost' could not try {type(model).__name__} on {NUM_TOKENS} token ids to see that splitting it"
            f" changes nothing ({reason}). See to it yourself that its forward keeps to docs/your_own_model.md."
        )
    return first


@torch.no_grad()
def probe(model: nn.Module, vocab_size: int, *, seed: int = 0) -> Tensor | None:
    """Return the model's output on a few tokens, in evaluation mode; ``None`` if it gives none, or has no weights yet.

    Args:
        model: Called with token ids ``[1, T]``; gives logits, or an object that holds them as ``logits``.
        vocab_size: Ids stay below it.
        seed: Of random numbers that the model draws even in evaluation.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return None
    device = next(model.parameters()).device
    token_ids = (torch.arange(NUM_TOKENS, device=device) % vocab_size)[None]
    was_training = {module: module.training for module in model.modules()}
    buffers = {buffer: buffer.clone() for buffer in model.buffers()}
    model.eval()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            output = model(token_ids)
    finally:
        for module, training in was_training.items():
            module.training = training
        for buffer, value in buffers.items():
            buffer.copy_(value)
    output = getattr(output, "logits", output)
    if isinstance(output, tuple) and output:
        output = output[0]
    return output.detach().clone() if isinstance(output, Tensor) else None


def check_probe(before: Tensor | None, after: Tensor | None, model: nn.Module) -> None:
    """Check that a model's output is the same before and after the swap.

    Raises:
        ValueError: If it is not.
    """
    if before is None or after is None:
        return
    error = float("inf")
    if before.shape == after.shape:
        error = ((after.double() - before.double()).norm() / before.double().norm().clamp(min=1e-30)).item()
    if not error <= TOLERANCES.get(before.dtype, TOLERANCES[torch.bfloat16]):
        raise ValueError(
            f"{type(model).__name__} computes something else once strategy 'boost' has split it: its output on"
            f" {NUM_TOKENS} tokens is off by {error:.0e}. Its forward does more with a part than that part's place"
            " allows: reads a norm's output beside the projections, scales it, or counts features or heads by the"
            " configuration instead of by the tensor. See docs/your_own_model.md, or set tensor_parallel_size to 1."
        )
