"""``benchmark memory``: what a model that is trained holds on one process of several, in GiB, counted without a GPU.

Weights are this process's shares. Activations are those that a block keeps (``benchmark counts``), for every layer and
token. What stands at the ends, from the last hidden state to the loss and its gradient, is followed on the modules that
train, at a few tokens, and extended: it grows with tokens linearly, once they are more than the loss takes at a time.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_boost.benchmark.blocks import SCHEMES, Candidate, make_model, with_kind
from lightning_boost.benchmark.counts import (
    check_shares,
    count_block,
    parameters_per_process,
    processes_that_do_nothing,
)
from lightning_boost.benchmark.live_memory import UncomputedProducts
from lightning_boost.benchmark.paper import BOOST_7B, MEMORY_GIB
from lightning_boost.benchmark.report import Bars, Report
from lightning_boost.config import LlamaConfig
from lightning_boost.layout import find_decoder
from lightning_boost.mesh import ParallelSizes, build_mesh
from lightning_boost.model.llama import LlamaForCausalLM
from lightning_boost.parallelize import parallelize
from lightning_boost.recompute import RecomputeOptions
from lightning_boost.tensor_parallel.local_parameter import local
from lightning_boost.tensor_parallel.vocabulary import CHUNK_TOKENS

DTYPE = torch.bfloat16
"""Of parameters, gradients, moments and activations."""

PAPER_TOKENS = 4 * 4096
"""Four sequences."""

PAPER_TENSOR_SIZE = 4

_GIB = 2**30
_TOKENS_RUN = (2 * CHUNK_TOKENS, 3 * CHUNK_TOKENS)
"""At least two chunks of the loss: the second is computed while some of the first is still there."""


@dataclass(frozen=True)
class Way:
    """A way to train a model."""

    candidate: Candidate
    recompute: RecomputeOptions | None = None


WAYS: dict[str, Way] = {
    **{name: Way(candidate) for name, candidate in SCHEMES.items()},
    **{
        f"bottleneck, recompute {kind}": Way(SCHEMES["bottleneck"], RecomputeOptions(kind=kind))
        for kind in ("low_rank", "block")
    },
}
"""What is compared, by name."""


@dataclass(frozen=True)
class Memory:
    """Bytes that one process holds."""

    weights: float
    gradients: float
    optimizer: float
    """AdamW's two moments, in the dtype of the parameters as torch keeps them."""

    activations: float
    """That the blocks keep from forward to backward."""

    run_again: float
    """Activations of the one block that is being computed again in backward; 0 without recompute."""

    ends: float
    """The embedding's output, and the most that final norm, head and loss hold at a time, forward and backward."""

    @property
    def total(self) -> float:
        """All of it, as if it were there at once."""
        total: float = sum(vars(self).values())
        return total


def count_memory(
    config: LlamaConfig, ways: Mapping[str, Way], *, tensor_parallel_size: int, num_tokens: int
) -> dict[str, Memory]:
    """Count what the first process holds of a model.

    Args:
        config: The model; its kind gives way to the candidates'.
        ways: Schemes, kinds and recompute, by name.
        tensor_parallel_size: Processes, all but one of which do not exist.
        num_tokens: Of a micro-batch.
    """

    @functools.cache
    def kept(candidate: Candidate, recompute: RecomputeOptions | None) -> float:
        forward = count_block(
            config,
            candidate,
            tensor_parallel_size=tensor_parallel_size,
            num_tokens=num_tokens,
            dtype=DTYPE,
            recompute=recompute,
        )["forward"]
        return forward.saved_values_per_token * num_tokens * DTYPE.itemsize

    @functools.cache
    def ends(candidate: Candidate) -> float:
        return count_ends(config, candidate, tensor_parallel_size=tensor_parallel_size, num_tokens=num_tokens)

    def memory(candidate: Candidate, recompute: RecomputeOptions | None) -> Memory:
        weights = parameters_per_process(config, candidate, tensor_parallel_size) * DTYPE.itemsize
        return Memory(
            weights=weights,
            gradients=weights,
            optimizer=2 * weights,
            activations=kept(candidate, recompute) * config.num_hidden_layers,
            run_again=0 if recompute is None else kept(candidate, None),
            ends=ends(candidate),
        )

    return {name: memory(way.candidate, way.recompute) for name, way in ways.items()}


