"""What the collectives of the tensor axis move, by formula.

Each scheme is a function that lists the collectives of one layer, and of the ends of the model, as ``Move``; whoever
adds a scheme adds its two functions to ``_LAYER_MOVES`` and ``_END_MOVES``, and what closes a layer to
``_CLOSES_LAYER``.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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

END_CHUNKS = ("embedding", "head", "loss", "logits")
"""Chunks outside the layers."""

Output = Literal["loss", "logits"]
"""What a forward gives: the model's own loss, or logits that a module takes one of."""


class Move(NamedTuple):
    """One collective of the tensor axis, with what each process hands to it."""

    operation: str
    chunk: str
    pass_: str
    width: int
    """Values for each token."""

    fixed: int
    """Values whatever the tokens are."""

    dtype: torch.dtype


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
    config: LlamaConfig, layer: int, axis: TensorAxis, *, recompute: str = "none", scheme: str | None = None
) -> list[Move]:
    """Return the collectives of a decoder layer, forward and backward.

    What a layer that is run again in backward repeats is listed again as what it is, a collective of forward.

    Args:
        config: The model; every parameter is trained.
        layer: Index of the layer.
        axis: The tensor axis.
        recompute: ``"none"``, ``"low_rank"`` or ``"block"``, if the layer is run again.
        scheme: How the model is split; ``None``: as the strategy would.
    """
    scheme = scheme or scheme_of(config)
    moves = [move for chunk in CHUNKS for move in _LAYER_MOVES[scheme](config, layer, chunk, axis)]
    return moves + (list(_repeated_by_block(config, moves, scheme)) if recompute == "block" else [])


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


def add_up(moves: Iterable[Move], tokens: int) -> dict[tuple[str, str, str], Volume]:
    """Return what the collectives of a forward over so many tokens move, by (operation, chunk, pass)."""
    total: dict[tuple[str, str, str], Volume] = {}
    for move in moves:
        key = (move.operation, move.chunk, move.pass_)
        launches, values, num_bytes = total.get(key, (0, 0, 0))
        more = move.width * tokens + move.fixed
        total[key] = Volume(launches + 1, values + more, num_bytes + more * move.dtype.itemsize)
    return total


def layer_traffic(
    config: LlamaConfig, layer: int, *, tensor_parallel_size: int, statistic_columns: int
) -> Counter[tuple[str, str, str]]:
    """Return the values per token that one process hands to the tensor axis's collectives in a decoder layer.

    Keys are (operation, chunk, pass), as in a ``CollectiveLog``. Left out is what does not grow with tokens: the row of
    γ in a gather, the gradients of replicated key/value projections.

    Args:
        config: The model.
        layer: Index of the layer.
        tensor_parallel_size: Above 1.
        statistic_columns: Columns that the sum of squares takes beside what it travels with.
    """
    axis = TensorAxis(size=tensor_parallel_size, gemm_columns=statistic_columns, stream_columns=statistic_columns)
    traffic: Counter[tuple[str, str, str]] = Counter()
    for move in layer_moves(config, layer, axis):
        if move.width:
            traffic[move.operation, move.chunk, move.pass_] += move.width
    return traffic


def _repeated_by_block(config: LlamaConfig, moves: Iterable[Move], scheme: str) -> Iterator[Move]:
    """Yield what a second run of a whole layer repeats, up to the last tensor that backward asks for.

    That is the input of the last product. What closes the layer behind it is not run again, unless dropout's mask,
    which backward asks for too, comes after.
    """
    for move in moves:
        closes_layer = move.chunk == "down" and move.operation == _CLOSES_LAYER[scheme]
        if move.pass_ == "forward" and (not closes_layer or config.hidden_dropout > 0):
            yield move


def _bottleneck_layer(config: LlamaConfig, layer: int, chunk: str, axis: TensorAxis) -> Iterator[Move]:
    hidden, share = config.hidden_size, config.hidden_size // axis.size
    sizes = [config.bottleneck_size_of(layer, projection) for projection in CHUNKS[chunk]]
    width, has_norm = sum(size for size in sizes if size is not None), len(sizes) > 1
    gemm, stream = axis.gemm_dtype, axis.stream_dtype
    if width:
        yield Move("all_reduce", chunk, "forward", width + has_norm * axis.gemm_columns, 0, gemm)
        yield Move("all_reduce", chunk, "backward", width, 0, gemm)
    if None in sizes and has_norm:
        # γ is one more row
        yield Move("all_gather", chunk, "forward", share, share, stream)
        yield Move("reduce_scatter", chunk, "backward", hidden + axis.size * axis.stream_columns, 0, stream)
    elif None in sizes:
        yield Move("reduce_scatter", chunk, "forward", hidden, 0, gemm)
        yield Move("all_gather", chunk, "backward", share, 0, gemm)
    yield from _replicated_heads(config, layer, chunk, axis)


def _full_rank_layer(config: LlamaConfig, layer: int, chunk: str, axis: TensorAxis) -> Iterator[Move]:
    has_norm = len(CHUNKS[chunk]) > 1
    if has_norm:
        yield Move("all_reduce", chunk, "backward", config.hidden_size, 0, axis.stream_dtype)
    else:
        yield Move("all_reduce", chunk, "forward", config.hidden_size, 0, axis.gemm_dtype)
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


_LAYER_MOVES: dict[str, Callable[[LlamaConfig, int, str, TensorAxis], Iterable[Move]]] = {
    "bottleneck": _bottleneck_layer,
    "full_rank": _full_rank_layer,
}

_END_MOVES: dict[str, Callable[[LlamaConfig, TensorAxis], Iterable[Move]]] = {
    "bottleneck": _bottleneck_ends,
    "full_rank": _full_rank_ends,
}

_CLOSES_LAYER = {"bottleneck": "reduce_scatter", "full_rank": "all_reduce"}
"""What sums a layer's last product over processes; the pair's sum of ``bottleneck`` comes before that product."""
