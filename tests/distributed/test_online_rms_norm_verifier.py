"""The verifier of online RMSNorm in training: what it finds, what it leaves alone, and what it says."""

import contextlib
import csv
import io
import json
import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_boost import BoostParallelStrategy, LowRankLanguageModel
from lightning_boost.callbacks.online_rms_norm_verifier import FIGURES, FILE_NAME, OnlineRMSNormVerifier
from lightning_boost.collectives import count_collectives
from lightning_boost.kernels import reference
from lightning_boost.tensor_parallel import ops
from lightning_boost.tensor_parallel.verification import online_norms
from tests.models import masked_batch, small_config
from tests.processes import run_processes
from tests.users_module import UsersModule, loader, trainer_for
from tests.watched_steps import StepWatch

NORMS = [
    f"net.model.layers.{layer}.{norm}" for layer in (0, 1) for norm in ("input_layernorm", "post_attention_layernorm")
]


def _fit(folder, module=None, data=None, verifier=None, strategy=None, **options):
    """Train, and return the verifier's file and what this process printed."""
    torch.manual_seed(0)
    callbacks = [verifier or OnlineRMSNormVerifier(every_n_steps=2), *options.pop("callbacks", [])]
    strategy = BoostParallelStrategy(**strategy) if strategy else BoostParallelStrategy(dist.get_world_size())
    trainer = trainer_for(strategy=strategy, callbacks=callbacks, default_root_dir=folder, **options)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer.fit(module or UsersModule(), data or loader())
    return json.loads((folder / FILE_NAME).read_text()), printed.getvalue()


# ---- what it finds


