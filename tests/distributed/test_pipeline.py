"""The pipeline axis against the one-process model, without a Trainer: losses, gradients, outputs."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_boost.layout import find_decoder
from lightning_boost.mesh import DATA_AXIS, ParallelSizes, build_mesh
from lightning_boost.parallelize import parallelize
from lightning_boost.pipeline_parallel import commit, schedule
from lightning_boost.pipeline_parallel.options import PipelineOptions
from lightning_boost.pipeline_parallel.schedule import find_pipeline
from tests.models import CPU, SEED, gradient_errors, masked_batch, meta_model, one_process_model, small_config
from tests.processes import run_processes


def piped_model(config, *, pipeline=2, tensor=1, data_axis="replicate", **options):
    data = dist.get_world_size() // (pipeline * tensor)
    sizes = ParallelSizes(pipeline_parallel_size=pipeline, data_parallel_size=data, tensor_parallel_size=tensor)
    mesh = build_mesh(sizes, "cpu")
    model = meta_model(config)
    parallelize(
        find_decoder(model),
        mesh,
        device=CPU,
        seed=SEED,
        data_axis=data_axis,
        pipeline=PipelineOptions(**options),
    )
    return model, mesh


def _errors(config, rows, layout, options):
    batch = masked_batch(config.vocab_size, rows=rows)
    model, mesh = piped_model(config, **layout, **options)
    replicas, replica = mesh[DATA_AXIS].size(), mesh[DATA_AXIS].get_local_rank()
    reference = one_process_model(config)
    expected = reference(**batch)
    loss = model(**{name: tensor[replica::replicas] for name, tensor in batch.items()})
    (3 * loss).backward()
    (3 * expected).backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return {
        "loss": abs(total.item() / dist.get_world_size() - expected.item()),
        **gradient_errors(model, reference, is_stage=True),
    }


LAYOUTS = {
    "pipeline 2": (2, {"pipeline": 2}, {}),
    "pipeline 2, gpipe": (2, {"pipeline": 2}, {"schedule": "gpipe"}),
    "pipeline 2, three micro-batches": (2, {"pipeline": 2}, {"num_microbatches": 3}),
    "pipeline 2, interleaved": (2, {"pipeline": 2}, {"schedule": "interleaved_1f1b", "virtual_stages": 2}),
    "pipeline 4": (4, {"pipeline": 4}, {}),
    "pipeline 2, tensor 2": (4, {"pipeline": 2, "tensor": 2}, {"layers_per_stage": [4, 1]}),
    "pipeline 2, data 2": (4, {"pipeline": 2}, {}),
    "pipeline 2, data 2, sharded": (4, {"pipeline": 2, "data_axis": "shard"}, {}),
    "interleaved, data 2, sharded": (
        4,
        {"pipeline": 2, "data_axis": "shard"},
        {"schedule": "interleaved_1f1b", "virtual_stages": 2},
    ),
}


@pytest.mark.parametrize("kind", ["cola", "full_rank"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_one_process(layout, kind):
    processes, sizes, options = LAYOUTS[layout]
    config = small_config(num_hidden_layers=5, low_rank={"kind": kind})
    results = run_processes(_errors, processes, config, 8, sizes, options)
    names = set()
    for errors in results:
        assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])
        names |= errors.keys()
    assert names - {"loss"} == {name for name, _ in one_process_model(config).named_parameters()}


def _evaluated(config, rows, tokens, layout, options):
    batch = masked_batch(config.vocab_size, rows=rows, tokens=tokens)
    model, _ = piped_model(config, **layout, **options)
    reference = one_process_model(config).eval()
    model.eval()
    with torch.inference_mode():
        loss, logits = model(**batch), model(batch["input_ids"])
        expected, expected_logits = reference(**batch), reference(batch["input_ids"])
    return abs(loss - expected).item(), (logits - expected_logits).abs().max().item()


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ({"pipeline": 2}, {}),
        ({"pipeline": 2, "tensor": 2}, {"num_microbatches": 4}),
        ({"pipeline": 2}, {"schedule": "interleaved_1f1b", "virtual_stages": 2}),
    ],
)
def test_losses_and_logits_without_gradients(layout, options):
    """A batch that does not divide into micro-batches; one that has fewer samples than stages."""
    config = small_config(num_hidden_layers=5)
    for rows in (5, 1):
        for loss, logits in run_processes(_evaluated, 2 * layout.get("tensor", 1), config, rows, 12, layout, options):
            assert loss < 1e-6
            assert logits < 1e-5


def _cut(config, rows):
    model, _ = piped_model(config, num_microbatches=4)
    batch, pipeline = masked_batch(config.vocab_size, rows=rows), find_pipeline(model)
    model(**batch).backward()
    trained = pipeline.last_cut
    with torch.inference_mode():
        model(batch["input_ids"])
    return trained, pipeline.last_cut


def test_forward_alone_runs_no_micro_batches_that_are_not_there():
    """A single prompt goes through the stages once; in training there must be as many micro-batches as processes."""
    config = small_config(num_hidden_layers=2)
    assert run_processes(_cut, 2, config, 1) == [((2, 1), (1, 1))] * 2
    assert run_processes(_cut, 2, config, 3) == [((3, 1), (3, 1))] * 2


def _batches(config, sizes, options):
    """Train on batches of different sizes, accumulating the gradients of all of them."""
    model, _ = piped_model(config, **options)
    reference = one_process_model(config)
    for rows, tokens in sizes:
        batch = masked_batch(config.vocab_size, rows=rows, tokens=tokens)
        model(**batch).backward()
        reference(**batch).backward()
    return gradient_errors(model, reference, is_stage=True)


@pytest.mark.parametrize(
    "options", [{}, {"num_microbatches": 4}, {"schedule": "interleaved_1f1b", "virtual_stages": 2}]
)
def test_batches_of_any_size_and_length_count_every_sample_once(options):
    sizes = [(8, 12), (5, 12), (1, 12), (8, 9), (3, 20), (8, 12)]
    for errors in run_processes(_batches, 2, small_config(num_hidden_layers=4), sizes, options):
        assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])


def _error_of(call):
    model, _ = piped_model(small_config())
    try:
        call(model, masked_batch(131))
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return ""


def _logits_with_gradients(model, batch):
    model(batch["input_ids"])


def _twice(model, batch):
    loss = model(**batch)
    loss.backward(retain_graph=True)
    loss.backward()


def _parts(model, batch):
    model.model.layers[1 - dist.get_rank()](batch["input_ids"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (_logits_with_gradients, "gives no outputs to take a loss from"),
        (_twice, "call backward once for each loss"),
        (_parts, "was called past the model's forward"),
    ],
)
def test_what_a_pipeline_cannot_do_is_told(call, message):
    for error in run_processes(_error_of, 2, call):
        assert message in error


def _failing_layer():
    model, _ = piped_model(small_config())

    def fail(*_):
        raise KeyError("of the user")

    for layer in model.model.layers:
        layer.register_forward_pre_hook(fail)
    model(**masked_batch(131))


def test_an_error_in_a_stage_is_the_user_s():
    with pytest.raises(RuntimeError, match="KeyError: 'of the user'") as caught:
        run_processes(_failing_layer, 2)
    assert "failed to run forward" not in str(caught.value)
    assert "in fail" in str(caught.value)


def _no_labels(config):
    model, _ = piped_model(config)
    batch = masked_batch(config.vocab_size)
    loss = model(batch["input_ids"], labels=torch.full_like(batch["labels"], -100))
    loss.backward()
    return loss.item(), max(parameter.grad.abs().max().item() for parameter in model.parameters())


def test_a_batch_without_labels_gives_zero():
    """known_failures A41."""
    assert run_processes(_no_labels, 2, small_config()) == [(0.0, 0.0)] * 2


class _Traffic(TorchDispatchMode):
    """Notes what reaches the process groups: operation and number of values."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            values = sum(tensor.numel() for tensor in tensors if isinstance(tensor, torch.Tensor))
            self.calls.append((func.overloadpacket.__name__, values))
        return func(*args, **(kwargs or {}))


