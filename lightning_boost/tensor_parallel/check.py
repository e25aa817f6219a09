"""What a decoder must be for its tensor axis to be exact; asked before any process group starts."""

import torch
from torch import nn
from torch.func import functional_call

from lightning_boost.mesh import legal_tensor_sizes
from lightning_boost.model.norm import normalize
from lightning_boost.tensor_parallel.layout import Decoder


def legal_sizes(decoder: Decoder) -> list[int]:
    """Return the tensor sizes that give every process whole heads and as many hidden features.

    They divide the attention heads and the hidden features. They divide the key/value heads as well, or are a multiple
    of them: several processes then read the same one.
    """
    heads, key_value_heads = decoder.attention_heads
    sizes = legal_tensor_sizes(heads, decoder.hidden_size)
    return [size for size in sizes if key_value_heads % size == 0 or size % key_value_heads == 0]


def check_tensor_size(decoder: Decoder, size: int) -> None:
    """Check that every process gets whole heads and an equal share of the hidden features.

    Raises:
        ValueError: If ``size`` is not legal.
    """
    heads, key_value_heads = decoder.attention_heads
    legal = f"legal sizes: {', '.join(map(str, legal_sizes(decoder)))}."
    for name, count in {"num_attention_heads": heads, "hidden_size": decoder.hidden_size}.items():
        if count % size:
            raise ValueError(f"{name} ({count}) must be a multiple of tensor_parallel_size ({size}); {legal}")
    if key_value_heads % size and size % key_value_heads:
        raise ValueError(
            f"num_key_value_heads ({key_value_heads}) must be a multiple of tensor_parallel_size ({size}) or divide it;"
            f" {legal}"
        )


def check_projection(module: nn.Module, name: str, *kinds: type[nn.Module]) -> None:
    """Check that a projection is one of the layers that the scheme splits.

    Raises:
        ValueError: If it is anything else.
    """
    if type(module) not in kinds:
        raise ValueError(
            f"{name} is a {type(module).__name__} and must be a {' or a '.join(kind.__name__ for kind in kinds)}."
            " Replace the projection by one."
        )


def check_ends(decoder: Decoder) -> None:
    """Check that the embedding and the head are plain ones.

    Raises:
        ValueError: If they are of another class, or the head has a bias.
    """
    layout = decoder.layout
    embedding, head = decoder.part(layout.embedding), decoder.part(layout.head)
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
        raise ValueError(f"{layout.embedding} is a {type(embedding).__name__} and must be a torch.nn.Embedding.")
    if type(head) is not nn.Linear or head.bias is not None:
        raise ValueError(f"{layout.head} is a {type(head).__name__} and must be a torch.nn.Linear without a bias.")


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
