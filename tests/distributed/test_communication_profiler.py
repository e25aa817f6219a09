"""The profiler of communication in training: what it counts, on which axis, and its trace."""

import json
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from lightning_boost import LowRankLanguageModel
from lightning_boost.callbacks.gathered_report import TRACE_NAME
from lightning_boost.collectives import Label, all_reduce, register_group
from lightning_boost.communication_trace import CommunicationTrace
from lightning_boost.mesh import TENSOR_AXIS
from tests.models import small_config
from tests.processes import run_processes
from tests.profiled_fit import ROWS, TOKENS, data_for, figures_of, fit_language_model, fit_profiled, refuse_constant
from tests.users_module import UsersModule, loader

# ---- the tensor axis beside the formula


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
    (report, text, told), *others = run_processes(fit_language_model, world_size, tmp_path, changes, strategy, options)
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
    (report, *_), _ = run_processes(fit_language_model, 2, tmp_path, {}, {"tensor_parallel_size": 2}, options)
    launches = figures_of(report, 1, "launches")
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
    return fit_profiled(folder, _OneMore(config, chunk), data_for(config))


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
    return fit_profiled(folder, UsersModule(), loader())


def test_a_users_own_model_has_no_formula(tmp_path):
    (report, text, told), _ = run_processes(_users_module, 2, tmp_path)
    assert report["is_as_formula"] is None
    assert "has no LlamaForCausalLM" in report["no_formula_because"]
    assert told == []
    assert "no formula" in text
    assert figures_of(report, 0, "launches")["tensor", "forward", "qkv", "all_reduce"] == 2


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
    (report, *_), _ = run_processes(fit_language_model, 2, tmp_path, {"num_hidden_layers": 4}, strategy, {})
    hidden_state = ROWS * TOKENS * 64 * 4
    for process in (0, 1):
        found = {key[1:]: count for key, count in figures_of(report, process).items() if key[3] in ("send", "recv")}
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
    return *fit_profiled(folder, module, data_for(config), strategy=strategy, **options), shapes


@pytest.mark.parametrize("accumulate", [1, 2])
def test_shards_on_the_data_axis_are_counted_exactly(accumulate, tmp_path):
    """Each parameter is shared out by its first dim, padded: gathered twice in layers and once outside."""
    options = {"accumulate_grad_batches": accumulate}
    (report, _, _, shapes), _ = run_processes(_sharded, 2, tmp_path, "shard", options)
    shares = {name: -(-shape[0] // 2) * torch.Size(shape[1:]).numel() * 4 for name, shape in shapes.items()}
    in_layers = sum(count for name, count in shares.items() if ".layers." in name)
    everywhere = sum(shares.values())
    for process in (0, 1):
        found = {key[1:]: count for key, count in figures_of(report, process).items() if key[2] != "scalars"}
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
        found = {key[1:]: count for key, count in figures_of(report, process).items() if key[2] == "gradients"}
        assert found == {("backward", "gradients", "all_reduce"): everywhere}


class _Manual(LowRankLanguageModel):
    """Steps two optimizers in each batch, each behind a forward and backward of its own."""

    automatic_optimization = False

    def configure_optimizers(self):
        parameters = list(self.parameters())
        return [torch.optim.SGD(parameters[::2], lr=0.01), torch.optim.SGD(parameters[1::2], lr=0.01)]

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.manual_backward(self.model(**batch))
            optimizer.step()


def _sharded_manually(folder):
    config = small_config()
    strategy = {"tensor_parallel_size": 1, "data_parallel_size": 2, "data_axis": "shard"}
    return fit_profiled(folder, _Manual(config), data_for(config), strategy=strategy)


def test_what_follows_an_optimizers_step_belongs_to_the_next_forward(tmp_path):
    (report, *_), _ = run_processes(_sharded_manually, 2, tmp_path)
    launches = {key[1:3]: count for key, count in figures_of(report, 0, "launches").items() if key[3] == "all_gather"}
    layers = 2
    assert launches == {("forward", "parameters"): 2 * (layers + 1), ("backward", "parameters"): 2 * layers}


def _gather():
    index = dist.get_rank()
    with CommunicationTrace({}, is_cuda=False).open() as trace:
        dist.gather(torch.ones(3), [torch.ones(3), torch.ones(3)] if index == 0 else None)
        # the first process gives 4 values and gets 2, the second the other way round
        sizes = ([1, 1], [1, 3]) if index == 0 else ([3, 1], [1, 1])
        taken, given = (torch.ones(sum(part)) for part in sizes)
        dist.all_to_all_single(taken, given, *sizes)
    return [(event.operation, event.bytes) for event in trace.events()]


def test_bytes_are_those_handed_in():
    assert run_processes(_gather, 2) == [[("gather", 12), ("all_to_all", 16)], [("gather", 12), ("all_to_all", 8)]]


# ---- the trace


def test_the_trace_has_a_track_for_each_process_and_axis(tmp_path):
    strategy = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    ((report, *_), *_) = run_processes(fit_language_model, 4, tmp_path, {}, strategy, {})
    trace = json.loads((tmp_path / TRACE_NAME).read_text(), parse_constant=refuse_constant)
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
    launches = sum(count for process in range(4) for count in figures_of(report, process, "launches").values())
    assert len([event for event in spans if event["cat"] != "step"]) == launches * len(report["sampled_steps"])
