"""A LightningModule of your own, on two processes: ``python examples/own_model.py``, or with ``1`` behind it on one.

The network is plain PyTorch for one process. Of lightning_boost it uses one layer, LowRankLinear.
"""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional

from lightning_boost import LowRankLinear, TextDataModule

VOCAB_SIZE, HIDDEN, INTERMEDIATE, BOTTLENECK, LAYERS, HEADS = 257, 128, 352, 32, 4, 4


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = HIDDEN // HEADS
        self.q_proj = LowRankLinear(HIDDEN, HIDDEN, BOTTLENECK, activation="silu")
        self.k_proj = LowRankLinear(HIDDEN, HIDDEN, BOTTLENECK, activation="silu")
        self.v_proj = LowRankLinear(HIDDEN, HIDDEN, BOTTLENECK, activation="silu")
        self.o_proj = LowRankLinear(HIDDEN, HIDDEN, BOTTLENECK, activation="silu")

    def forward(self, x: Tensor) -> Tensor:
        """Attend within ``x``; how many heads there are here is read from the width, not from a constant."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


def rotate(heads: Tensor) -> Tensor:
    """Turn ``[B, H, T, E]`` by the angles of its positions."""
    num_tokens, size = heads.shape[-2:]
    frequencies = 10000.0 ** (-torch.arange(0, size, 2, device=heads.device) / size)
    angles = torch.arange(num_tokens, device=heads.device)[:, None] * frequencies.repeat(2)
    first, second = heads.chunk(2, dim=-1)
    return heads * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


class MLP(nn.Module):
    """The gated MLP, without an activation beside those at the bottlenecks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = LowRankLinear(HIDDEN, INTERMEDIATE, BOTTLENECK, activation="silu")
        self.up_proj = LowRankLinear(HIDDEN, INTERMEDIATE, BOTTLENECK, activation="silu")
        self.down_proj = LowRankLinear(INTERMEDIATE, HIDDEN, BOTTLENECK, activation="silu")

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, T, D]`` to ``[B, T, D]``."""
        return self.down_proj(self.gate_proj(x) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, T, D]`` to ``[B, T, D]``."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Everything below the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map token ids ``[B, T]`` to the last hidden state."""
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class OwnModel(LightningModule):
    """A language model with a loss of its own, taken from its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()
        self.lm_head = nn.Linear(HIDDEN, VOCAB_SIZE, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits ``[B, T, V]``."""
        return self.lm_head(self.model(input_ids))

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean cross-entropy of each next token."""
        logits = self(batch["input_ids"])
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        loss = self.loss_of(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the loss of a batch."""
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW on the parameters of the moment: the strategy has replaced those of ``__init__``."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(devices: int = 2, max_steps: int = 100) -> LightningModule:
    """Train, validate, and return the module."""
    seed_everything(0)
    module, data = OwnModel(), TextDataModule(sequence_length=128, batch_size=8)
    trainer = Trainer(
        strategy="boost",
        accelerator="cpu",
        devices=devices,
        max_steps=max_steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    trainer.validate(module, data)
    return module


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
