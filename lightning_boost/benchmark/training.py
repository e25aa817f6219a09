"""A training loop as one writes it by hand, around a parallel model."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_boost.benchmark.blocks import Candidate, make_model, with_kind
from lightning_boost.config import LlamaConfig
from lightning_boost.gradients import clip_gradients_by_norm
from lightning_boost.layout import find_decoder
from lightning_boost.mesh import ParallelSizes, build_mesh
from lightning_boost.parallelize import parallelize
from lightning_boost.recompute import RecomputeOptions

CLIP_NORM = 1.0
LEARNING_RATE = 1e-4

Batch = dict[str, Tensor]


def make_optimizer(model: nn.Module) -> Optimizer:
    """Return what models are trained with."""
    return AdamW(model.parameters(), lr=LEARNING_RATE, foreach=True)


class TrainingLoop:
    """A model under a scheme, split over all processes, and its optimizer.

    Args:
        config: The model; its kind gives way to the candidate's.
        candidate: Scheme and kind.
        dtype: Of parameters and activations.
        device: Of this process.
        recompute: What is computed again in backward.
    """

    def __init__(
        self,
        config: LlamaConfig,
        candidate: Candidate,
        dtype: torch.dtype,
        device: torch.device,
        recompute: RecomputeOptions | None = None,
    ) -> None:
        self.model = make_model(with_kind(config, candidate.kind), dtype)
        mesh = build_mesh(ParallelSizes(tensor_parallel_size=dist.get_world_size()), device.type)
        decoder = find_decoder(self.model)
        parallelize(decoder, mesh, device=device, seed=0, scheme=candidate.scheme, recompute=recompute)
        self.optimizer = make_optimizer(self.model)

    def step(self, batch: Batch) -> None:
        """Train on a batch."""
        self.optimizer.zero_grad()
        loss: Tensor = self.model(**batch)
        loss.backward()
        clip_gradients_by_norm(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
