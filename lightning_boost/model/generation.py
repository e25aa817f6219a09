"""Text from a model, token by token."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from lightning_boost.model.cache import KeyValueCache


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Raises:
        ValueError: If a number is out of range.
    """

    temperature: float = 0.0
    """What logits are divided by; 0: the most likely token is taken."""

    top_p: float = 1.0
    """Share of the probability that the most likely tokens, which alone are drawn from, have together at least."""

    seed: int = 0
    """Of the draws; the same on every process."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0:
            raise ValueError(
                f"temperature ({self.temperature}) must be at least 0, where the likeliest token is taken."
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p ({self.top_p}) must be above 0 and at most 1, where any token may be drawn.")

    def choose(self, logits: Tensor, generator: Generator) -> Tensor:
        """Return a token ``[B, 1]`` for each row of logits ``[B, V]``."""
        if self.temperature == 0.0:
            return logits.argmax(-1, keepdim=True)
        probabilities = (logits.float() / self.temperature).softmax(-1)
        if self.top_p < 1.0:
            ordered, tokens = probabilities.sort(-1, descending=True)
            # those with less than the share before them: the likeliest always
            kept = ordered.masked_fill(ordered.cumsum(-1) - ordered >= self.top_p, 0.0)
            probabilities = torch.zeros_like(probabilities).scatter(-1, tokens, kept)
        return torch.multinomial(probabilities, 1, generator=generator)


@torch.inference_mode()
def generate(
    model: nn.Module,
    prompt: Tensor,
    num_tokens: int,
    *,
    sampling: Sampling = Sampling(),
    max_context: int | None = None,
    cache: KeyValueCache | None = None,
) -> Iterator[Tensor]:
    """Yield the tokens ``[B, 1]`` that follow ``prompt``, one after the other.

    Args:
        model: Gives logits ``[B, T, V]``, the same on every process.
        prompt: ``[B, T]``.
        num_tokens: How many to add at most.
        sampling: How each is chosen.
        max_context: Tokens of context at most; older ones are dropped. Means nothing with a cache.
        cache: An empty one, which then spares running the context again for each token.
    """
    generator = Generator(prompt.device).manual_seed(sampling.seed)
    context = prompt
    for _ in range(num_tokens):
        if cache is None:
            logits = model(context[:, -max_context:] if max_context else context)
        else:
            logits = model(context, cache=cache)
        token = sampling.choose(logits[:, -1], generator)
        yield token
        context = torch.cat([context, token], dim=1) if cache is None else token
