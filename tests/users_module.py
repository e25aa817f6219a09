"""A LightningModule as a user writes it, with a network of its own, and a Trainer for it."""

import warnings

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.utils.data import DataLoader

import lightning_boost  # noqa: F401 - registers the strategy
from lightning_boost import LowRankLinear
from lightning_boost.config import IGNORED_LABEL
from tests.models import masked_batch

WIDTH, HEADS, VOCAB = 32, 4, 37


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (LowRankLinear(WIDTH, WIDTH, 8) for _ in range(4))

    def forward(self, hidden):
        batch, tokens, _ = hidden.shape
        q, k, v = (
            projection(hidden).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class _MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (LowRankLinear(WIDTH, 50, 9, activation="silu") for _ in range(2))
        self.down_proj = LowRankLinear(50, WIDTH, 7, activation="silu")

    def forward(self, hidden):
        return self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = _Attention(), _MLP()
        self.input_layernorm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.post_attention_layernorm = nn.RMSNorm(WIDTH, eps=1e-6)

    def forward(self, hidden):
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([_Layer(), _Layer()])
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)

    def forward(self, input_ids):
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)


class _Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = _Decoder()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.model(input_ids))


class UsersModule(pl.LightningModule):
    """Knows nothing of this package but ``LowRankLinear``; takes its loss from logits."""

    def __init__(self, meta=False):
        super().__init__()
        self.meta = meta
        self.net = None if meta else _Network()
        self.losses = []

    def configure_model(self):
        if self.net is None:
            with torch.device("meta"):
                self.net = _Network()

    def _loss(self, batch):
        logits = self.net(batch["input_ids"])
        return cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED_LABEL)

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.net(batch["input_ids"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


def loader(num_batches=4):
    batch = masked_batch(VOCAB, rows=12)
    rows = [{name: tensor[row] for name, tensor in batch.items()} for row in range(3 * num_batches)]
    return DataLoader(rows, batch_size=3)


def trainer_for(**options):
    warnings.filterwarnings("ignore")
    defaults = {
        "accelerator": "cpu",
        "strategy": "boost",
        "devices": dist.get_world_size() if dist.is_initialized() else 1,
        "max_epochs": 1,
        "use_distributed_sampler": False,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**defaults, **options})
