"""A run that goes on with other options than those of its checkpoint says which; what does not fit is an error."""

import warnings

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import LearningRateFinder

from lightning_boost import BoostParallelStrategy, LowRankLanguageModel, TextDataModule
from tests.models import small_config
from tests.processes import run_processes
from tests.users_module import UsersModule, loader, trainer_for

TEXT = "a line of text that is learnt by heart. " * 200


def _fit(path, resume, model=None, data=None, config=None, trainer=None, tensor=1, seed=3, batch_size=2):
    seed_everything(seed, verbose=False)
    files = []
    for name in ("train.txt", "validation.txt"):
        (path.parent / name).write_text(TEXT)
        files.append(str(path.parent / name))
    data = TextDataModule(
        train_files=files[0],
        validation_files=files[1],
        sequence_length=16,
        **{"batch_size": batch_size, **(data or {})},
    )
    config = small_config(vocab_size=257, num_hidden_layers=1, **(config or {}))
    module = LowRankLanguageModel(config, **{"warmup_steps": 0, "max_steps": 9, **(model or {})})
    options = {"max_steps": 3 if resume else 2, "limit_val_batches": 0, "use_distributed_sampler": True}
    trainer = trainer_for(strategy=BoostParallelStrategy(tensor), **{**options, **(trainer or {})})
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, data, ckpt_path=path if resume else None)
        except ValueError as raised:
            error = str(raised)
    if not resume:
        trainer.save_checkpoint(path)
    said = [str(each.message) for each in caught if "with other options" in str(each.message)]
    return [line.strip() for message in said for line in message.splitlines()[1:]], error


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"trainer": {"max_steps": 2}}, []),
        ({"model": {"learning_rate": 1e-3}}, ["model.learning_rate: 0.003 in the checkpoint, 0.001 now"]),
        ({"model": {"betas": (0.9, 0.95)}}, ["model.betas: [0.9, 0.999] in the checkpoint, [0.9, 0.95] now"]),
        (
            {"config": {"label_smoothing": 0.1}},
            ["model.config.label_smoothing: 0.0 in the checkpoint, 0.1 now"],
        ),
        (
            {"data": {"packing": "separate_documents"}, "seed": 4},
            [
                "data.packing: 'across_documents' in the checkpoint, 'separate_documents' now",
                "seed_everything: 3 in the checkpoint, 4 now",
            ],
        ),
        (
            {"batch_size": 4, "trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}},
            [
                "data.batch_size: 2 in the checkpoint, 4 now",
                "global_batch_size: 2 in the checkpoint, 8 now",
                "trainer.accumulate_grad_batches: 1 in the checkpoint, 2 now",
                "trainer.gradient_clip_val: None in the checkpoint, 1.0 now",
            ],
        ),
    ],
)
def test_options_that_differ_are_reported_one_a_line(tmp_path, options, expected):
    run_processes(_fit, 1, tmp_path / "a.ckpt", False)
    ((found, error),) = run_processes(lambda: _fit(tmp_path / "a.ckpt", True, **options), 1)
    assert error == ""
    assert [line for line in found if not line.startswith("trainer.max_steps")] == expected
    assert ("trainer.max_steps: 2 in the checkpoint, 3 now" in found) == bool(expected)


