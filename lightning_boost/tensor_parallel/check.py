"""What a decoder must be for its tensor axis to be exact; asked before any process group starts."""

import torch
from torch import nn
from torch.func import functional_call

from lightning_boost.layout import Decoder
from lightning_boost.mesh import legal_tensor_sizes
from lightning_boost.model.factor_pair import factor_names, find_activation
from lightning_boost.model.low_rank import ACTIVATIONS
from lightning_boost.model.norm import normalize

WHOLE_CHANNEL_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)


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


def check_projection(module: nn.Module, name: str) -> None:
    """Check that a projection is a dense linear or a pair of factors, and nothing more.

    Raises:
        ValueError: If it is neither, computes something else than its factors tell, or hooks are registered on it.
    """
    is_pair, class_name = factor_names(module) is not None, type(module).__name__
    if not is_pair and type(module) is not nn.Linear:
        raise ValueError(
            f"{name} is a {class_name} and must be a torch.nn.Linear, not a subclass, or hold two factors and nothing"
            " else, in a form of docs/your_own_model.md, as a LowRankLinear does. Replace it by one."
        )
    check_no_hooks(module, name)
    if is_pair and find_activation(module) is None:
        raise ValueError(
            f"{name} is a {class_name} and must compute B σ(A x) + bias, σ none or one of {', '.join(ACTIVATIONS)}: its"
            " own forward would not be run. It gave something else when it was tried."
        )


def check_no_hooks(module: nn.Module, name: str) -> None:
    """Check that replacing a module loses nothing that was registered on it or inside it.

    Raises:
        ValueError: If there are forward or backward hooks.
    """
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for inner_name, inner in module.named_modules(prefix=name):
        if any(getattr(inner, kind) for kind in kinds):
            raise ValueError(
                f"{inner_name} has hooks, and is replaced by its parallel twin, which has none. Register them after the"
                " Trainer has set up (on_fit_start), or set tensor_parallel_size to 1."
            )


def check_head_norm(norm: nn.Module, name: str, head_size: int) -> None:
    """Check that a norm of attention heads is an RMSNorm over each head.

    Raises:
        ValueError: If it is no RMSNorm, or goes over more than a head: over features of other processes.
    """
    norm_eps(norm, name)
    width = len(norm.get_parameter("weight"))
    if width != head_size:
        raise ValueError(
            f"{name} is a norm over {width} features and must be one over a head's {head_size}: with"
            " tensor_parallel_size above 1 a process has only its own heads. Set tensor_parallel_size to 1."
        )


def check_ends(decoder: Decoder) -> None:
    """Check that the embedding and the head are plain ones.

    Raises:
        ValueError: If they are of another class, the head has a bias, the embedding a rule for its gradients, or hooks
            are registered on them.
    """
    layout = decoder.layout
    embedding, head = decoder.part(layout.embedding), decoder.part(layout.head)
    if type(embedding) is not nn.Embedding:
        raise ValueError(f"{layout.embedding} is a {type(embedding).__name__} and must be a torch.nn.Embedding.")
    if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
        raise ValueError(f"{layout.embedding} must have none of max_norm, scale_grad_by_freq and sparse.")
    if type(head) is not nn.Linear or head.bias is not None:
        raise ValueError(f"{layout.head} is a {type(head).__name__} and must be a torch.nn.Linear without a bias.")
    for name in (layout.embedding, layout.head):
        check_no_hooks(decoder.part(name), name)


def check_whole_model(decoder: Decoder, placed: set[str]) -> None:
    """Check that nothing in the model is left that would go its own way on each process.

    Args:
        decoder: The model.
        placed: Names of the parameters that the scheme places.

    Raises:
        ValueError: If there are other parameters, or a dropout of whole channels.
    """
    others = [name for name, _ in decoder.root.named_parameters() if name not in placed]
    if others:
        raise ValueError(
            f"parameters {', '.join(others[:5])} of {type(decoder.root).__name__} belong to no part of the decoder that"
            " its layout names, and cannot be trained with tensor_parallel_size above 1 yet. Remove them, or set"
            " tensor_parallel_size to 1."
        )
    for name, module in decoder.root.named_modules():
        if isinstance(module, WHOLE_CHANNEL_DROPOUTS) and module.p > 0:
            raise ValueError(
                f"{name} is a {type(module).__name__} and must be a torch.nn.Dropout with tensor_parallel_size above 1:"
                " what it drops as one piece may lie on several processes, which draw different masks."
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
            check_no_hooks(norm, name)
            return eps
    if isinstance(norm, nn.RMSNorm) and norm.eps is None:
        raise ValueError(f"{name} is an RMSNorm whose eps is None and must be given: torch.nn.RMSNorm(…, eps=1e-6).")
    raise ValueError(
        f"{name} is a {type(norm).__name__} and must be an RMSNorm, weight · x · (mean(x²) + eps)^-½: only its scale"
        " can be applied after the sum over processes. Replace it by torch.nn.RMSNorm with an explicit eps."
    )
