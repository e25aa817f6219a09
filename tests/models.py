"""Small models and batches that several tests share."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_boost.config import IGNORED_LABEL, LlamaConfig, LowRankConfig
from lightning_boost.layout import find_decoder
from lightning_boost.mesh import ParallelSizes, build_mesh
from lightning_boost.model.initialization import initialize
from lightning_boost.model.llama import LlamaForCausalLM
from lightning_boost.parallelize import parallelize
from lightning_boost.tensor_parallel.scheme import SchemeName

SEED = 3
CPU = torch.device("cpu")


def small_config(**changes: Any) -> LlamaConfig:
    """Return a configuration with sizes that divide by 4 where they must and nowhere else."""
    low_rank = {"kind": "cola", "bottleneck_size": 15, **changes.pop("low_rank", {})}
    sizes = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 173, "num_hidden_layers": 2}
    return LlamaConfig(**{**sizes, "num_attention_heads": 8, **changes}, low_rank=LowRankConfig(**low_rank))


def meta_model(config: LlamaConfig) -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def one_process_model(config: LlamaConfig, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    model = meta_model(config)
    initialize(model, seed=SEED)
    return model.to(dtype)


def parallel_model(
    config: LlamaConfig, size: int, dtype: torch.dtype = torch.float32, scheme: SchemeName = "auto"
) -> LlamaForCausalLM:
    """Return the same model spread over ``size`` processes; all of them must call this."""
    model = meta_model(config).to(dtype)
    mesh = build_mesh(ParallelSizes(tensor_parallel_size=size), "cpu")
    parallelize(find_decoder(model), mesh, device=CPU, seed=SEED, scheme=scheme)
    return model


def masked_batch(vocab_size: int, rows: int = 4, tokens: int = 12) -> dict[str, Tensor]:
    """Return random tokens whose labels are ignored more and more from row to row."""
    generator = torch.Generator().manual_seed(SEED)
    input_ids = torch.randint(vocab_size, (rows, tokens), generator=generator)
    ignored = torch.rand(input_ids.shape, generator=generator) < torch.linspace(0.0, 0.9, rows)[:, None]
    return {"input_ids": input_ids, "labels": input_ids.masked_fill(ignored, IGNORED_LABEL)}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)).item()


def gradient_errors(model: nn.Module, reference: nn.Module, *, is_stage: bool = False) -> dict[str, float]:
    """Return each gradient's relative error; gradients of rounding noise count against the norm of all.

    Args:
        model: With every parameter, or with those of a pipeline's stage.
        reference: The one-process model.
        is_stage: Whether other parameters may stand elsewhere.
    """
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    total = torch.stack([gradient.double().norm() for gradient in expected.values()]).norm()
    errors = {}
    for name, parameter in model.named_parameters():
        difference = (whole(parameter.grad).double() - expected[name].double()).norm()
        errors[name] = (difference / torch.maximum(expected[name].double().norm(), 1e-6 * total)).item()
    assert is_stage or errors.keys() == expected.keys()
    return errors