LAYOUTS = {
    "tensor, fp32": (2, {}, {}),
    "tensor, bf16-true": (2, {}, {"precision": "bf16-true"}),
    "tensor, bf16-mixed, accumulation": (2, {}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}),
    "replicas that share": (4, {"data_parallel_size": 2, "data_axis": "shard"}, {"precision": "bf16-mixed"}),
    "replicas": (4, {"data_parallel_size": 2}, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_norm_of_a_users_model_is_exact_to_rounding(layout, tmp_path):
    world_size, strategy, options = LAYOUTS[layout]
    strategy = {"tensor_parallel_size": 2, **strategy}
    (found, text), *others = run_processes(_fit_with, world_size, tmp_path, strategy, options)
    steps = 2 if "accumulate_grad_batches" in options else 4
    assert found["steps"] == list(range(0, steps, 2))
    assert found["is_within_tolerance"]
    assert [norm["name"] for norm in found["norms"]] == NORMS
    smallest, largest = (1e-3, 1e-2) if "precision" in options else (1e-8, 1e-6)
    for norm in found["norms"]:
        assert smallest < norm["mean_relative"] <= norm["max_relative"] < largest
        assert 0 < norm["mean_absolute"] < norm["max_absolute"] < largest * norm["max_exact"]
        assert norm["dtype"] == ("bfloat16" if "precision" in options else "float32")
        assert norm["tolerance"] == (2e-2 if "precision" in options else 1e-5)
    assert text.count("online RMSNorm beside the exact norm") == 1
    assert all(not printed for _, printed in others)


def _fit_with(folder, strategy, options):
    return _fit(folder, strategy=strategy, **options)


def _on_a_pipeline(folder):
    config = small_config(num_hidden_layers=3)
    batch = masked_batch(config.vocab_size, rows=8)
    rows = [{name: tensor[row] for name, tensor in batch.items()} for row in range(8)]
    strategy = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    mine = _Comparisons()
    found, text = _fit(
        folder, LowRankLanguageModel(config), DataLoader(rows, batch_size=4), strategy=strategy, callbacks=[mine]
    )
    return found, text, mine.counts


class _Comparisons(pl.Callback):
    """Counts the comparisons' collectives of each batch."""

    def __init__(self):
        self.counts, self._watch = [], contextlib.ExitStack()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._log = self._watch.enter_context(count_collectives())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._watch.close()
        self.counts.append(self._log.total(operation="all_reduce", chunk="verification").launches)


def test_each_stage_of_a_pipeline_verifies_its_own_norms_once_a_step(tmp_path):
    found = run_processes(_on_a_pipeline, 4, tmp_path)
    report, text, _ = found[0]
    norms = [norm["name"].split(".")[-2:] for norm in report["norms"]]
    assert norms == [
        [str(layer), norm] for layer in range(3) for norm in ("input_layernorm", "post_attention_layernorm")
    ]
    assert "steps verified: 1" in text
    assert text.count("_layernorm") == len(norms)
    # six norms on two stages, on the first of two steps and of several micro-batches
    of_stages = [counts for _, _, counts in found]
    assert sum(first for first, _ in of_stages) == 2 * 6
    assert all(second == 0 for _, second in of_stages)


# ---- what it leaves alone


class _Watch(StepWatch):
    """Counts the norms' hooks behind each step, too."""

    def __init__(self):
        super().__init__()
        self.hooks = []

    def _note(self, pl_module, operations, log):
        super()._note(pl_module, operations, log)
        self.hooks.append(_num_hooks(pl_module))


class _Hooked(UsersModule):
    """Counts the norms' hooks when a step begins."""

    def training_step(self, batch, batch_idx):
        self.hooks = [*getattr(self, "hooks", []), _num_hooks(self)]
        return super().training_step(batch, batch_idx)


def _num_hooks(module):
    return sum(len(norm._forward_hooks) for norm in online_norms(module).values())


def _steps(folder, verify):
    watch = _Watch()
    # in front of the verifier, so that what that does on its own counts too
    torch.manual_seed(0)
    callbacks = [watch, OnlineRMSNormVerifier(every_n_steps=3)] if verify else [watch]
    trainer = trainer_for(callbacks=callbacks, default_root_dir=folder)
    module = _Hooked()
    trainer.fit(module, loader())
    return watch.steps, watch.hooks, module.losses, module.hooks


def test_steps_between_run_no_hook_no_operation_and_no_collective(tmp_path):
    runs = (run_processes(_steps, 2, tmp_path, verify) for verify in (False, True))
    for (plain, _, losses, _), (verified, hooks_left, same, hooks) in zip(*runs, strict=True):
        assert hooks == [len(NORMS), 0, 0, len(NORMS)]
        assert hooks_left == [0] * 4
        assert len(plain) == 4
        assert verified[1:3] == plain[1:3]
        for step in (0, 3):
            assert verified[step].operations > plain[step].operations
            # an all-reduce and an all-gather for each norm
            assert verified[step].launches == plain[step].launches + 2 * len(NORMS)
        assert losses == same


class _Skipping(UsersModule):
    """Skips its first epoch."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.current_epoch == 0 else None

    def on_train_epoch_end(self):
        assert _num_hooks(self) == 0


def _skip(folder):
    module, verifier = _Skipping(), OnlineRMSNormVerifier()
    trainer_for(callbacks=[verifier], default_root_dir=folder, max_epochs=2).fit(module, loader())
    return len(module.losses), verifier._steps


def test_a_skipped_batch_leaves_no_hook_and_is_made_up_for(tmp_path):
    assert run_processes(_skip, 2, tmp_path) == [(4, [0])] * 2


# ---- defects


def _local_mean(plant):
    """Each process takes the mean over its own features."""
    written = []
    write = reference.write_statistic

    def note(columns, value, index):
        written.append(value)
        write(columns, value, index)

    plant(reference, "write_statistic", note)
    plant(reference, "read_statistic", lambda columns, size: written.pop()[:, None] * size)


def _missing_reduce(plant):
    plant(ops, "all_reduce", lambda *_: None)


def _eps_of_every_process(plant):
    """Eps enters once for each process; counts where hidden states are small."""
    read = reference.read_statistic
    plant(reference, "read_statistic", lambda columns, size: read(columns, size) + 32 * 1e-6)


DEFECTS = {defect.__name__: defect for defect in (_local_mean, _missing_reduce, _eps_of_every_process)}


class _Defective(UsersModule):
    """Has a defect from the first step on: set-up compares the split model with the whole one, and would refuse it."""

    def __init__(self, defect):
        super().__init__()
        self.defect = defect
        if defect is _eps_of_every_process:
            torch.nn.init.normal_(self.net.model.embed_tokens.weight, std=0.02)

    def on_train_start(self):
        self.defect(setattr)


def _fit_with_defect(folder, name, on_violation, precision):
    module = _Defective(DEFECTS[name])
    verifier = OnlineRMSNormVerifier(every_n_steps=3, on_violation=on_violation)
    trainer = trainer_for(callbacks=[verifier], default_root_dir=folder, precision=precision)
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()) as printed:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, loader())
            error = None
        except RuntimeError as raised:
            error = str(raised)
    told = [str(warning.message) for warning in caught if "online RMSNorm" in str(warning.message)]
    return trainer.global_step, told, error, printed.getvalue()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["_local_mean", "_missing_reduce"])
def test_a_defect_is_warned_of(name, precision, tmp_path):
    (steps, told, error, printed), (_, others_told, _, _) = run_processes(
        _fit_with_defect, 2, tmp_path, name, "warn", precision
    )
    assert steps == 4
    assert error is None
    assert len(told) == 2
    assert "(step 0, " in told[0]
    assert "must be within tolerance" in told[0]
    assert others_told == []
    assert "4 of 4 norms" in printed
    assert not json.loads((tmp_path / FILE_NAME).read_text())["is_within_tolerance"]


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_stops_all_processes_at_the_same_step(name, tmp_path):
    found = run_processes(_fit_with_defect, 2, tmp_path, name, "stop", "32-true")
    for steps, told, error, _ in found:
        assert steps == 1
        assert told == []
        assert "from the exact norm (step 0, float32, relative, worst token)" in error
    assert ["each at its worst" in printed for *_, printed in found] == [True, False]


class _NoNumber(UsersModule):
    def on_train_start(self):
        torch.nn.init.constant_(self.net.model.layers[1].input_layernorm.weight, float("nan"))


def test_what_is_no_number_is_a_violation_and_null_in_the_file(tmp_path):
    """JSON has no NaN, and its stricter readers none either."""
    run_processes(_fit, 2, tmp_path, _NoNumber())
    found = json.loads((tmp_path / FILE_NAME).read_text(), parse_constant=pytest.fail)
    assert not found["is_within_tolerance"]
    assert [norm["max_relative"] is None for norm in found["norms"]] == [True] * 4
    assert [norm["step"] for norm in found["norms"]] == [2, 2, 0, 0]


# ---- what it says


def _fit_with_logger(folder, log_each_norm):
    logger = CSVLogger(folder, name="run")
    verifier = OnlineRMSNormVerifier(every_n_steps=2, log_each_norm=log_each_norm)
    trainer = trainer_for(logger=logger, callbacks=[verifier], default_root_dir=folder / "elsewhere")
    trainer.fit(UsersModule(), loader())


@pytest.mark.parametrize("log_each_norm", [False, True])
def test_the_worst_norm_is_logged_and_the_file_stands_beside_the_logs(log_each_norm, tmp_path):
    run_processes(_fit_with_logger, 2, tmp_path, log_each_norm)
    folder = tmp_path / "run" / "version_0"
    found = json.loads((folder / FILE_NAME).read_text())
    with (folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["online_rms_norm/max_relative"]]
    assert [row["step"] for row in rows] == ["0", "2"]
    of_each = [f"{norm}/" for norm in NORMS] if log_each_norm else []
    assert {name for name in rows[0] if name.startswith("online_rms_norm/")} == {
        f"online_rms_norm/{norm}{figure}" for norm in ["", *of_each] for figure in FIGURES
    }
    largest = {norm["name"] + "/": norm["max_relative"] for norm in found["norms"]}
    largest[""] = max(largest.values())
    for norm in ["", *of_each]:
        assert max(float(row[f"online_rms_norm/{norm}max_relative"]) for row in rows) == largest[norm]
    assert not (tmp_path / "elsewhere" / FILE_NAME).exists()


def test_who_reads_the_file_meanwhile_reads_a_whole_one(tmp_path):
    path = tmp_path / FILE_NAME
    path.write_text("of an earlier fit")
    with path.open() as reader:
        run_processes(_fit, 2, tmp_path)
        assert reader.read() == "of an earlier fit"
    assert [file.name for file in tmp_path.iterdir()] == [FILE_NAME]


# ---- nothing to verify


def _error_of(module, folder, **options):
    trainer = trainer_for(callbacks=[OnlineRMSNormVerifier()], default_root_dir=folder, **options)
    try:
        trainer.fit(module, loader())
    except (ValueError, RuntimeError) as error:
        return trainer.global_step, str(error)
    return trainer.global_step, None


def _dense_model(folder):
    config = small_config(low_rank={"kind": "full_rank"})
    return _error_of(LowRankLanguageModel(config), folder)


def _no_tensor_axis(folder):
    return _error_of(UsersModule(), folder, strategy=BoostParallelStrategy(1))


def _one_process(folder):
    return _error_of(UsersModule(), folder, strategy="auto", devices=1)


@pytest.mark.parametrize(("run", "world_size"), [(_dense_model, 2), (_no_tensor_axis, 2), (_one_process, 1)])
def test_a_model_without_an_online_norm_is_refused_before_the_first_step(run, world_size, tmp_path):
    for steps, error in run_processes(run, world_size, tmp_path):
        assert steps == 0
        assert "would verify nothing" in error
        assert "tensor_parallel_size of at least 2" in error


def _no_step(folder):
    return _error_of(UsersModule(), folder, max_steps=0)


def test_a_fit_without_a_step_is_told_of(tmp_path):
    for _, error in run_processes(_no_step, 2, tmp_path):
        assert "verified nothing up to step 0" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": 0}, r"every_n_steps \(0\) must be a whole number of at least 1"),
        ({"tolerance": 0.0}, r"tolerance \(0.0\) must be above 0"),
        ({"on_violation": "raise"}, r"on_violation \('raise'\) must be 'warn' or 'stop'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        OnlineRMSNormVerifier(**options)
