"""Recompute for those who configure a run by its callbacks."""

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_boost.recompute import LatentStore, RecomputeOptions


class LowRankActivationCheckpointing(Callback):
    """Run blocks again in backward from their latents, no collective twice: the strategy's ``recompute="low_rank"``.

    ``Trainer(strategy="boost")`` reads the options before processes start; the callback does nothing in training.

    Args:
        every: In which blocks: every so many, or a share of them below 1.
        keep_attention: Whether attention's output is kept too.
        store_latents: Whether each process that shares a layer keeps its latents ``"whole"``, or ``"sharded"``: a share
            of them, which backward gathers again.

    Raises:
        ValueError: If an option is out of range.
    """

    def __init__(self, *, every: float = 1, keep_attention: bool = False, store_latents: LatentStore = "whole") -> None:
        super().__init__()
        self.recompute_options = RecomputeOptions(
            kind="low_rank", every=every, keep_attention=keep_attention, store_latents=store_latents
        )

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the strategy has read the options.

        Raises:
            ValueError: If it is another one than ``"boost"``.
        """
        requested = getattr(trainer.strategy, "requested", None)
        if getattr(requested, "recompute", None) != self.recompute_options:
            raise ValueError(
                f"strategy ({type(trainer.strategy).__name__}) must be 'boost' with LowRankActivationCheckpointing; it"
                " trains on one device too. Set Trainer(strategy='boost'), or leave the callback out."
            )
