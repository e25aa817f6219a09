"""One position of a world of 1,024 processes, whose collectives do nothing: ``python -m tests.large_world INDEX``."""

import json
import resource
import sys
import time

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_boost.config import LlamaConfig, LowRankConfig
from lightning_boost.layout import find_decoder
from lightning_boost.mesh import ParallelSizes, build_mesh
from lightning_boost.model.llama import LlamaForCausalLM
from lightning_boost.parallelize import parallelize
from lightning_boost.pipeline_parallel.options import PipelineOptions

SIZES = ParallelSizes(pipeline_parallel_size=16, data_parallel_size=8, tensor_parallel_size=8)

BOOST_40B = LlamaConfig(
    vocab_size=32000,
    hidden_size=8192,
    intermediate_size=22016,
    num_hidden_layers=48,
    num_attention_heads=64,
    low_rank=LowRankConfig(kind="cola", bottleneck_size=2048),
)


def start(index: int) -> dict[str, object]:
    """Build the mesh, swap, split and fill what this process holds; return what it took."""
    begin = time.perf_counter()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=index, world_size=SIZES.world_size, store=FakeStore())
    mesh = build_mesh(SIZES, "cpu")
    with torch.device("meta"):
        model = LlamaForCausalLM(BOOST_40B).bfloat16()
    parallelize(
        find_decoder(model), mesh, device=torch.device("cpu"), seed=0, data_axis="shard", pipeline=PipelineOptions()
    )
    assert not any(parameter.is_meta for parameter in model.parameters())
    return {
        "seconds": time.perf_counter() - begin,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "held": sum(parameter.to_local().numel() for parameter in model.parameters()),
        "names": [name for name, _ in model.named_parameters()],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(start(int(sys.argv[1]))))
