"""Replicas share records, each answer counts once, and an interrupted run goes on with those it would have seen."""

import json

import pytest
import torch
from lightning.pytorch import seed_everything

from lightning_boost.data.streams import StreamSource
from lightning_boost.data_module import TextDataModule
from lightning_boost.language_model import LowRankLanguageModel
from lightning_boost.strategy.boost import BoostParallelStrategy
from tests.models import small_config
from tests.processes import run_processes
from tests.users_module import trainer_for

NUM_RECORDS = 37


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "records.jsonl"
    records = [{"prompt": f"number {n}: ", "answer": f"{n}" * (1 + n % 4)} for n in range(NUM_RECORDS)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def _data(file, packing, streams, length=32):
    source = StreamSource(dataset="json", data_files=[file], shuffle_window=20)
    where = (
        {"train_streams": [source], "validation_streams": [source]}
        if streams
        else {"train_files": file, "validation_files": file}
    )
    return TextDataModule(**where, records="prompt_answer", packing=packing, sequence_length=length, batch_size=2)


class _Noting(LowRankLanguageModel):
    """Notes what is learnt in each step."""

    def __init__(self):
        super().__init__(small_config(vocab_size=257, num_hidden_layers=1), warmup_steps=2, max_steps=30)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["labels"].tolist())
        return super().training_step(batch, batch_idx)


def _validate(file, packing, streams):
    torch.manual_seed(0)
    trainer = trainer_for(strategy=BoostParallelStrategy(1, data_axis="shard"), use_distributed_sampler=True)
    return trainer.validate(_Noting(), _data(file, packing, streams), verbose=False)[0]["val_loss"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("packing", ["separate_documents", "one_document"])
def test_every_answer_counts_once_whatever_the_number_of_replicas(file, packing, streams):
    (expected,) = run_processes(_validate, 1, file, packing, streams)
    assert run_processes(_validate, 2, file, packing, streams) == pytest.approx([expected] * 2, abs=1e-6)


def _fit(file, streams, folder, steps, resume):
    seed_everything(3, verbose=False)
    module = _Noting()
    trainer = trainer_for(
        max_steps=steps,
        max_epochs=-1,
        strategy=BoostParallelStrategy(1),
        use_distributed_sampler=True,
        limit_val_batches=0,
    )
    trainer.fit(module, _data(file, "separate_documents", streams), ckpt_path=folder / "a.ckpt" if resume else None)
    if not resume:
        trainer.save_checkpoint(folder / "a.ckpt")
    return module.seen


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_an_interrupted_run_goes_on_with_the_records_that_it_would_have_seen(file, tmp_path, size, streams):
    whole = run_processes(_fit, size, file, streams, tmp_path, 20, False)
    run_processes(_fit, size, file, streams, tmp_path, 7, False)
    assert run_processes(_fit, size, file, streams, tmp_path, 20, True) == [seen[7:] for seen in whole]
    # within an epoch
    rows = [str(row) for seen in whole for batch in seen[:4] for row in batch]
    assert len(set(rows)) == len(rows) == 8 * size
