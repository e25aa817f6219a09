"""The profiler of communication in training: what it counts, on which axis, and what it leaves alone."""

import contextlib
import io
import json
import warnings
from collections import Counter

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.distributed import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_boost import BoostParallelStrategy, LowRankLanguageModel, collectives, communication_trace
from lightning_boost.callbacks.communication_profiler import REPORT_NAME, TRACE_NAME, CommunicationProfiler
from lightning_boost.collectives import Label, all_reduce, register_group
from lightning_boost.mesh import TENSOR_AXIS
from tests.models import masked_batch, small_config
from tests.processes import run_processes
from tests.users_module import UsersModule, loader, trainer_for

ROWS, TOKENS = 4, 12


def _data(config, num_batches=4, rows=ROWS):
    batch = masked_batch(config.vocab_size, rows=rows * num_batches, tokens=TOKENS)
    samples = [{name: tensor[row] for name, tensor in batch.items()} for row in range(rows * num_batches)]
    return DataLoader(samples, batch_size=rows)


def _fit(folder, module, train, validation=None, *, strategy=None, every_n_steps=2, callbacks=(), **options):
    """Train, and return the profiler's file and what this process printed and warned of."""
    torch.manual_seed(0)
    trainer = trainer_for(
        strategy=BoostParallelStrategy(**strategy or {"tensor_parallel_size": dist.get_world_size()}),
        callbacks=[CommunicationProfiler(every_n_steps=every_n_steps), *callbacks],
        default_root_dir=folder,
        **options,
    )
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()) as printed:
        warnings.simplefilter("always")
        trainer.fit(module, train, validation)
    told = [str(warning.message) for warning in caught if "the formula says" in str(warning.message)]
    dist.barrier()
    return json.loads((folder / REPORT_NAME).read_text(), parse_constant=_refuse), printed.getvalue(), told


def _refuse(constant):
    raise ValueError(f"{constant} is no JSON")


def _figures(report, process, name="bytes"):
    """Return what a process has counted, by axis, pass, chunk and operation."""
    rows = report["processes"][process]["rows"]
    return {(row["axis"], row["pass"], row["chunk"], row["operation"]): row[name] for row in rows}


# ---- the tensor axis beside the formula


def _language_model(folder, changes, strategy, options):
    config = small_config(**changes)
    return _fit(folder, LowRankLanguageModel(config), _data(config), _data(config, 1), strategy=strategy, **options)