def _rates(path, resume):
    module = LowRankLanguageModel(
        small_config(vocab_size=257, num_hidden_layers=1),
        warmup_steps=0,
        learning_rate=1e-3 if resume else 3e-3,
        betas=(0.5, 0.6) if resume else (0.9, 0.999),
        max_steps=90 if resume else 9,
    )
    (path.parent / "x.txt").write_text(TEXT)
    files = {"train_files": str(path.parent / "x.txt"), "validation_files": str(path.parent / "x.txt")}
    steps = 3 if resume else 2
    trainer = trainer_for(max_steps=steps, max_epochs=-1, limit_val_batches=0, use_distributed_sampler=True)
    trainer.fit(module, TextDataModule(sequence_length=16, **files), ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    group = trainer.optimizers[0].param_groups[0]
    return group["initial_lr"], group["betas"], group["lr"]


def test_an_optimizer_s_options_are_those_that_were_saved_and_the_schedule_s_steps_the_present_ones(tmp_path):
    """As docs/checkpoints.md says."""
    run_processes(_rates, 1, tmp_path / "a.ckpt", False)
    ((initial, betas, rate),) = run_processes(_rates, 1, tmp_path / "a.ckpt", True)
    assert (initial, betas) == (3e-3, (0.9, 0.999))
    assert rate == pytest.approx(3e-3, rel=1e-2)


def test_process_0_alone_reports_and_a_layout_is_no_option(tmp_path):
    """Two replicas of half the batch are the same global batch."""
    run_processes(_fit, 1, tmp_path / "a.ckpt", False, None, None, None, None, 1, 3, 4)
    same = {"max_steps": 2}
    (first, second) = run_processes(_fit, 2, tmp_path / "a.ckpt", True, None, None, None, same, 2, 3, 4)
    assert first == second == ([], "")
    (first, second) = run_processes(_fit, 2, tmp_path / "a.ckpt", True, None, None, None, same, 1, 3, 2)
    assert first == (["data.batch_size: 4 in the checkpoint, 2 now"], "")
    assert second == ([], "")


def test_a_model_that_does_not_fit_is_an_error_beside_the_option_that_makes_it_one(tmp_path):
    """known_failures A68."""
    run_processes(_fit, 1, tmp_path / "a.ckpt", False)
    config = {"low_rank": {"bottleneck_size": 8}}
    ((found, error),) = run_processes(_fit, 1, tmp_path / "a.ckpt", True, None, None, config)
    assert "model.config.low_rank.bottleneck_size: 15 in the checkpoint, 8 now" in found
    assert "Load it into a model of the same configuration and precision." in error


def test_another_precision_is_told_beside_the_error(tmp_path):
    run_processes(_fit, 1, tmp_path / "a.ckpt", False)
    ((found, error),) = run_processes(_fit, 1, tmp_path / "a.ckpt", True, None, None, None, {"precision": "bf16-true"})
    assert "trainer.precision: '32-true' in the checkpoint, 'bf16-true' now" in found
    assert "torch.bfloat16 in the model" in error


def _older(path):
    state = torch.load(path / "meta.pt", weights_only=True)
    for key in ("boost_recipe", "boost_tied_weights", "hyper_parameters", "datamodule_hyper_parameters"):
        del state[key]
    torch.save(state, path / "meta.pt")
    return _fit(path, True, {"learning_rate": 1e-3})


def test_a_checkpoint_without_options_still_loads(tmp_path):
    run_processes(_fit, 1, tmp_path / "a.ckpt", False)
    assert run_processes(_older, 1, tmp_path / "a.ckpt") == [([], "")]


class _Keeps(UsersModule):
    def __init__(self, **options):
        super().__init__()
        self.save_hyperparameters(options)


def _users(path):
    module = _Keeps(width=4, note={"a": (1, 2)}, activation=torch.nn.functional.silu)
    trainer = trainer_for(max_steps=2, max_epochs=-1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader(), ckpt_path=path)
    return [str(each.message) for each in caught if "with other options" in str(each.message)]


def _save_users(path):
    trainer = trainer_for(max_steps=2, max_epochs=-1)
    trainer.fit(_Keeps(width=3, note={"a": (1, 2)}), loader())
    trainer.save_checkpoint(path)


def test_a_module_of_one_s_own_is_compared_by_its_hyper_parameters(tmp_path):
    run_processes(_save_users, 1, tmp_path / "a.ckpt")
    ((message,),) = run_processes(_users, 1, tmp_path / "a.ckpt")
    assert "  model.width: 3 in the checkpoint, 4 now" in message
    assert "  model.activation: not given in the checkpoint, 'silu' now" in message
    assert "note" not in message


def _find_rate(folder):
    (folder / "x.txt").write_text(TEXT)
    data = TextDataModule(train_files=str(folder / "x.txt"), validation_files=str(folder / "x.txt"), sequence_length=16)
    module = LowRankLanguageModel(small_config(vocab_size=257, num_hidden_layers=1), warmup_steps=0, max_steps=9)
    finder = LearningRateFinder(num_training_steps=15, update_attr=True)
    options = {"callbacks": [finder], "max_steps": 2, "limit_val_batches": 0, "default_root_dir": folder}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_for(enable_checkpointing=True, **options).fit(module, data)
    return [str(each.message) for each in caught if "with other options" in str(each.message)], module.learning_rate


def test_a_tuner_that_loads_its_own_checkpoint_reports_nothing(tmp_path):
    ((said, learning_rate),) = run_processes(_find_rate, 1, tmp_path)
    assert said == []
    assert learning_rate != 3e-3
