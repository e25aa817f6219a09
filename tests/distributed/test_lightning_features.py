"""Features of Lightning: each trains as on one process without this package, or is refused in a sentence.

The page docs/lightning_features.md has a row for each.
"""

import contextlib
import io
import logging
import re
import warnings

import pytest
import torch
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.tuner import Tuner

from lightning_boost import BoostParallelStrategy
from lightning_boost.strategy import boost
from tests import lightning_features  # noqa: F401 - registers the features
from tests.feature_run import FEATURES, LAYOUTS, ON_REPLICAS, ONE, ONLY_REPLICAS, PAGE, REPLICATE, SHARD, TENSOR, Run
from tests.models import whole
from tests.processes import run_processes
from tests.users_module import UsersModule, loader, trainer_for

TOLERANCE = 1e-5


def _run_all(layout, folder, names, plant=None):
    """Run features one after the other; an error is a result, the same on every process."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if plant is not None:
        plant()
    results = {}
    for name in names:
        run = Run(layout, folder / re.sub(r"\W+", "_", name))
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                numbers = FEATURES[name](run) or {}
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
        else:
            weights = {key: whole(value).clone().numpy() for key, value in run.module.named_parameters()}
            results[name] = weights, numbers
    return results


def _names(layout):
    names = set(FEATURES) if layout == ONE else ON_REPLICAS if layout != TENSOR else set(FEATURES) - ONLY_REPLICAS
    return [name for name in FEATURES if name in names]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What every feature gives on every layout."""
    folder = tmp_path_factory.mktemp("features")
    return {
        layout: run_processes(_run_all, size, layout, folder, _names(layout), timeout=400)
        for layout, size in LAYOUTS.items()
    }


def difference(found, expected):
    """Say what two results differ in, most of all; nothing if they agree."""
    if isinstance(found, str) or isinstance(expected, str):
        return str((found, expected))
    (weights, numbers), (expected_weights, expected_numbers) = found, expected
    assert weights.keys() == expected_weights.keys()
    worst = max(abs(weights[name] - expected_weights[name]).max() for name in weights)
    if not worst < TOLERANCE:
        return f"a weight is off by {worst:.0e}"
    if numbers != pytest.approx(expected_numbers, rel=1e-4) if _are_numbers(numbers) else numbers != expected_numbers:
        return f"{numbers}, and not {expected_numbers}"
    return ""


def _are_numbers(values):
    return all(isinstance(value, int | float) for value in values.values())


@pytest.mark.parametrize(
    ("layout", "name"), [(layout, name) for layout in LAYOUTS if layout != ONE for name in _names(layout)]
)
def test_it_trains_as_on_one_process(results, layout, name):
    (expected,) = results[ONE]
    for process in results[layout]:
        assert not difference(process[name], expected[name])


# ---- that the comparison can fail


def _unsynchronised():
    boost.set_gradient_sync = lambda root, enabled: None
    spread_over_mesh = boost.spread_over_mesh

    def without(module, decoder, *args):
        spread_over_mesh(module, decoder, *args)
        decoder.root.set_requires_gradient_sync(False)

    boost.spread_over_mesh = without


def _clipped_by_shares():
    boost.clip_gradients_by_norm = lambda parameters, limit: torch.nn.utils.clip_grad_norm_(
        [each.grad.to_local() for each in parameters], limit
    )


def _not_restored():
    boost.BoostParallelStrategy.load_checkpoint = lambda self, *_, **__: torch.load(self.broadcast(_[0]) / "meta.pt")


@pytest.mark.parametrize(
    ("plant", "layout", "name"),
    [
        (_unsynchronised, REPLICATE, "manual optimisation"),
        (_unsynchronised, SHARD, "`accumulate_grad_batches`"),
        (_clipped_by_shares, TENSOR, "`gradient_clip_val` by norm"),
        (_not_restored, TENSOR, "`LearningRateFinder`, `Tuner.lr_find`"),
    ],
)
def test_a_planted_defect_is_seen(tmp_path, plant, layout, name):
    (expected,) = run_processes(_run_all, 1, ONE, tmp_path, [name])
    found = run_processes(_run_all, 2, layout, tmp_path, [name], plant)
    assert any(difference(process[name], expected[name]) for process in found)


# ---- what is refused


def _error_before_start(monkeypatch, options):
    def started(*_):
        raise AssertionError("a process was started")

    monkeypatch.setattr(boost.CheckedLauncher, "_call_children_scripts", started)
    monkeypatch.setattr(boost.BoostParallelStrategy, "_setup_distributed", started)
    with pytest.raises(ValueError, match="strategy|must be False") as error:
        trainer_for(devices=2, **options).fit(UsersModule(), [])
    return str(error.value)