CASES = {
    "accumulation, epochs, bf16-mixed": (
        2,
        {},
        {},
        {"accumulate_grad_batches": 2, "max_epochs": 2, "precision": "bf16-mixed"},
    ),
    "block recompute, tied": (2, {"tie_word_embeddings": True}, {"recompute": "block", "recompute_every": 2}, {}),
    "low-rank recompute, one key/value head": (
        2,
        {"num_key_value_heads": 1, "low_rank": {"bottleneck_size": 8}},
        {"recompute": "low_rank"},
        {"gradient_clip_val": 1.0},
    ),
    "full rank": (2, {"low_rank": {"kind": "full_rank"}}, {}, {}),
    "pipeline": (4, {"num_hidden_layers": 3}, {"pipeline_parallel_size": 2, "recompute": "block"}, {}),
    "replicas that share": (4, {}, {"data_parallel_size": 2, "data_axis": "shard"}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_all_processes_count_what_the_formula_says(case, tmp_path):
    world_size, changes, strategy, options = CASES[case]
    strategy = {"tensor_parallel_size": 2, **strategy}
    (report, text, told), *others = run_processes(_language_model, world_size, tmp_path, changes, strategy, options)
    assert report["is_as_formula"] is True
    assert told == []
    assert report["num_batches"] == 4 * options.get("max_epochs", 1)
    assert report["num_steps"] == report["num_batches"] / options.get("accumulate_grad_batches", 1)
    assert report["sampled_steps"] == list(range(1, report["num_steps"], 2))
    assert len(report["processes"]) == world_size
    chunks = Counter()
    for process in report["processes"]:
        compared = [row for row in process["rows"] if row["is_as_formula"] is not None]
        assert all(row["launches"] > 0 for row in compared)
        chunks.update({row["chunk"] for row in compared})
        times = [row for row in process["rows"] if row["axis"] == "tensor"]
        assert all(0 <= row["waiting_ms"] <= row["blocked_ms"] <= row["in_flight_ms"] for row in times)
        assert sum(row["share_of_step"] for row in process["rows"]) < 1
    assert {"qkv", "o", "gate_up", "down", "head", "loss"} <= chunks.keys()
    assert chunks["head"] == chunks["loss"] == (2 if case == "pipeline" else world_size)
    assert text.count("communication of a step") == 1
    assert all(not printed for _, printed, _ in others)


def test_validation_is_not_counted(tmp_path):
    """known figures: four and four collectives a layer, one for the head, one for the loss."""
    options = {"val_check_interval": 1, "num_sanity_val_steps": 2}
    (report, *_), _ = run_processes(_language_model, 2, tmp_path, {}, {"tensor_parallel_size": 2}, options)
    launches = _figures(report, 1, "launches")
    layers = [count for key, count in launches.items() if key[2] in ("qkv", "o", "gate_up", "down")]
    assert layers == [2] * 8
    assert launches["tensor", "forward", "loss", "all_gather"] == 1


class _OneMore(LowRankLanguageModel):
    """Issues a collective that is in no formula."""

    def __init__(self, config, chunk):
        super().__init__(config)
        self.chunk = chunk

    def training_step(self, batch, batch_idx):
        group = register_group(self.device_mesh[TENSOR_AXIS].get_group())
        if batch_idx == 2:
            all_reduce(torch.ones(3), group, Label(self.chunk, "forward"))
        return super().training_step(batch, batch_idx)


def _with_one_more(folder, chunk):
    config = small_config()
    return _fit(folder, _OneMore(config, chunk), _data(config))


@pytest.mark.parametrize("chunk", ["o", "of a kind not known"])
def test_one_collective_more_than_the_formula_is_flagged(chunk, tmp_path):
    (report, text, told), (_, _, others_told) = run_processes(_with_one_more, 2, tmp_path, chunk)
    assert report["is_as_formula"] is False
    flagged = [row for row in report["processes"][1]["rows"] if row["is_as_formula"] is False]
    (row,) = flagged
    assert (row["chunk"], row["launches"]) == (chunk, 2.25 if chunk == "o" else 0.25)
    assert len(told) == 1
    assert f"up to step 2: all_reduce of {chunk}, forward" in told[0]
    assert others_told == []
    assert "something else than the formula says" in text


def _users_module(folder):
    return _fit(folder, UsersModule(), loader())


def test_a_users_own_model_has_no_formula(tmp_path):
    (report, text, told), _ = run_processes(_users_module, 2, tmp_path)
    assert report["is_as_formula"] is None
    assert "has no LlamaForCausalLM" in report["no_formula_because"]
    assert told == []
    assert "no formula" in text
    assert _figures(report, 0, "launches")["tensor", "forward", "qkv", "all_reduce"] == 2


# ---- other axes, against closed forms


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_borders_between_stages_are_counted_exactly(schedule, tmp_path):
    virtual_stages = 2 if schedule == "interleaved_1f1b" else 1
    strategy = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 2,
        "num_microbatches": 4,
        "pipeline_schedule": schedule,
        "virtual_stages": virtual_stages,
    }
    (report, *_), _ = run_processes(_language_model, 2, tmp_path, {"num_hidden_layers": 4}, strategy, {})
    hidden_state = ROWS * TOKENS * 64 * 4
    for process in (0, 1):
        found = {key[1:]: count for key, count in _figures(report, process).items() if key[3] in ("send", "recv")}
        # each process ends a stage that sends on, except the last
        out, back = (virtual_stages - (process == 1), virtual_stages - (process == 0))
        expected = {
            ("forward", "activations", "send"): out * hidden_state,
            ("forward", "activations", "recv"): back * hidden_state,
            ("backward", "gradients", "send"): back * hidden_state,
            ("backward", "gradients", "recv"): out * hidden_state,
        }
        assert found == {key: count for key, count in expected.items() if count}


def _sharded(folder, data_axis, options):
    config = small_config()
    module = LowRankLanguageModel(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    strategy = {"tensor_parallel_size": 1, "data_parallel_size": 2, "data_axis": data_axis}
    return *_fit(folder, module, _data(config), strategy=strategy, **options), shapes


@pytest.mark.parametrize("accumulate", [1, 2])
def test_shards_on_the_data_axis_are_counted_exactly(accumulate, tmp_path):
    """Each parameter is shared out by its first dim, padded: gathered twice in layers and once outside."""
    options = {"accumulate_grad_batches": accumulate}
    (report, _, _, shapes), _ = run_processes(_sharded, 2, tmp_path, "shard", options)
    shares = {name: -(-shape[0] // 2) * torch.Size(shape[1:]).numel() * 4 for name, shape in shapes.items()}
    in_layers = sum(count for name, count in shares.items() if ".layers." in name)
    everywhere = sum(shares.values())
    for process in (0, 1):
        found = {key[1:]: count for key, count in _figures(report, process).items() if key[2] != "scalars"}
        found.pop(("step", "gradient_norm", "all_reduce"))
        assert found == {
            ("forward", "parameters", "all_gather"): accumulate * everywhere,
            ("backward", "parameters", "all_gather"): accumulate * in_layers,
            ("backward", "gradients", "reduce_scatter"): 2 * everywhere,
        }


def test_gradients_of_replicas_are_counted_exactly(tmp_path):
    (report, _, _, shapes), _ = run_processes(_sharded, 2, tmp_path, "replicate", {})
    everywhere = sum(torch.Size(shape).numel() * 4 for shape in shapes.values())
    for process in (0, 1):
        found = {key[1:]: count for key, count in _figures(report, process).items() if key[2] == "gradients"}
        assert found == {("backward", "gradients", "all_reduce"): everywhere}


# ---- the trace


def test_the_trace_has_a_track_for_each_process_and_axis(tmp_path):
    strategy = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    ((report, *_), *_) = run_processes(_language_model, 4, tmp_path, {}, strategy, {})
    trace = json.loads((tmp_path / TRACE_NAME).read_text(), parse_constant=_refuse)
    events = trace["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names[3] == "process 3 (tensor 1, pipeline 0, data 1)"
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], tracks[event["pid"], event["tid"]]) for event in spans} >= {
        (process, axis) for process in range(4) for axis in ("step", "tensor", "data")
    }
    for place in tracks:
        own = sorted((event for event in spans if (event["pid"], event["tid"]) == place), key=lambda event: event["ts"])
        ends = [event["ts"] + event["dur"] for event in own]
        # microseconds are rounded
        assert all(end <= event["ts"] + 0.5 for end, event in zip(ends, own[1:], strict=False))
        assert all(event["dur"] >= 0 for event in own)
    begun, ended = (Counter((e["pid"], e["id"]) for e in events if e["ph"] == kind) for kind in ("b", "e"))
    assert begun == ended
    launches = sum(count for process in range(4) for count in _figures(report, process, "launches").values())
    assert len([event for event in spans if event["cat"] != "step"]) == launches * len(report["sampled_steps"])


# ---- what it leaves alone


class _Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.num_seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_seen += 1
        return func(*args, **(kwargs or {}))


class _Watch(pl.Callback):
    """Counts the operations of each step, from one start of a batch to the next."""

    def __init__(self):
        self.steps, self._watch = [], contextlib.ExitStack()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.finish()
        self._operations = self._watch.enter_context(_Operations())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._watch.close()
        self.steps.append(self._operations.num_seen)

    def finish(self):
        self._watch.close()


class _CountingClock(communication_trace.HostClock):
    stamps = Counter()
    step = 0

    def stamp(self):
        self.stamps[self.step] += 1
        return super().stamp()


class _Noting(LowRankLanguageModel):
    def training_step(self, batch, batch_idx):
        _CountingClock.step = batch_idx
        loss = super().training_step(batch, batch_idx)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


def _steps(folder, is_profiled):
    communication_trace.HostClock = _CountingClock
    config, watch = small_config(attention_dropout=0.1), _Watch()
    callbacks = [watch, CommunicationProfiler(every_n_steps=2)] if is_profiled else [watch]
    module = _Noting(config)
    torch.manual_seed(0)
    trainer_for(callbacks=callbacks, default_root_dir=folder).fit(module, _data(config, 5))
    return watch.steps, module.losses, dict(_CountingClock.stamps)


def test_steps_between_take_no_time_stamp_and_no_operation_and_losses_are_the_same(tmp_path):
    plain, profiled = (run_processes(_steps, 2, tmp_path, is_profiled) for is_profiled in (False, True))
    for (operations, losses, _), (more_operations, same_losses, stamps) in zip(plain, profiled, strict=True):
        assert same_losses == losses
        assert stamps.keys() == {1, 3}
        # the first makes the optimizer's states
        assert [more_operations[step] for step in (0, 2, 4)] == [operations[step] for step in (0, 2, 4)]


class _Skipping(LowRankLanguageModel):
    """Ends its first epoch in the middle of a step that is sampled."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.current_epoch == 0 and batch_idx == 3 else None

    def on_train_epoch_end(self):
        assert not collectives._open_logs


def _skip(folder):
    config = small_config()
    options = {"accumulate_grad_batches": 2, "max_epochs": 2}
    return _fit(folder, _Skipping(config), _data(config), _data(config), **options)


def test_a_skipped_batch_leaves_nothing_open(tmp_path):
    for report, *_ in run_processes(_skip, 2, tmp_path):
        assert report["is_as_formula"] is True
        assert report["num_batches"] == 3 + 4
        assert report["sampled_steps"] == [1]


class _Failing(LowRankLanguageModel):
    def on_after_backward(self):
        if self.trainer.global_step == 1:
            raise RuntimeError("planted")


def _fail_and_go_on(folder):
    config = small_config()
    plain_wait = Work.wait
    module, profiler = _Failing(config), CommunicationProfiler(every_n_steps=1)
    trainer = trainer_for(callbacks=[profiler], default_root_dir=folder)
    with contextlib.suppress(RuntimeError):
        trainer.fit(module, _data(config))
    is_closed = not collectives._open_logs and collectives._recorder is None and Work.wait is plain_wait
    hooks = sum(len(inner._forward_hooks) for inner in module.modules() if type(inner).__name__ == "LlamaForCausalLM")
    return is_closed, hooks


def test_an_exception_leaves_nothing_open(tmp_path):
    for is_closed, hooks in run_processes(_fail_and_go_on, 2, tmp_path):
        assert is_closed
        assert hooks == 1  # the strategy's own


def _fit_twice(folder):
    config = small_config()
    module, data = LowRankLanguageModel(config, max_steps=8), _data(config)
    trainer = trainer_for(callbacks=[CommunicationProfiler(every_n_steps=2)], default_root_dir=folder)
    reports = []
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(module, data)
        dist.barrier()
        reports.append(json.loads((folder / REPORT_NAME).read_text()))
    return reports


def test_a_second_fit_begins_anew(tmp_path):
    (first, second), _ = run_processes(_fit_twice, 2, tmp_path)
    assert [report["num_steps"] for report in (first, second)] == [4, 4]
    assert [report["sampled_steps"] for report in (first, second)] == [[1, 3], [5, 7]]
    assert first["is_as_formula"]
    assert second["is_as_formula"]
    assert _figures(first, 0) == _figures(second, 0)


@pytest.mark.parametrize("option", ["every_n_steps", "traced_steps"])
def test_wrong_options_are_refused(option):
    with pytest.raises(ValueError, match=rf"{option} \(0\) must be a whole number of at least 1"):
        CommunicationProfiler(**{option: 0})
