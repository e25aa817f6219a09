"""What the collectives of the tensor axis move, by formula.

Each scheme is a function that lists the collectives of one layer, and of the ends of the model, as ``Move``; whoever
adds a scheme adds its two functions to ``_LAYER_MOVES`` and ``_END_MOVES``.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Literal, NamedTuple

import torch

from lightning_boost.config import LlamaConfig

CHUNKS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Projections of each chunk."""

BORDER_CHUNK = "latents"
"""Chunk of the latents that cross the borders of a pipeline."""

END_CHUNKS = ("embedding", "head", "loss", "logits")
"""Chunks outside the layers."""

Output = Literal["loss", "logits"]
"""What a forward gives: the model's own loss, or logits that a module takes one of."""


class Move(NamedTuple):
    """One collective of the tensor axis, with what each process hands to it."""

    operation: str
    chunk: str
    pass_: str
    width: Fraction | int
    """Values for each token; of all tokens together they are rounded up to whole ones."""

    fixed: int
    """Values whatever the tokens are."""

    dtype: torch.dtype

    given: int = 0
    """Values for each token that every process gets alike and recompute keeps."""


class Volume(NamedTuple):
    """What one process hands to collectives."""

    launches: int
    values: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class TensorAxis:
    """The tensor axis, as far as the formulas need it.

    Args:
        size: Processes, above 1.
        gemm_dtype: What matrices multiply in.
        stream_dtype: Of the hidden stream and the parameters.
        gemm_columns: Columns that the sum of squares takes in a buffer of ``gemm_dtype``.
        stream_columns: The same in a buffer of ``stream_dtype``.
    """

    size: int
    gemm_dtype: torch.dtype = torch.float32
    stream_dtype: torch.dtype = torch.float32
    gemm_columns: int
    stream_columns: int


def scheme_of(config: LlamaConfig) -> str:
    """Return the scheme that a model is split by: ``bottleneck`` if any of its projections is a factor pair."""
    places = ((layer, name) for layer in range(config.num_hidden_layers) for name in config.projection_shapes())
    return "full_rank" if all(config.bottleneck_size_of(*place) is None for place in places) else "bottleneck"


def layer_moves(
    config: LlamaConfig,
    layer: int,
    axis: TensorAxis,
    *,
    recompute: str = "none",
    store_latents: str = "whole",
    scheme: str | None = None,
) -> list[Move]:
    """Return the collectives of a decoder layer, forward and backward.

    What a layer that is run again in backward repeats is listed again as what it is, a collective of forward; shares of
    what is kept are gathered in backward.

    Args:
        config: The model; every parameter is trained.
        layer: Index of the layer.
        axis: The tensor axis.
        recompute: ``"none"``, ``"low_rank"`` or ``"block"``, if the layer is run again.
        store_latents: ``"whole"`` or ``"sharded"``, if it keeps latents.
        scheme: How the model is split; ``None``: as the strategy would.
    """
    scheme = scheme or scheme_of(config)
    moves = [move for chunk in CHUNKS for move in _LAYER_MOVES[scheme](config, layer, chunk, axis)]
    return moves + list(_second_run(config, moves, axis, scheme, recompute, store_latents))


