"""What a decoder must be for its tensor axis to be exact; asked before any process group starts."""

import torch
from torch import nn
from torch.func import functional_call

from lightning_boost.mesh import legal_tensor_sizes
from lightning_boost.model.low_rank import LowRankLinear
from lightning_boost.model.norm import normalize
from lightning_boost.tensor_parallel.layout import Decoder


def legal_sizes(decoder: Decoder) -> list[int]:
    """Return the tensor sizes that divide the decoder's heads, key/value heads and hidden features."""
    return legal_tensor_sizes(*decoder.attention_heads, decoder.hidden_size)


def check_tensor_size(decoder: Decoder, size: int) -> None:
    """Check that every process gets whole heads and an equal share of the hidden features.

    Raises:
        ValueError: If one of the counts is not a multiple of ``size``.
    """
    heads, key_value_heads = decoder.attention_heads
    counts = {
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "hidden_size": decoder.hidden_size,
    }
    for name, count in counts.items():
        if count % size:
            raise ValueError(
                f"{name} ({count}) must be a multiple of tensor_parallel_size ({size});"
                f" legal sizes: {', '.join(map(str, legal_sizes(decoder)))}."
            )


def check_projection(module: nn.Module, name: str) -> None:
    """Check that a projection is a factor pair.

    Raises:
        ValueError: If it is anything else.
    """
    if not isinstance(module, LowRankLinear):
        raise ValueError(
            f"{name} is a {type(module).__name__} and must be a LowRankLinear: scheme 'bottleneck' cuts the model at"
            " the bottleneck of its factor pairs. Replace the projection by a LowRankLinear."
        )


def check_ends(decoder: Decoder) -> None:
    """Check that the embedding and the head are plain ones with weights of their own.

    Raises:
        ValueError: If they are of another class, the head has a bias, or they share a weight.
    """
    layout = decoder.layout
    embedding, head = decoder.part(layout.embedding), decoder.part(layout.head)
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
        raise ValueError(f"{layout.embedding} is a {type(embedding).__name__} and must be a torch.nn.Embedding.")
    if type(head) is not nn.Linear or head.bias is not None:
        raise ValueError(f"{layout.head} is a {type(head).__name__} and must be a torch.nn.Linear without a bias.")
    if embedding.weight is head.weight:
        raise ValueError(
            f"{layout.embedding} and {layout.head} share one weight, which cannot be split for both yet."
            " Give the head a weight of its own (tie_word_embeddings: false), or set tensor_parallel_size to 1."
        )


def norm_eps(norm: nn.Module, name: str) -> float:
    """Return ``eps`` of an RMSNorm, whatever its class, after trying that it is one.

    The module is run on values made for the purpose, small ones among them so that ``eps`` shows: a norm of another
    kind, with a mean, a bias or an offset weight, would train a different network without a word.

    Raises:
        ValueError: If the module does not compute ``weight · x · (mean(x²) + eps)^-½``.
    """
    eps = getattr(norm, "eps", None) or getattr(norm, "variance_epsilon", None)
    parameters = dict(norm.named_parameters())
    if isinstance(eps, float) and list(parameters) == ["weight"] and parameters["weight"].dim() == 1:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(parameters["weight"].shape, generator=generator)
        x = torch.randn(2, len(weight), generator=generator) * torch.tensor([[1.0], [eps**0.5]]) + 0.3 * eps**0.5
        if torch.allclose(functional_call(norm, {"weight": weight}, x), weight * normalize(x, eps), rtol=1e-3):
            return eps
    raise ValueError(
        f"{name} is a {type(norm).__name__} and must be an RMSNorm, weight · x · (mean(x²) + eps)^-½: only its scale"
        " can be applied after the sum over processes. Replace it by torch.nn.RMSNorm with an explicit eps."
    )