def _traffic(config, layout, options):
    batch = masked_batch(config.vocab_size, rows=8)
    model, _ = piped_model(config, **layout, **options)
    # the first step also makes buffers and warms connections up
    for _ in range(2):
        with _Traffic() as traffic:
            model(**batch).backward()
    return Counter(traffic.calls)


@pytest.mark.parametrize(("kind", "width"), [("cola", 32), ("full_rank", 64)])
def test_a_border_carries_the_hidden_stream_once_in_each_direction(kind, width):
    """8 rows of 12 tokens in 4 micro-batches; in scheme bottleneck a process sends its D/tp features only."""
    config = small_config(num_hidden_layers=3, low_rank={"kind": kind})
    layout, options = {"pipeline": 2, "tensor": 2}, {"num_microbatches": 4}
    for counts in run_processes(_traffic, 4, config, layout, options):
        moved = {name: number for (name, values), number in counts.items() if values == 2 * 12 * width}
        assert (moved["send"], moved["recv_"]) == (4, 4)
        assert not [name for name, values in counts if name in ("send", "recv_") and values != 2 * 12 * width]


@pytest.mark.parametrize(("data_axis", "operation"), [("shard", "reduce_scatter"), ("replicate", "allreduce")])
def test_gradients_are_reduced_once_for_all_microbatches(data_axis, operation):
    """known_failures A10: a unit for each layer of the stage, and one for its end."""
    config = small_config(num_hidden_layers=4)
    layout, options = {"pipeline": 2, "data_axis": data_axis}, {"num_microbatches": 4, "layers_per_stage": [2, 2]}
    for counts in run_processes(_traffic, 4, config, layout, options):
        # of one or two values: token counts and losses
        reductions = [number for (name, values), number in counts.items() if operation in name and values > 2]
        assert sum(reductions) == 3


