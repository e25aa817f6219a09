"""Documents packed into sequences of one length."""

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_boost.config import IGNORED_LABEL
from lightning_boost.data.tokenizers import Tokenizer


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Documents laid end to end, each closed by an end-of-document token, and cut every ``T`` tokens.

    Attention crosses from one document to the next. The last sequence is filled up with end-of-document tokens whose
    labels are ignored, so every token of the text is read exactly once; all but the first of a sequence are predicted.

    Args:
        documents: Texts, in order.
        tokenizer: Turns them into token ids.
        sequence_length: ``T``, at least 2.

    Raises:
        ValueError: If the length is below 2 or there is no text.
    """

    def __init__(self, documents: Sequence[str], tokenizer: Tokenizer, sequence_length: int) -> None:
        if sequence_length < 2:
            raise ValueError(f"sequence_length ({sequence_length}) must be at least 2: each token predicts the next.")
        ids = [token for text in documents for token in (*tokenizer.encode(text), tokenizer.end_of_document)]
        if len(ids) <= len(documents):
            raise ValueError("the documents hold no text.")
        self.num_tokens = len(ids)
        missing = -len(ids) % sequence_length
        shape = (-1, sequence_length)
        self._input_ids = torch.tensor(ids + [tokenizer.end_of_document] * missing).view(shape)
        self._labels = torch.tensor(ids + [IGNORED_LABEL] * missing).view(shape)

    def padded_to(self, multiple: int) -> "PackedDataset":
        """Return the same sequences, and as many that hold nothing as make their number a multiple.

        Replicas then get equally many without one being counted twice.
        """
        padded = copy(self)
        missing = -len(self) % multiple
        empty = self._input_ids[:1].expand(missing, -1)
        padded._input_ids = torch.cat([self._input_ids, empty])
        padded._labels = torch.cat([self._labels, torch.full_like(empty, IGNORED_LABEL)])
        return padded

    def __len__(self) -> int:
        return len(self._input_ids)

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``labels``, each ``[T]``; the model shifts the labels."""
        return {"input_ids": self._input_ids[index], "labels": self._labels[index]}