def _callback(name, **arguments):
    return {"callbacks": [getattr(lightning_callbacks, name)(**arguments)]}


REFUSED = {
    "`WeightAveraging`, `EMAWeightAveraging`": [
        (_callback("WeightAveraging"), "callback WeightAveraging does not work with strategy 'boost' on 2 processes"),
        (_callback("EMAWeightAveraging"), "Keep an average of your own, as docs/lightning_features.md shows."),
    ],
    "`StochasticWeightAveraging`": [(_callback("StochasticWeightAveraging", swa_lrs=0.1), "it copies the module")],
    "`ModelPruning`": [(_callback("ModelPruning", pruning_fn="l1_unstructured"), "Prune on one process")],
    "`BackboneFinetuning`": [(_callback("BackboneFinetuning"), "Freeze in configure_optimizers")],
    "`BatchSizeFinder`, `Tuner.scale_batch_size`": [(_callback("BatchSizeFinder"), "Find batch_size on one.")],
    "`OnExceptionCheckpoint`": [
        (
            {**_callback("OnExceptionCheckpoint", dirpath="unused"), "enable_checkpointing": True},
            "saving takes all processes, and an exception may be that of one",
        )
    ],
    "`ModelCheckpoint(save_on_exception=True)`": [
        (
            {**_callback("ModelCheckpoint", save_on_exception=True), "enable_checkpointing": True},
            "save_on_exception (True) of ModelCheckpoint must be False with 2 processes: saving takes all processes",
        )
    ],
    "`detect_anomaly`": [
        ({"detect_anomaly": True}, "detect_anomaly (True) must be False with tensor_parallel_size (2) above 1")
    ],
}
OPTIMIZERS = {
    "LBFGS": "computes with whole parameters where each process has a share",
    "Adafactor": "computes with whole parameters where each process has a share",
    "Rprop": "takes operations that torch does not have for DTensors",
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_before_a_process_starts(monkeypatch, name):
    for options, sentence in REFUSED[name]:
        assert sentence in _error_before_start(monkeypatch, options)


def test_a_tuner_s_search_for_a_batch_size_is_refused_by_lightning():
    with pytest.raises(ValueError, match="batch size is currently not supported with distributed strategies"):
        Tuner(trainer_for(devices=2)).scale_batch_size(UsersModule(), [])


def _steps_of(optimizer, tensor, data_axis):
    class Module(UsersModule):
        def configure_optimizers(self):
            return getattr(torch.optim, optimizer)(self.parameters())

    trainer = trainer_for(max_steps=1, strategy=BoostParallelStrategy(tensor, data_axis=data_axis))
    try:
        trainer.fit(Module(), loader())
    except ValueError as error:
        return str(error)
    return trainer.global_step


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_that_fails_on_shares_is_refused_where_there_are_some(optimizer):
    for tensor, data_axis in ((2, "replicate"), (1, "shard")):
        for error in run_processes(_steps_of, 2, optimizer, tensor, data_axis):
            assert f"configure_optimizers returned {optimizer}, which {OPTIMIZERS[optimizer]}. Return" in error
    assert run_processes(_steps_of, 2, optimizer, 1, "replicate") == [1, 1]


def _average_on_meta():
    module = UsersModule(meta=True)
    module.configure_model()
    try:
        trainer_for(callbacks=[lightning_callbacks.EMAWeightAveraging()]).fit(module, loader())
    except ValueError as error:
        return str(error)
    return ""


def test_an_average_of_parameters_without_values_is_refused():
    error = run_processes(_average_on_meta, 1)[0]
    assert "for a module on the meta device: it copies the module before that is spread over processes or" in error


def _saved_elsewhere():
    trainer = trainer_for(max_steps=1)
    trainer.fit(UsersModule(), loader())
    try:
        trainer.save_checkpoint("memory://a.ckpt")
    except ValueError as error:
        return str(error)
    return ""


def test_a_checkpoint_on_another_file_system_is_refused_on_one_process_too():
    error = run_processes(_saved_elsewhere, 1)[0]
    assert error.startswith("checkpoint path (memory://a.ckpt) must be a path of this machine's file system")


# ---- the page


def _rows():
    """Give the status of each row of the page's tables."""
    return dict(re.findall(r"^\| (.+?) \| (works|refused|on replicas) \|", PAGE.read_text(), re.MULTILINE))


def test_the_page_names_what_is_tested():
    rows = _rows()
    expected = dict.fromkeys(FEATURES, "works") | dict.fromkeys(REFUSED, "refused")
    expected |= {", ".join(f"`{name}`" for name in OPTIMIZERS): "refused"} | dict.fromkeys(ONLY_REPLICAS, "on replicas")
    assert rows == expected
