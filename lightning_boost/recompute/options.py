"""What a user chooses of recompute."""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Literal, Protocol, runtime_checkable

Recompute = Literal["none", "low_rank", "block"]
KINDS = ("none", "low_rank", "block")
LatentStore = Literal["whole", "sharded"]
STORES = ("whole", "sharded")


@dataclass(frozen=True, kw_only=True)
class RecomputeOptions:
    """What a user chooses of recompute.

    Raises:
        ValueError: If a name is unknown, the blocks are none, or something is to be kept where all is run again.
    """

    kind: Recompute = "none"
    every: float = 1
    """Of how many blocks one is recomputed, as a whole number, or the share of blocks, below 1."""

    keep_attention: bool = False
    """Whether attention's output is kept too, so that attention is not run again."""

    store_latents: LatentStore = "whole"
    """Whether each process of the tensor axis keeps the latents whole, or a share of them that is gathered again."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"recompute ({self.kind!r}) must be one of {', '.join(map(repr, KINDS))}.")
        is_number = isinstance(self.every, int | float) and not isinstance(self.every, bool)
        if not is_number or not (0 < self.every < 1 or (self.every >= 1 and float(self.every).is_integer())):
            raise ValueError(
                f"recompute_every ({self.every!r}) must be a whole number k of at least 1, for every k-th block, or a"
                " share of the blocks between 0 and 1; 1 recomputes all."
            )
        if self.keep_attention and self.kind == "block":
            raise ValueError(
                "keep_attention (True) must be False with recompute 'block', which runs all of a block again; set"
                " recompute to 'low_rank' to keep attention's output."
            )
        if self.store_latents not in STORES:
            raise ValueError(f"store_latents ({self.store_latents!r}) must be one of {', '.join(map(repr, STORES))}.")
        if self.store_latents == "sharded" and self.kind == "block":
            raise ValueError(
                "store_latents ('sharded') must be 'whole' with recompute 'block', which keeps no latents; set"
                " recompute to 'low_rank' to keep a share of them."
            )

    def __str__(self) -> str:
        if self.kind == "none":
            return "no recompute"
        where = "every block" if self.every == 1 else f"every {self.every:g}. block"
        if self.every < 1:
            where = f"{self.every:.0%} of the blocks"
        kept = [", attention kept"] * self.keep_attention + [", latents sharded"] * (self.store_latents == "sharded")
        return f"recompute {self.kind} in {where}{''.join(kept)}"

    def choose(self, num_blocks: int) -> list[int]:
        """Return the indices of the blocks that are recomputed: spread evenly, the first among them."""
        # a share as it was meant, not as floating point holds it
        share = 1 / Fraction(self.every) if self.every >= 1 else Fraction(self.every).limit_denominator(1000)
        share = share or Fraction(1, 1000)
        return [index for index in range(num_blocks) if ceil((index + 1) * share) > ceil(index * share)]


@runtime_checkable
class AsksForRecompute(Protocol):
    """A callback that chooses recompute in the strategy's stead."""

    recompute_options: RecomputeOptions
