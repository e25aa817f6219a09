"""A Hugging Face model on two processes: ``python examples/hugging_face.py``, or with ``1`` behind it on one.

Each of its linears is replaced by a plain sequence of two; everything else is the transformers library's.
"""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_boost import TextDataModule

BOTTLENECK = 32


def low_rank(linear: nn.Linear) -> nn.Module:
    """Return two factors in a dense linear's place, of its best approximation with so narrow a bottleneck."""
    left, values, right = torch.linalg.svd(linear.weight.detach(), full_matrices=False)
    down = nn.Linear(linear.in_features, BOTTLENECK, bias=False)
    up = nn.Linear(BOTTLENECK, linear.out_features, bias=linear.bias is not None)
    down.weight.data = values[:BOTTLENECK, None] * right[:BOTTLENECK]
    up.weight.data = left[:, :BOTTLENECK].contiguous()
    if linear.bias is not None:
        up.bias.data = linear.bias.data
    return nn.Sequential(down, up)


class FineTuning(LightningModule):
    """Trains the model on the loss that it takes from its own logits."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=257, **sizes))
        for layer in self.model.model.layers:
            for name, module in list(layer.named_modules()):
                if isinstance(module, nn.Linear):
                    layer.set_submodule(name, low_rank(module))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the loss of a batch."""
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW on the parameters of the moment."""
        return torch.optim.AdamW(self.parameters(), lr=5e-4)


def main(devices: int = 2, max_steps: int = 100) -> LightningModule:
    """Train, validate, and return the module."""
    seed_everything(0)
    module, data = FineTuning(), TextDataModule(sequence_length=128, batch_size=8)
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
