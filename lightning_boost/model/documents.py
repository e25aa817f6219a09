"""Several documents in one sequence, each of which sees only itself."""

import torch
from torch import Tensor


def number_documents(document_ids: Tensor) -> Tensor:
    """Count the documents of each sequence from 0, ``[B, T]``: another one begins wherever the id changes.

    Args:
        document_ids: ``[B, T]``.
    """
    return (document_ids.diff(dim=-1, prepend=document_ids[:, :1]) != 0).cumsum(dim=-1)


def document_mask(numbers: Tensor) -> Tensor:
    """Return which tokens each one sees, ``[B, 1, T, T]``: itself and those before it in its document."""
    is_same = numbers[:, :, None] == numbers[:, None, :]
    return is_same.tril()[:, None]


def document_positions(numbers: Tensor) -> Tensor:
    """Return each token's place, ``[B, T]``, counted from its document's first token."""
    places = torch.arange(numbers.shape[-1], device=numbers.device)
    begins = numbers.diff(dim=-1, prepend=numbers[:, :1] - 1) != 0
    return places - (places * begins).cummax(dim=-1).values


def document_lengths(numbers: Tensor) -> Tensor:
    """Return how many tokens the document of each token has, ``[B, T]``."""
    return torch.zeros_like(numbers).scatter_add(-1, numbers, torch.ones_like(numbers)).gather(-1, numbers)
