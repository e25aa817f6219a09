"""Tokens and operations per second, by a clock that only moves where the run is told to take time."""

import re
import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from lightning_boost import BoostParallelStrategy, LowRankLanguageModel
from lightning_boost.callbacks import token_throughput
from lightning_boost.callbacks.peak_flops import CARDS, peak_flops_of
from lightning_boost.callbacks.token_throughput import TokenThroughput
from lightning_boost.cost import recompute_flops, training_flops
from lightning_boost.pipeline_parallel.options import PipelineOptions
from tests.models import small_config
from tests.processes import run_processes

FETCHING, STEPPING, VALIDATING, SAVING = 3.0, 1.0, 1000.0, 5000.0
TOKENS = 8


class _Clock:
    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


class _Slow(Dataset):
    """Rows that take time to get, one batch each."""

    def __init__(self, clock):
        self.clock = clock

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.clock.now += FETCHING
        return {"input_ids": torch.zeros(TOKENS, dtype=torch.long)}


class _Module(pl.LightningModule):
    def __init__(self, clock):
        super().__init__()
        self.clock, self.weight, self.rates = clock, torch.nn.Parameter(torch.ones(1)), []

    def training_step(self, batch, batch_idx):
        self.clock.now += STEPPING
        return self.weight.square().sum()

    def validation_step(self, batch, batch_idx):
        self.clock.now += VALIDATING

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Rates(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        rate = trainer.callback_metrics.get("tokens_per_second")
        pl_module.rates.append(None if rate is None else rate.item())

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        pl_module.clock.now += SAVING


def _rates(monkeypatch, tmp_path, num_runs=1, **options):
    warnings.filterwarnings("ignore")
    clock = _Clock()
    monkeypatch.setattr(token_throughput, "time", clock)
    module = _Module(clock)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[TokenThroughput(window=1, warmup_steps=1), _Rates(), *options.pop("callbacks", [])],
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    for run in range(num_runs):
        trainer.fit_loop.max_epochs = run + 1
        trainer.fit(module, DataLoader(_Slow(clock)), DataLoader(_Slow(clock), batch_size=8))
    return module.rates


def test_waiting_for_data_counts(monkeypatch, tmp_path):
    rates = _rates(monkeypatch, tmp_path, enable_checkpointing=False)
    assert rates == [None] + [pytest.approx(TOKENS / (FETCHING + STEPPING))] * 7


def test_validation_and_checkpoints_do_not_count(monkeypatch, tmp_path):
    saving = pl.callbacks.ModelCheckpoint(every_n_train_steps=3, save_top_k=-1)
    rates = _rates(monkeypatch, tmp_path, val_check_interval=2, callbacks=[saving])
    whole, alone = TOKENS / (FETCHING + STEPPING), TOKENS / STEPPING
    # validated after the second, fourth and sixth step, saved after the third and sixth
    assert rates == [None, *map(pytest.approx, [whole, alone, alone, alone, whole, alone, whole])]


def test_each_run_warms_up(monkeypatch, tmp_path):
    """What an earlier run took does not count in the next one."""
    rates = _rates(monkeypatch, tmp_path, num_runs=2, enable_checkpointing=False, limit_val_batches=0)
    assert rates == ([None] + [pytest.approx(TOKENS / (FETCHING + STEPPING))] * 7) * 2


class _Language(LowRankLanguageModel):
    """Takes no time but the clock's."""

    def __init__(self, clock, config):
        super().__init__(config, max_steps=8)
        self.clock, self.rates = clock, []

    def training_step(self, batch, batch_idx):
        self.clock.now += STEPPING
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        pass


class _Rows(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        tokens = torch.arange(TOKENS)
        return {"input_ids": tokens, "labels": tokens}


def _metrics(monkeypatch, tmp_path, module, throughput, **options):
    warnings.filterwarnings("ignore")
    monkeypatch.setattr(token_throughput, "time", module.clock)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[throughput],
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"devices": 1, **options},
    )
    trainer.fit(module, DataLoader(_Rows(), batch_size=2))
    return trainer.callback_metrics


def _mfu(tmp_path, kind, recompute, strategy):
    module = _Language(_Clock(), small_config(low_rank={"kind": kind}))
    throughput = TokenThroughput(window=1, warmup_steps=1, peak_flops=1e9)
    options = {"strategy": BoostParallelStrategy(recompute=recompute, **strategy), "use_distributed_sampler": False}
    with pytest.MonkeyPatch.context() as patch:
        metrics = _metrics(patch, tmp_path, module, throughput, devices=dist.get_world_size(), **options)
    return {name: value.item() for name, value in metrics.items()}


AXES = {
    "one process": (1, {}),
    "tensor": (2, {"tensor_parallel_size": 2}),
    "data": (2, {"tensor_parallel_size": 1, "data_parallel_size": 2}),
    "pipeline": (2, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "num_microbatches": 2}),
}