def count_ends(config: LlamaConfig, candidate: Candidate, *, tensor_parallel_size: int, num_tokens: int) -> float:
    """Return the bytes beside those of blocks and parameters; arguments as of ``count_memory``."""
    with processes_that_do_nothing(tensor_parallel_size):
        model = _ends_of(config, candidate)
        if num_tokens <= _TOKENS_RUN[-1]:
            return max(_peaks(model, num_tokens))
        few, more = (_peaks(model, tokens) for tokens in _TOKENS_RUN)
    first, second = _TOKENS_RUN
    # which part has the highest peak depends on the number of tokens, so each is extended by itself
    return max(
        below + (above - below) * (num_tokens - first) / (second - first)
        for below, above in zip(few, more, strict=True)
    )


def _ends_of(config: LlamaConfig, candidate: Candidate) -> LlamaForCausalLM:
    """Return a model without layers, split over all processes."""
    model = make_model(replace(with_kind(config, candidate.kind), num_hidden_layers=1), DTYPE)
    mesh = build_mesh(ParallelSizes(tensor_parallel_size=dist.get_world_size()), "cpu")
    parallelize(find_decoder(model), mesh, device=torch.device("cpu"), seed=0, scheme=candidate.scheme)
    model.model.layers = nn.ModuleList()
    return model


def _peaks(model: LlamaForCausalLM, num_tokens: int) -> list[int]:
    """Return the most bytes that are alive in the final norm and in the loss, and in their backward passes."""
    token_ids = torch.zeros(1, num_tokens, dtype=torch.int64)
    memory, peaks = UncomputedProducts(), []

    def note(*_: Tensor) -> None:
        peaks.append(memory.peak - _gradient_bytes(model))
        memory.peak = memory.bytes

    model.zero_grad()
    with memory:
        embedded: Tensor = model.model.embed_tokens(token_ids)
        # what becomes of it in the layers is theirs
        normalized: Tensor = model.model.norm(embedded.detach().requires_grad_())
        note()
        normalized.register_hook(note)
        loss: Tensor = model.loss(normalized, model.lm_head.weight, token_ids)
        # as in the model, whose forward has ended
        del normalized
        note()
        loss.backward()
        note()
    return peaks


def _gradient_bytes(model: nn.Module) -> int:
    """Return the bytes of the parameters' gradients, which are counted beside the weights."""
    return sum(local(parameter).nbytes for parameter in model.parameters() if parameter.grad is not None)


def measure_memory(config: LlamaConfig, *, tensor_parallel_size: int, num_tokens: int) -> Report:
    """Count a model under every scheme, in bf16.

    Args:
        config: The model; by default the paper's 7B.
        tensor_parallel_size: Processes.
        num_tokens: Of a micro-batch.

    Raises:
        ValueError: If the tokens or the processes are fewer than one, or these cannot share the model.
    """
    check_shares(config, tensor_parallel_size, num_tokens)
    found = count_memory(config, WAYS, tensor_parallel_size=tensor_parallel_size, num_tokens=num_tokens)
    in_gib = {name: {part: value / _GIB for part, value in vars(memory).items()} for name, memory in found.items()}
    in_words = {
        name: {part.replace("_", " "): value for part, value in parts.items()} for name, parts in in_gib.items()
    }
    is_paper_s = (config, tensor_parallel_size, num_tokens) == (BOOST_7B, PAPER_TENSOR_SIZE, PAPER_TOKENS)
    paper = MEMORY_GIB if is_paper_s else {}
    return Report(
        title=f"GiB on one process: {config.num_hidden_layers} layers of hidden {config.hidden_size}, tensor"
        f" {tensor_parallel_size}, {num_tokens:,} tokens, bf16",
        headings=("", "weights", "gradients", "optimizer", "activations", "run again", "ends", "total"),
        rows=[*_rows(in_gib), *_rows({f"{name}, paper": parts for name, parts in paper.items()})],
        figures={
            "gib": {name: {**parts, "total": found[name].total / _GIB} for name, parts in in_gib.items()},
            "paper_gib": paper,
            "sizes": {"tensor_parallel_size": tensor_parallel_size, "tokens": num_tokens},
        },
        notes=["run again: one block of those that recompute computes again; ends: embedding, final norm, loss."]
        + ["The paper's activations contain its loss buffers." for _ in paper][:1],
        bars=(Bars("memory of one process", "GiB", in_words, is_stacked=True),),
    )


def _rows(in_gib: Mapping[str, Mapping[str, float]]) -> Iterator[list[str]]:
    parts = Memory.__dataclass_fields__
    for name, given in in_gib.items():
        cells = [f"{given[part]:.2f}" if part in given else "" for part in parts]
        yield [name, *cells, f"{sum(given.values()):.2f}"]
