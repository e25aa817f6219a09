"""Several documents in one sequence, each of which sees only itself."""

import torch
from torch import Tensor


def document_mask(document_ids: Tensor) -> Tensor:
    """Return which tokens each one sees, ``[B, 1, T, T]``: itself and those before it in its document.

    Args:
        document_ids: ``[B, T]``.
    """
    is_same = document_ids[:, :, None] == document_ids[:, None, :]
    return is_same.tril()[:, None]


def positions_in_documents(input_ids: Tensor, document_ids: Tensor | None) -> Tensor:
    """Return each token's place, ``[B, T]`` counted from its document's first token, or ``[T]`` if there is but one.

    Args:
        input_ids: ``[B, T]``.
        document_ids: ``[B, T]``, or ``None``.
    """
    places = torch.arange(input_ids.shape[-1], device=input_ids.device)
    if document_ids is None:
        return places
    begins = document_ids.diff(dim=-1, prepend=document_ids[:, :1] - 1) != 0
    return places - (places * begins).cummax(dim=-1).values
