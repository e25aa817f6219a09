"""What schemes share of putting parallel twins into the places of modules."""

from torch.nn import Embedding, Linear, Module

from lightning_boost.collectives import group_index, group_size
from lightning_boost.layout import Decoder
from lightning_boost.model.factor_pair import JOINED
from lightning_boost.model.initialization import set_module
from lightning_boost.tensor_parallel.bottleneck import FactorPair, ReplicatedCrossing
from lightning_boost.tensor_parallel.check import norm_eps
from lightning_boost.tensor_parallel.dense import Rows
from lightning_boost.tensor_parallel.full_rank import GatheredEmbedding, ReplicatedNorm
from lightning_boost.tensor_parallel.heads import HeadNorm, count_own_heads
from lightning_boost.tensor_parallel.joined import DownPlace, UpPlace
from lightning_boost.tensor_parallel.placement import present_head_norms
from lightning_boost.tensor_parallel.vocabulary import (
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    VocabularyParallelLoss,
)


def own_rows(decoder: Decoder, name: str, out_features: int, group: str) -> Rows | None:
    """Return the rows of a key/value projection that this process reads, if it has fewer heads than processes."""
    return decoder.own_key_value_rows(name, out_features, group_size(group), group_index(group))


def linear_at(layer: Module, name: str) -> Linear:
    """Return a part that was checked to be dense."""
    module = layer.get_submodule(name)
    assert isinstance(module, Linear)
    return module


def put(layer: Module, name: str, twin: Module) -> None:
    """Put a projection's twin in its place; in two places, where it is two modules."""
    down, _, up = name.partition(JOINED)
    if not up:
        set_module(layer, name, twin)
        return
    assert isinstance(twin, FactorPair)
    set_module(layer, down, DownPlace(twin, down.rpartition(".")[2]))
    set_module(layer, up, UpPlace(twin, up.rpartition(".")[2]))


def swap_crossings(decoder: Decoder, layer: Module) -> None:
    """Swap what latents go through on their way into a layer."""
    for name, crossing in decoder.crossings(layer).items():
        set_module(layer, name, ReplicatedCrossing(crossing))


def swap_heads(decoder: Decoder, layer: Module, group: str) -> None:
    """Let a layer's attention count and norm this process's heads."""
    swap_head_norms(decoder, layer, group, is_sharded=True)
    count_own_heads(decoder.attention(layer), decoder.attention_heads, group_size(group))


def swap_head_norms(decoder: Decoder, layer: Module, group: str, *, is_sharded: bool) -> None:
    """Swap the norms of heads, for a process that has some of the heads or all of them."""
    for name, norm in present_head_norms(decoder, layer).items():
        chunk = name.rpartition(".")[2]
        set_module(layer, name, HeadNorm(norm, norm_eps(norm, name), group, chunk, is_sharded=is_sharded))


def swap_norm(owner: Module, name: str, group: str, chunk: str) -> None:
    """Put in a norm's place the same norm of a whole hidden state."""
    norm = owner.get_submodule(name)
    set_module(owner, name, ReplicatedNorm(norm, norm_eps(norm, name), group, chunk))


def swap_whole_ends(decoder: Decoder, group: str) -> None:
    """Swap embedding, final norm, head and loss where the hidden stream is whole on every process."""
    embedding = decoder.part(decoder.layout.embedding)
    assert isinstance(embedding, Embedding)
    table: Module
    if decoder.is_tied:
        table = VocabularyParallelEmbedding(embedding, group, shard_features=False)
    else:
        table = GatheredEmbedding(embedding, group)
    swap_head(decoder, group)
    set_module(decoder.root, decoder.layout.embedding, table)
    swap_norm(decoder.root, decoder.layout.final_norm, group, "head")


def swap_head(decoder: Decoder, group: str) -> None:
    """Split the head, and the model's own loss, over the vocabulary."""
    layout = decoder.layout
    set_module(decoder.root, layout.head, VocabularyParallelHead(linear_at(decoder.root, layout.head), group))
    loss = decoder.own_loss
    if layout.loss and loss is not None:
        set_module(decoder.root, layout.loss, VocabularyParallelLoss(loss, group))
