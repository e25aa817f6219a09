"""From another project's model, through training on four processes, back to where it came from."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_boost import BoostParallelStrategy, LowRankLanguageModel
from lightning_boost.checkpoint_tools.conversion import convert_model, open_any
from lightning_boost.interchange.source import open_model
from lightning_boost.model.initialization import initialize
from lightning_boost.model.llama import LlamaForCausalLM
from tests.checkpoints import DATA, tensors_of
from tests.models import whole
from tests.processes import run_processes
from tests.users_module import trainer_for

TEXT = "The quick brown fox jumps over the lazy dog. "
LENGTH = 32


def _sequences(start, number):
    """Return rows of a text that repeats; those from other starts hold the same words at other places."""
    tokens = torch.tensor(list((TEXT * 60).encode()))
    return [tokens[start + 7 * row :][:LENGTH] for row in range(number)]


def _loader(start, number, batch_size):
    rows = [{"input_ids": row, "labels": row} for row in _sequences(start, number)]
    return DataLoader(rows, batch_size=batch_size)


def _fine_tuned(name, folder, sizes, options):
    module = LowRankLanguageModel(
        checkpoint=str(DATA / name), learning_rate=1e-2, warmup_steps=2, weight_decay=0.0, max_steps=30, **options
    )
    best = ModelCheckpoint(folder, monitor="val_loss", filename="best", enable_version_counter=False)
    trainer = trainer_for(
        strategy=BoostParallelStrategy(**sizes),
        max_steps=30,
        max_epochs=-1,
        val_check_interval=5,
        check_val_every_n_epoch=None,
        gradient_clip_val=1.0,
        callbacks=[best],
        enable_checkpointing=True,
    )
    validation = _loader(3, 8, 4)
    before = trainer.validate(module, validation, verbose=False)[0]["val_loss"]
    trainer.fit(module, _loader(0, 40, 8), validation)
    after = trainer.validate(module, validation, ckpt_path=best.best_model_path, verbose=False)[0]["val_loss"]
    logits = torch.cat(trainer.predict(module, validation))
    kept = {key: whole(value).numpy() for key, value in module.model.named_parameters()}
    return before, after, best.best_model_path, logits.numpy(), kept


@pytest.mark.parametrize(
    ("name", "to", "options"),
    [
        ("cola_latent_only", "cola", {}),
        (
            "asvd_mixed_gqa",
            "asvd",
            {"trained_parameters": ["*.factor_b.*"], "learning_rate_factors": {"*_proj.*": 2.0}},
        ),
    ],
)
def test_a_model_goes_out_as_it_came_in_and_better(tmp_path, name, to, options):
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    results = run_processes(_fine_tuned, 4, name, tmp_path / "run", sizes, options)
    before, after, best, logits, _ = results[0]
    assert after < 0.8 * before
    converted = convert_model(open_any(tmp_path / "run" / "best.ckpt"), tmp_path / "out", to=to, max_shard_bytes=2**30)
    assert best == str(tmp_path / "run" / "best.ckpt")
    assert converted.max_logit_difference == 0.0
    original, found = tensors_of(DATA / name), tensors_of(tmp_path / "out")
    assert {key: tensor.shape for key, tensor in found.items()} == {
        key: tensor.shape for key, tensor in original.items()
    }
    source = open_model(tmp_path / "out")
    assert source.format.name == to
    with torch.device("meta"):
        model = LlamaForCausalLM(source.config, values=source.values)
    initialize(model)
    with torch.no_grad():
        again = model.eval()(torch.stack(_sequences(3, 8)))
    torch.testing.assert_close(again, torch.from_numpy(logits), rtol=0, atol=1e-4)
    kept = {key: value for *_, parameters in results for key, value in parameters.items()}
    start = open_model(DATA / name).values
    for key, value in kept.items():
        is_trained = "trained_parameters" not in options or ".factor_b." in key
        assert torch.equal(torch.from_numpy(value), start[key].whole()) != is_trained, key
