"""Arguments for every kernel, of a size: what is compiled ahead of time, measured and tried on a GPU."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_boost.kernels.statistic import statistic_columns


@dataclass(frozen=True)
class Sizes:
    """One process's share of a decoder layer and of the head. Those of a 7B model over four processes by default."""

    rows: int = 16384
    tokens: int = 4096
    """Of a sequence."""
    hidden: int = 1024
    """Features of the hidden stream on this process."""
    latents: int = 3072
    """Of the largest group."""
    gated: int = 2752
    heads: int = 8
    head_size: int = 128
    vocabulary: int = 8000
    loss_rows: int = 1024
    """Whose logits exist at a time."""
    processes: int = 4


@dataclass(frozen=True)
class Case:
    """A call of one kernel's function."""

    kernel: str
    function: str
    args: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The function, and what σ it has where it has one."""
        activations = [arg for arg in self.args if isinstance(arg, str)]
        return " ".join([self.function, *activations])


def cases(
    sizes: Sizes,
    dtype: torch.dtype,
    device: torch.device,
    activations: Sequence[str] = ("silu", "none"),
    stream: torch.dtype | None = None,
) -> Iterator[Case]:
    """Yield a call of every function of every kernel.

    Args:
        sizes: Of the tensors.
        dtype: Of what GEMMs read and write.
        device: Where the tensors are; on ``meta`` they take no memory.
        activations: Of latents.
        stream: Dtype of the hidden stream, its norm's weight and rotary tables; ``dtype`` if ``None``, fp32 beside
            bf16 under autocast.
    """

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    def positive(*shape: int) -> Tensor:
        return torch.rand(*shape, device=device) + 0.5

    rows, width, hidden_size = sizes.rows, sizes.latents, sizes.hidden * sizes.processes
    wide = dtype if stream is None else stream
    x, gamma = random(rows, sizes.hidden, dtype=wide), random(sizes.hidden, dtype=wide)
    t, c = random(rows, sizes.hidden), positive(rows, 1)
    buffer = random(rows, width + statistic_columns(dtype, sizes.processes)).abs()
    yield Case("norm_input", "norm_input", (x, gamma, buffer[:, width:], 0))
    yield Case("norm_input", "norm_input_backward", (x, gamma, t, c, True))
    grad, z, rho = random(rows, width), random(rows, width), positive(rows, 1)
    for activation in activations:
        yield Case("norm_latent", "norm_latent", (buffer, width, sizes.processes, hidden_size, 1e-6, activation))
        yield Case("norm_latent", "norm_latent_backward", (grad, z, rho, hidden_size, activation))
    yield Case("norm_latent", "activate", (z, "silu"))
    gate, up, grad = (random(rows, sizes.gated) for _ in range(3))
    for activation in ("silu", "none"):
        yield Case("gated_activation", "gated_activation", (gate, up, activation))
        yield Case("gated_activation", "gated_activation_backward", (grad, gate, up, activation))
    sequences = rows // sizes.tokens
    heads = random(sequences, sizes.tokens, sizes.heads, sizes.head_size).transpose(1, 2)
    table = random(sizes.tokens, sizes.head_size, dtype=wide)
    yield Case("rotary", "rotary", (heads, table, table))
    yield Case("rotary", "rotary_backward", (heads, table, table))
    loss_rows = sizes.loss_rows
    logits = random(loss_rows, sizes.vocabulary)
    targets = torch.zeros(loss_rows, dtype=torch.int64, device=device)
    sums = [positive(loss_rows) for _ in range(3)]
    yield Case("cross_entropy", "cross_entropy_parts", (logits, targets, 0.0, 0.0))
    yield Case("cross_entropy", "cross_entropy_gradient", (logits, targets, positive(3, loss_rows), *sums, 0.0, 0.0))
