"""How a feature of Lightning is run on one layout or another, and the list of all of them.

A feature is a function of a ``Run``; its name is that of its row in docs/lightning_features.md. It trains what
``run.module`` then is, and returns further numbers that must not depend on the layout.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_boost import BoostParallelStrategy
from tests.models import masked_batch
from tests.users_module import VOCAB, UsersModule, trainer_for

PAGE = Path(__file__).resolve().parents[1] / "docs" / "lightning_features.md"

ROWS, BATCH = 24, 6
ONE, TENSOR, REPLICATE, SHARD = "one process", "tensor 2", "data 2, replicate", "data 2, shard"
LAYOUTS = {ONE: 1, TENSOR: 2, REPLICATE: 2, SHARD: 2}


class Module(UsersModule):
    """Logs what the mean over replicas is; its own list of losses would be one replica's."""

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss


class Run:
    """One layout, and what a feature needs to run in it."""

    def __init__(self, layout: str, folder: Path):
        self.layout, self.folder = layout, folder / layout
        self.module = None

    @property
    def strategy(self):
        if self.layout == ONE:
            return "auto"
        return BoostParallelStrategy(
            2 if self.layout == TENSOR else 1, data_axis="shard" if self.layout == SHARD else "replicate"
        )

    def loader(self, rows=ROWS, batch=BATCH):
        """Give batches of the same rows on every layout, in shares where replicas are to have them."""
        ids = masked_batch(VOCAB, rows=rows)["input_ids"]
        examples = [{"input_ids": row, "labels": row} for row in ids]
        if self.layout in {REPLICATE, SHARD}:
            batches = [examples[start : start + batch] for start in range(0, rows, batch)]
            examples = [example for whole in batches for example in whole[dist.get_rank() :: 2]]
            batch //= 2
        return DataLoader(examples, batch_size=batch)

    def trainer(self, **options):
        return trainer_for(strategy=self.strategy, **{"default_root_dir": self.folder, **options})

    def fit(self, make_module=Module, **options):
        torch.manual_seed(0)
        self.module = make_module()
        trainer = self.trainer(**options)
        trainer.fit(self.module, self.loader(), self.loader(rows=12))
        return trainer


Feature = Callable[[Run], dict | None]
FEATURES: dict[str, Feature] = {}
ON_REPLICAS: set[str] = set()
"""Those that are also run on the data axis."""

ONLY_REPLICAS = {"`detect_anomaly`"}
"""Those that are refused on the tensor axis."""


def feature(name, *, on_replicas=False):
    def register(function):
        FEATURES[name] = function
        if on_replicas:
            ON_REPLICAS.add(name)
        return function

    return register