def end_moves(
    config: LlamaConfig,
    axis: TensorAxis,
    *,
    tokens: int,
    output: Output = "loss",
    loss_tokens: int,
    has_embedding: bool = True,
    has_head: bool = True,
    scheme: str | None = None,
) -> list[Move]:
    """Return the collectives of embedding, final norm, head and loss, forward and backward.

    Args:
        config: The model; every parameter is trained.
        axis: The tensor axis.
        tokens: Of one forward.
        output: What the forward gives.
        loss_tokens: Tokens that the loss goes through at a time.
        has_embedding: Whether this process's stage does.
        has_head: Whether it does.
        scheme: How the model is split; ``None``: as the strategy would.
    """
    moves = list(_END_MOVES[scheme or scheme_of(config)](config, axis))
    if output == "loss":
        wide = torch.promote_types(axis.gemm_dtype, torch.float32)
        slices = (min(loss_tokens, tokens - start) for start in range(0, tokens, loss_tokens))
        # of each token the largest logit, the sum of exponentials and the target's logit
        moves += [Move("all_gather", "loss", "forward", 0, 3 * rows, wide) for rows in slices]
    else:
        moves.append(Move("all_gather", "logits", "forward", -(-config.vocab_size // axis.size), 0, axis.gemm_dtype))
    return [move for move in moves if (has_embedding if move.chunk == "embedding" else has_head)]


def border_moves(config: LlamaConfig, axis: TensorAxis, layers: Collection[int], tokens: int) -> list[Move]:
    """Return the gathers of latents that cross the borders of a process's pipeline stages.

    Args:
        config: The model.
        axis: The tensor axis.
        layers: Indices of those that stand on this process.
        tokens: Of a micro-batch.
    """
    moves = []
    for layer in range(1, config.num_hidden_layers):
        width = sum(before for before, _ in config.crossing_sizes(layer).values())
        is_behind, is_before = layer in layers, layer - 1 in layers
        if width and is_behind != is_before:
            pass_ = "forward" if is_behind else "backward"
            moves.append(Move("all_gather", BORDER_CHUNK, pass_, 0, -(-tokens // axis.size) * width, axis.gemm_dtype))
    return moves


def add_up(moves: Iterable[Move], tokens: int) -> dict[tuple[str, str, str], Volume]:
    """Return what the collectives of a forward over so many tokens move, by (operation, chunk, pass)."""
    total: dict[tuple[str, str, str], Volume] = {}
    for move in moves:
        key = (move.operation, move.chunk, move.pass_)
        launches, values, num_bytes = total.get(key, (0, 0, 0))
        more = ceil(move.width * tokens) + move.fixed
        total[key] = Volume(launches + 1, values + more, num_bytes + more * move.dtype.itemsize)
    return total


def layer_traffic(
    config: LlamaConfig,
    layer: int,
    *,
    tensor_parallel_size: int,
    statistic_columns: int,
    scheme: str | None = None,
) -> Counter[tuple[str, str, str]]:
    """Return the values per token that one process hands to the tensor axis's collectives in a decoder layer.

    Keys are (operation, chunk, pass), as in a ``CollectiveLog``. Left out is what does not grow with tokens: the row of
    γ in a gather, the gradients of replicated key/value projections.

    Args:
        config: The model.
        layer: Index of the layer.
        tensor_parallel_size: Above 1.
        statistic_columns: Columns that the sum of squares takes beside what it travels with.
        scheme: As in ``layer_moves``.
    """
    axis = TensorAxis(size=tensor_parallel_size, gemm_columns=statistic_columns, stream_columns=statistic_columns)
    traffic: Counter[tuple[str, str, str]] = Counter()
    for move in layer_moves(config, layer, axis, scheme=scheme):
        if move.width:
            traffic[move.operation, move.chunk, move.pass_] += int(move.width)
    return traffic


def _second_run(
    config: LlamaConfig, moves: Iterable[Move], axis: TensorAxis, scheme: str, recompute: str, store_latents: str
) -> Iterator[Move]:
    """Yield what the second run of a layer adds.

    One of a whole layer repeats forward up to the last tensor that backward asks for. Only a sum behind everything that
    is kept comes after that, unless dropout's mask, which backward asks for too, comes later still.
    """
    for move in moves:
        if move.pass_ != "forward":
            continue
        is_behind = scheme == "bottleneck" and (move.operation, move.chunk) == ("reduce_scatter", "down")
        if recompute == "block" and (not is_behind or config.hidden_dropout > 0):
            yield move
        if recompute == "low_rank" and store_latents == "sharded" and move.given:
            yield Move("all_gather", move.chunk, "backward", Fraction(move.given, axis.size), 0, move.dtype)


def _bottleneck_layer(config: LlamaConfig, layer: int, chunk: str, axis: TensorAxis) -> Iterator[Move]:
    hidden, share = config.hidden_size, config.hidden_size // axis.size
    sizes = [config.bottleneck_size_of(layer, projection) for projection in CHUNKS[chunk]]
    width, has_norm = sum(size for size in sizes if size is not None), len(sizes) > 1
    gemm, stream = axis.gemm_dtype, axis.stream_dtype
    if width:
        yield Move("all_reduce", chunk, "forward", width + has_norm * axis.gemm_columns, 0, gemm, given=width)
        yield Move("all_reduce", chunk, "backward", width, 0, gemm)
    if None in sizes and has_norm:
        # γ is one more row
        yield Move("all_gather", chunk, "forward", share, share, stream, given=hidden)
        yield Move("reduce_scatter", chunk, "backward", hidden + axis.size * axis.stream_columns, 0, stream)
    elif None in sizes:
        yield Move("reduce_scatter", chunk, "forward", hidden, 0, gemm)
        yield Move("all_gather", chunk, "backward", share, 0, gemm)
    yield from _replicated_heads(config, layer, chunk, axis)


def _full_rank_layer(config: LlamaConfig, layer: int, chunk: str, axis: TensorAxis) -> Iterator[Move]:
    has_norm = len(CHUNKS[chunk]) > 1
    if has_norm:
        yield Move("all_reduce", chunk, "backward", config.hidden_size, 0, axis.gemm_dtype)
    else:
        yield Move("all_reduce", chunk, "forward", config.hidden_size, 0, axis.gemm_dtype, given=config.hidden_size)
    yield from _replicated_heads(config, layer, chunk, axis)


def _replicated_heads(config: LlamaConfig, layer: int, chunk: str, axis: TensorAxis) -> Iterator[Move]:
    """Yield the sums of the gradients of key/value projections with fewer heads than there are processes."""
    if chunk != "qkv" or config.key_value_heads >= axis.size:
        return
    for projection in ("k_proj", "v_proj"):
        fan_in, fan_out = config.projection_shapes()[projection]
        columns = config.bottleneck_size_of(layer, projection) or fan_in
        yield Move("all_reduce", chunk, "backward", 0, fan_out * columns, axis.stream_dtype)
        if config.attention_bias:
            yield Move("all_reduce", chunk, "backward", 0, fan_out, axis.stream_dtype)


def _bottleneck_ends(config: LlamaConfig, axis: TensorAxis) -> Iterator[Move]:
    hidden, share, stream = config.hidden_size, config.hidden_size // axis.size, axis.stream_dtype
    if config.tie_word_embeddings:
        yield Move("reduce_scatter", "embedding", "forward", hidden, 0, stream)
        yield Move("all_gather", "embedding", "backward", share, 0, stream)
    yield Move("all_gather", "head", "forward", share, share, stream)
    yield Move("reduce_scatter", "head", "backward", hidden + axis.size * axis.stream_columns, 0, stream)


def _full_rank_ends(config: LlamaConfig, axis: TensorAxis) -> Iterator[Move]:
    hidden, share = config.hidden_size, config.hidden_size // axis.size
    if config.tie_word_embeddings:
        yield Move("all_reduce", "embedding", "forward", hidden, 0, axis.stream_dtype)
    else:
        yield Move("all_gather", "embedding", "forward", share, 0, axis.stream_dtype)
    yield Move("all_reduce", "head", "backward", hidden, 0, axis.stream_dtype)


def _gathered_latents(config: LlamaConfig, layer: int, chunk: str, axis: TensorAxis) -> Iterator[Move]:
    """Yield what makes latents whole that cross, where processes have parts of them."""
    names = config.low_rank.crossing_projections if config.low_rank.kind == "lax" else []
    for projection in filter(names.__contains__, CHUNKS[chunk]):
        width = config.bottleneck_size_of(layer, projection)
        assert width is not None
        share = -(-width // axis.size)
        yield Move("all_gather", chunk, "forward", share, 0, axis.gemm_dtype, given=width)
        yield Move("all_gather", chunk, "backward", share, 0, axis.gemm_dtype)


def _vanilla_layer(config: LlamaConfig, layer: int, chunk: str, axis: TensorAxis) -> Iterator[Move]:
    yield from _gathered_latents(config, layer, chunk, axis)
    shapes = [config.projection_shapes()[projection] for projection in CHUNKS[chunk]]
    for _fan_in, fan_out in shapes:
        yield Move("all_reduce", chunk, "forward", fan_out, 0, axis.gemm_dtype, given=fan_out)
    yield Move("all_reduce", chunk, "backward", shapes[0][0], 0, axis.gemm_dtype)


def _vanilla_sharded_layer(config: LlamaConfig, layer: int, chunk: str, axis: TensorAxis) -> Iterator[Move]:
    yield from _gathered_latents(config, layer, chunk, axis)
    gemm, shapes = axis.gemm_dtype, {projection: config.projection_shapes()[projection] for projection in CHUNKS[chunk]}
    if len(shapes) == 1:
        ((fan_in, fan_out),) = shapes.values()
        share = -(-fan_in // axis.size)
        yield Move("all_gather", chunk, "forward", share, 0, gemm)
        yield Move("all_reduce", chunk, "forward", fan_out, 0, gemm, given=fan_out)
        yield Move("reduce_scatter", chunk, "backward", axis.size * share, 0, gemm)
        return
    are_heads_few = chunk == "qkv" and config.key_value_heads < axis.size
    share = 0
    for projection, (_fan_in, fan_out) in shapes.items():
        is_replicated = are_heads_few and projection in ("k_proj", "v_proj")
        share += config.head_size if is_replicated else -(-fan_out // axis.size)
        if is_replicated and config.attention_bias:
            yield Move("all_reduce", chunk, "backward", 0, fan_out, axis.stream_dtype)
    yield Move("reduce_scatter", chunk, "forward", axis.size * share, 0, gemm)
    yield Move("all_gather", chunk, "backward", share, 0, gemm)
    yield Move("all_reduce", chunk, "backward", config.hidden_size, 0, gemm)


def _ungrouped_layer(config: LlamaConfig, layer: int, chunk: str, axis: TensorAxis) -> Iterator[Move]:
    sizes = [config.bottleneck_size_of(layer, projection) for projection in CHUNKS[chunk]]
    if None in sizes:
        yield from _bottleneck_layer(config, layer, chunk, axis)
        return
    for size in filter(None, sizes):
        columns = (len(sizes) > 1) * axis.gemm_columns
        yield Move("all_reduce", chunk, "forward", size + columns, 0, axis.gemm_dtype, given=size)
        yield Move("all_reduce", chunk, "backward", size, 0, axis.gemm_dtype)
    yield from _replicated_heads(config, layer, chunk, axis)


_LAYER_MOVES: dict[str, Callable[[LlamaConfig, int, str, TensorAxis], Iterable[Move]]] = {
    "bottleneck": _bottleneck_layer,
    "bottleneck_ungrouped": _ungrouped_layer,
    "vanilla": _vanilla_layer,
    "vanilla_sharded": _vanilla_sharded_layer,
    "full_rank": _full_rank_layer,
}

_END_MOVES: dict[str, Callable[[LlamaConfig, TensorAxis], Iterable[Move]]] = {
    "bottleneck": _bottleneck_ends,
    "bottleneck_ungrouped": _bottleneck_ends,
    "vanilla": _full_rank_ends,
    "vanilla_sharded": _full_rank_ends,
    "full_rank": _full_rank_ends,
}
