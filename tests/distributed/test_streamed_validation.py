"""Replicas validate on a stream whose sequences they cannot share evenly, and none waits for another."""

import json
import string

import pytest
import torch

from lightning_boost.data.streams import StreamSource
from lightning_boost.data_module import TextDataModule
from lightning_boost.language_model import LowRankLanguageModel
from lightning_boost.strategy.boost import BoostParallelStrategy
from tests.models import small_config
from tests.processes import run_processes
from tests.users_module import trainer_for


def _validate(path, packing):
    torch.manual_seed(0)
    source = StreamSource(dataset="json", data_files=[path])
    data = TextDataModule(
        train_streams=[source], validation_streams=[source], packing=packing, sequence_length=8, batch_size=2
    )
    module = LowRankLanguageModel(small_config(vocab_size=257, num_hidden_layers=1))
    trainer = trainer_for(strategy=BoostParallelStrategy(1, data_axis="shard"), use_distributed_sampler=True)
    return trainer.validate(module, data, verbose=False)[0]["val_loss"]


@pytest.mark.parametrize("packing", ["across_documents", "one_document"])
def test_every_token_of_a_stream_counts_once_whatever_the_number_of_replicas(tmp_path, packing):
    """13 documents of 1 to 13 letters and their ends: 13 sequences, packed in either way."""
    path = tmp_path / "letters.jsonl"
    texts = [string.ascii_lowercase[:length] for length in range(1, 14)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (expected,) = run_processes(_validate, 1, str(path), packing)
    assert run_processes(_validate, 2, str(path), packing) == pytest.approx([expected] * 2, abs=1e-6)