@pytest.mark.parametrize(
    ("kind", "recompute", "axis"),
    [
        *(("cola", recompute, "one process") for recompute in ("none", "block", "low_rank")),
        ("full_rank", "block", "one process"),
        *(("cola", "low_rank", axis) for axis in ("tensor", "data", "pipeline")),
    ],
)
def test_mfu_is_that_of_the_models_own_operations(kind, recompute, axis, tmp_path):
    config, (world_size, strategy) = small_config(low_rank={"kind": kind}), AXES[axis]
    replicas = strategy.get("data_parallel_size", 1)
    per_second = 2 * TOKENS * replicas / STEPPING
    flops = training_flops(config, TOKENS)
    again = recompute_flops(config, TOKENS, kind=recompute, layers=[0, 1])
    for metrics in run_processes(_mfu, world_size, tmp_path, kind, recompute, strategy):
        assert metrics["tokens_per_second"] == pytest.approx(per_second)
        assert metrics["mfu"] == pytest.approx(per_second * flops / (world_size * 1e9))
        assert metrics["hfu"] == pytest.approx(per_second * (flops + again) / (world_size * 1e9))
        assert (again > 0) == (recompute != "none")
        # two stages and two micro-batches
        assert metrics.get("pipeline_bubble_formula") == (pytest.approx(1 / 3) if axis == "pipeline" else None)


def test_a_cpu_has_no_peak_but_what_is_given_and_its_memory_is_the_processs(monkeypatch, tmp_path):
    module = _Language(_Clock(), small_config())
    metrics = _metrics(monkeypatch, tmp_path, module, TokenThroughput(window=1))
    assert "mfu" not in metrics
    assert "hfu" not in metrics
    assert "peak_memory_gib" not in metrics
    assert "pipeline_bubble_formula" not in metrics
    # this process holds torch, and not the machine
    assert 0.05 < metrics["peak_resident_gib"].item() < 100


class _Tuples(_Rows):
    def __getitem__(self, index):
        return torch.arange(TOKENS), torch.arange(TOKENS)


def test_a_batch_without_input_ids_is_an_error_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(f"{__name__}._Rows", _Tuples)
    with pytest.raises(TypeError, match=r"'input_ids'; this batch \(list\) has none"):
        _metrics(monkeypatch, tmp_path, _Module(_Clock()), TokenThroughput())


def test_a_model_of_another_kind_is_told_of_in_one_sentence(monkeypatch, tmp_path, caplog):
    with caplog.at_level("INFO"):
        metrics = _metrics(monkeypatch, tmp_path, _Module(_Clock()), TokenThroughput(window=1, peak_flops=1e12))
    assert "mfu" not in metrics
    assert "tokens_per_second" in metrics
    assert caplog.text.count("TokenThroughput leaves MFU out") == 1


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GH200 480GB", 990e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A40", 149.7e12),
        ("NVIDIA GB200", None),
        ("NVIDIA H800", None),
        ("NVIDIA A10G", None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("GRID A100-20C", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_a_cards_peak_is_known_by_its_name(name, peak):
    assert peak_flops_of(name) == peak


@pytest.mark.parametrize("card", CARDS, ids=lambda card: " ".join(card.words))
def test_peaks_are_half_of_what_data_sheets_give_with_sparsity(card):
    """Some round both, and the L40S's are 362.05 and 733."""
    (figure,) = re.findall(r" ([\d,.]+) with sparsity$", card.data_sheet)
    assert card.peak_flops == pytest.approx(float(figure.replace(",", "")) * 1e12 / 2, rel=0.013)


class _OnCard(_Language):
    device = torch.device("cuda")


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("NVIDIA X1", None, 1),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None, 1),
        ("NVIDIA A100-SXM4-80GB", None, 0),
        ("NVIDIA X1", 1e12, 0),
    ],
)
def test_a_card_that_is_not_in_the_table_is_told_of_with_the_way_out(name, given, said, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    throughput = TokenThroughput(peak_flops=given)
    with caplog.at_level("INFO"):
        throughput.on_train_start(pl.Trainer(accelerator="cpu", logger=False), _OnCard(_Clock(), small_config()))
    assert caplog.text.count(f"does not know the peak of {name!r}. Give peak_flops") == said


def test_the_bubble_is_that_of_the_schedule():
    assert PipelineOptions().bubble_share(8, 4) == pytest.approx(3 / 11)
    interleaved = PipelineOptions(schedule="interleaved_1f1b", virtual_stages=2)
    assert interleaved.bubble_share(8, 4) == pytest.approx(3 / 19)


@pytest.mark.parametrize(("option", "value"), [("window", 0), ("warmup_steps", -1), ("peak_flops", 0.0)])
def test_wrong_options_are_refused(option, value):
    with pytest.raises(ValueError, match=rf"{option} \({value}\) must be"):
        TokenThroughput(**{option: value})
