"""Models with recompute, and shapes of models, that several tests share."""

from lightning_boost.layout import find_decoder
from lightning_boost.mesh import ParallelSizes, build_mesh
from lightning_boost.parallelize import parallelize
from lightning_boost.pipeline_parallel.options import PipelineOptions
from lightning_boost.recompute import RecomputeOptions
from tests.models import CPU, SEED, meta_model

DROPOUT = {"attention_dropout": 0.3, "hidden_dropout": 0.3}
MIXED = {"other_bottleneck_sizes": {"layers.0.q_proj": "dense", "layers.0.down_proj": "dense", "layers.1.up_proj": 30}}
CHUNKS = ("qkv", "o", "gate_up", "down")
SHAPES = {
    "cola": {},
    "dropout": DROPOUT,
    "biases and grouped queries": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "one key/value head, dropout": {"num_key_value_heads": 1, "low_rank": {"bottleneck_size": 8}, **DROPOUT},
    "svd": {"low_rank": {"kind": "svd"}},
    "dense among low-rank": {"low_rank": MIXED},
    "full rank": {"low_rank": {"kind": "full_rank"}},
    "full rank, dropout": {"low_rank": {"kind": "full_rank"}, **DROPOUT},
}
LOW_RANK, BLOCK = RecomputeOptions(kind="low_rank"), RecomputeOptions(kind="block")
WITH_ATTENTION = RecomputeOptions(kind="low_rank", keep_attention=True)
SHARDED = RecomputeOptions(kind="low_rank", store_latents="sharded")


def recomputed_model(config, recompute, *, data_axis="replicate", options=None, scheme="auto", **sizes):
    """Return a model spread over the mesh, and the mesh; all processes must call this."""
    model = meta_model(config)
    mesh = build_mesh(ParallelSizes(**{f"{axis}_parallel_size": size for axis, size in sizes.items()}), "cpu")
    parallelize(
        find_decoder(model),
        mesh,
        device=CPU,
        seed=SEED,
        data_axis=data_axis,
        pipeline=PipelineOptions(**(options or {})),
        recompute=recompute,
        scheme=scheme,
    )
    return model, mesh
