"""The pipeline axis against the one-process model, without a Trainer: losses, gradients, outputs."""

import pytest
import torch
import torch.distributed as dist

from lightning_boost.mesh import DATA_AXIS, PIPELINE_AXIS, ParallelSizes, build_mesh
from lightning_boost.parallelize import parallelize
from lightning_boost.pipeline_parallel.options import PipelineOptions
from lightning_boost.tensor_parallel.layout import find_decoder
from tests.models import CPU, SEED, masked_batch, meta_model, one_process_model, small_config, whole
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


def _own_errors(model, reference):
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    total = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    errors = {}
    for name, parameter in model.named_parameters():
        difference = (whole(parameter.grad) - expected[name]).norm()
        errors[name] = (difference / torch.maximum(expected[name].norm(), 1e-6 * total)).item()
    return errors


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
    return {"loss": abs(total.item() / dist.get_world_size() - expected.item()), **_own_errors(model, reference)}


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
