import importlib
import importlib.metadata
import sys
import types

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import StrategyRegistry

import lightning_boost
from lightning_boost import BoostParallelStrategy
from lightning_boost.strategy import boost
from lightning_boost.strategy.other_namespace import refuse_other_namespace
from tests.models import small_config


def test_importing_registers_the_strategy():
    assert isinstance(StrategyRegistry.get("boost"), BoostParallelStrategy)


def test_a_namesake_is_told_of(monkeypatch):
    monkeypatch.setattr(lightning_boost, "distribution", lambda name: types.SimpleNamespace(version="1.2"))
    with pytest.warns(UserWarning, match=r"lightning-boost 1\.2 is installed beside this one"):
        lightning_boost._warn_of_namesake()


def test_no_namesake_no_word(recwarn):
    lightning_boost._warn_of_namesake()
    assert not recwarn.list


OTHER_NAMESPACE = """
registered = {}

class StrategyRegistry:
    @staticmethod
    def register(name, factory, **_):
        registered[name] = factory
"""


@pytest.mark.parametrize("imported_first", [True, False])
def test_the_trainer_of_the_other_namespace_gets_a_sentence(monkeypatch, tmp_path, imported_first):
    package = tmp_path / "pytorch_lightning"
    (package / "strategies").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "strategies" / "__init__.py").write_text(OTHER_NAMESPACE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if "other_namespace" not in repr(finder)])
    for name in ("pytorch_lightning", "pytorch_lightning.strategies"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if imported_first:
        importlib.import_module("pytorch_lightning.strategies")
    refuse_other_namespace()
    strategies = importlib.import_module("pytorch_lightning.strategies")
    with pytest.raises(ValueError, match=r"import lightning.pytorch as pl"):
        strategies.registered["boost"]()


def test_versions_that_are_known_to_do_harm_are_out_of_range():
    """known_failures A01."""
    requirement = next(
        line for line in importlib.metadata.requires("lightning-boost-parallel") if line[:9] == "lightning"
    )
    assert ">=2.6.6" in requirement
    assert "<2.7" in requirement


def _module():
    return lightning_boost.LowRankLanguageModel(small_config())


def _trainer(**options):
    defaults = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(**{**defaults, **options})


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ({"tensor_parallel_size": 2}, {"devices": 3}, r"tensor_parallel_size \(2\) must divide .*\(3"),
        (
            {"tensor_parallel_size": 2, "data_parallel_size": 2},
            {"devices": 2},
            r"data_parallel_size \(2\) × tensor_parallel_size \(2\) = 4 must equal .*\(2",
        ),
        ({"tensor_parallel_size": 3}, {"devices": 3}, r"num_attention_heads \(8\) .*legal sizes: 1, 2, 4, 8"),
        ({"data_axis": "hybrid"}, {"devices": 2}, r"data_axis \('hybrid'\) must be 'shard' or 'replicate' on one node"),
        (
            {"data_axis": "hybrid", "tensor_parallel_size": 1, "pipeline_parallel_size": 2},
            {"devices": 2, "num_nodes": 3},
            r"data_axis \('hybrid'\) must be 'shard' or 'replicate' with data_parallel_size \(3\) .*on nodes of 2",
        ),
        (
            {},
            {"devices": 2, "precision": "16-true"},
            r"precision \('16-true'\) must be one of 32-true.*: the range of fp16",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_a_process_starts(monkeypatch, strategy, options, message):
    """known_failures A79, A88."""

    def started(*_):
        raise AssertionError("a process was started")

    monkeypatch.setattr(boost.CheckedLauncher, "_call_children_scripts", started)
    monkeypatch.setattr(BoostParallelStrategy, "_setup_distributed", started)
    with pytest.raises(ValueError, match=message):
        _trainer(strategy=BoostParallelStrategy(**strategy), **options).fit(_module(), [])


@pytest.mark.parametrize("devices", [1, 2])
def test_another_precision_is_refused_with_those_there_are(devices):
    message = r"^precision \('64-true'\) must be one of 32-true, bf16-true, bf16-mixed with strategy 'boost'\.$"
    with pytest.raises(ValueError, match=message):
        _trainer(strategy="boost", devices=devices, precision="64-true").fit(_module(), [])


def test_nothing_to_swap_is_refused_before_a_process_starts(monkeypatch):
    def started(*_):
        raise AssertionError("a process was started")

    monkeypatch.setattr(BoostParallelStrategy, "_setup_distributed", started)

    class Module(pl.LightningModule):
        def training_step(self, batch, batch_idx): ...

        def configure_optimizers(self): ...

    with pytest.raises(ValueError, match="Module holds no decoder that strategy 'boost' can swap"):
        _trainer(strategy="boost", devices=1).fit(Module(), [])


def test_a_notebook_with_more_than_one_process_gets_the_reason(monkeypatch):
    monkeypatch.setattr(boost, "IS_INTERACTIVE", True)
    with pytest.raises(ValueError, match=r"devices \(2\) must be 1 in a notebook: .*\.py file"):
        _trainer(strategy="boost", devices=2)
    _trainer(strategy="boost", devices=1)


def test_an_unknown_data_axis_is_refused_at_construction():
    with pytest.raises(ValueError, match=r"data_axis \('fsdp'\) must be one of 'replicate', 'shard', 'hybrid'"):
        BoostParallelStrategy(data_axis="fsdp")


def test_a_size_below_one_is_refused_at_construction():
    with pytest.raises(ValueError, match=r"tensor_parallel_size \(0\) must be a whole number"):
        BoostParallelStrategy(0)