def alike_microbatches():
    """Weigh micro-batches alike, however many valid tokens they have."""
    weights = schedule.Pipeline._weights
    schedule.Pipeline._weights = lambda self, *given, **options: [
        torch.full_like(weight, 1 / len(given[0])) for weight in weights(self, *given, **options)
    ]


def factor_forgotten():
    """Add gradients without the factor that reaches the loss."""
    backward = commit.Commit.backward
    commit.Commit.backward = staticmethod(lambda ctx, upstream: backward(ctx, torch.ones_like(upstream)))


def own_replica_only():
    """Count the valid tokens of this replica alone."""
    weights = schedule.Pipeline._weights
    schedule.Pipeline._weights = lambda self, given, **_: weights(self, given, over_replicas=False)


def shifted_labels():
    """Give a micro-batch the labels of the next one."""
    call = schedule.Pipeline._call

    def shifted(self, number):
        parts = self._run.microbatches.arguments
        labels = [part["labels"] for part in parts]
        mine = {**parts[number], "labels": labels[(number + 1) % len(labels)]}
        kept, parts[number] = parts[number], mine
        try:
            return call(self, number)
        finally:
            parts[number] = kept

    schedule.Pipeline._call = shifted


def _errors_with(plant):
    plant()
    config = small_config(num_hidden_layers=3)
    return max(_errors(config, 8, {"pipeline": 2}, {"num_microbatches": 4}).values())


@pytest.mark.parametrize(
    "plant", [alike_microbatches, factor_forgotten, own_replica_only, shifted_labels], ids=lambda plant: plant.__name__
)
def test_a_planted_defect_is_seen(plant):
    """The tests above can fail; known_failures A07, A16."""
    assert max(run_processes(_errors_with, 4, plant)) > 1e-3
