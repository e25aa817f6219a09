"""Documents packed into sequences of one length."""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_boost.config import IGNORED_LABEL
from lightning_boost.data.records import Document, Record
from lightning_boost.data.tokenizers import Tokenizer

Packing = Literal["across_documents", "separate_documents", "one_document"]
PackedSequence = dict[str, Tensor]


@dataclass
class Packer:
    """Makes sequences of ``T`` tokens of documents, each closed by its end token.

    ======================  ============================================================================================
    ``across_documents``    documents end to end, cut every ``T`` tokens; attention crosses from one to the next
    ``separate_documents``  the same sequences, and ``document_ids``, which keep documents apart; the first token of a
                            document is not predicted
    ``one_document``        a sequence for each document with text: of a longer one the first ``T - 1`` tokens and the
                            end token
    ======================  ============================================================================================

    A sequence is a dict of ``input_ids`` and ``labels``, each ``[T]``, and where documents are kept apart
    ``document_ids`` ``[T]``, which count the documents of the sequence from 0. The model shifts the labels.

    Raises:
        ValueError: If the length is below 2, or the packing is none of these.
    """

    tokenizer: Tokenizer
    sequence_length: int
    """``T``, at least 2."""

    packing: Packing = "across_documents"
    num_skipped: int = field(default=0, init=False)
    """Documents that were left out."""

    def __post_init__(self) -> None:
        if self.sequence_length < 2:
            raise ValueError(
                f"sequence_length ({self.sequence_length}) must be at least 2: each token predicts the next."
            )
        choices = get_args(Packing)
        if self.packing not in choices:
            raise ValueError(f"packing ({self.packing!r}) must be one of {', '.join(map(repr, choices))}.")

    def pack(self, documents: Iterable[Any], *, fill_last: bool) -> Iterator[PackedSequence]:
        """Yield the sequences of ``documents``.

        Args:
            documents: Texts, read as they are needed.
            fill_last: Whether a last sequence that is not whole is filled up, or else left out.
        """
        if self.packing == "one_document":
            return self._one_each(documents)
        return self._end_to_end(documents, fill_last)

    def empty(self) -> PackedSequence:
        """Return a sequence that predicts nothing."""
        return self._sequence([], [], [])

    @property
    def finding(self) -> str:
        """What is wrong where documents give no sequence."""
        return "the documents hold no text."

    def _one_each(self, documents: Iterable[str]) -> Iterator[PackedSequence]:
        for text in documents:
            ids = self.tokenizer.encode(text)
            if ids:
                kept = [*ids[: self.sequence_length - 1], self.tokenizer.end_of_document]
                yield self._sequence(kept, kept, [0] * len(kept))

    def _end_to_end(self, documents: Iterable[str], fill_last: bool) -> Iterator[PackedSequence]:
        ids: list[int] = []
        owners: list[int] = []
        for owner, text in enumerate(documents):
            ids += [*self.tokenizer.encode(text), self.tokenizer.end_of_document]
            owners += [owner] * (len(ids) - len(owners))
            whole = len(ids) - len(ids) % self.sequence_length
            for start in range(0, whole, self.sequence_length):
                part = slice(start, start + self.sequence_length)
                yield self._sequence(ids[part], ids[part], owners[part])
            ids, owners = ids[whole:], owners[whole:]
        if ids and fill_last:
            yield self._sequence(ids, ids, owners)

    def _sequence(self, ids: list[int], targets: list[int], owners: list[int]) -> PackedSequence:
        """Return a sequence of at most ``T`` ids, with their labels and the documents they belong to, filled up.

        The fill stands behind the text, where no token of the text looks, and predicts nothing: it needs no mask.
        """
        missing = self.sequence_length - len(ids)
        input_ids = torch.tensor(ids + [self.tokenizer.end_of_document] * missing)
        labels = torch.tensor(targets + [IGNORED_LABEL] * missing)
        if self.packing != "separate_documents":
            return {"input_ids": input_ids, "labels": labels}
        # the fill counts as part of the last document
        owner = torch.tensor(owners + (owners[-1:] or [0]) * missing)
        is_first = owner.diff(prepend=owner[:1] - 1) != 0
        # what stands in front of it is another document, or nothing
        labels = labels.masked_fill(is_first, IGNORED_LABEL)
        return {"input_ids": input_ids, "labels": labels, "document_ids": is_first.cumsum(0) - 1}


@dataclass
class RecordPacker(Packer):
    """Makes sequences of whole records, in which the answers alone are predicted.

    ======================  ============================================================================================
    ``separate_documents``  as many records as fit, one after another, kept apart by ``document_ids``
    ``one_document``        a sequence for each record
    ======================  ============================================================================================

    A record of more than ``T`` tokens is cut at its end; one whose answers are then cut away is left out. A token that
    holds the prompt's end and the answer's beginning counts as the answer's.

    Raises:
        ValueError: If the length is below 2, or the packing is none of these.
    """

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing == "across_documents":
            raise ValueError(
                f"packing ({self.packing!r}) must be 'separate_documents' or 'one_document' with records of answers: no"
                " answer may be learnt from the record before it."
            )

    @override
    def pack(self, documents: Iterable[Record], *, fill_last: bool) -> Iterator[PackedSequence]:
        """Yield the sequences of ``documents``; each of them is filled up, and so is the last one."""
        most = 1 if self.packing == "one_document" else self.sequence_length
        ids: list[int] = []
        targets: list[int] = []
        owners: list[int] = []
        for owner, record in enumerate(documents):
            record_ids, record_targets = self._encode(record)
            # nothing predicts the first token
            if all(target == IGNORED_LABEL for target in record_targets[1:]):
                self.num_skipped += 1
                continue
            if len(ids) >= most or len(ids) + len(record_ids) > self.sequence_length:
                yield self._sequence(ids, targets, owners)
                ids, targets, owners = [], [], []
            ids += record_ids
            targets += record_targets
            owners += [owner] * len(record_ids)
        if ids:
            yield self._sequence(ids, targets, owners)

    @property
    @override
    def finding(self) -> str:
        return (
            f"there is no record whose answer begins within sequence_length ({self.sequence_length} tokens); give"
            " others, or set it higher."
        )

    def _encode(self, record: Record) -> tuple[list[int], list[int]]:
        """Return ids and labels of a record, at most ``T``."""
        ids, ends = self.tokenizer.encode_with_ends(record.text)
        is_learnt = [any(start < end <= stop for start, stop in record.answers) for end in ends]
        if record.needs_end:
            ids, is_learnt = [*ids, self.tokenizer.end_of_document], [*is_learnt, True]
        targets = [token if learnt else IGNORED_LABEL for token, learnt in zip(ids, is_learnt, strict=True)]
        return ids[: self.sequence_length], targets[: self.sequence_length]


class PackedDataset(Dataset[PackedSequence]):
    """All sequences of some documents, in memory; the last one is filled up.

    Args:
        documents: Texts or records, in order.
        packer: Makes sequences of them.

    Raises:
        ValueError: If there is nothing to learn.
    """

    def __init__(self, documents: Sequence[Document], packer: Packer) -> None:
        sequences = list(packer.pack(documents, fill_last=True))
        end = packer.tokenizer.end_of_document
        if all(bool((sequence["input_ids"] == end).all()) for sequence in sequences):
            raise ValueError(packer.finding)
        self.packer = packer
        self.num_empty = 0
        self._columns = {name: torch.stack([sequence[name] for sequence in sequences]) for name in sequences[0]}

    def padded_to(self, multiple: int) -> "PackedDataset":
        """Return the same sequences, and as many that predict nothing as make their number a multiple.

        Replicas then get equally many without one being counted twice.
        """
        padded = copy(self)
        padded.num_empty = -len(self) % multiple
        return padded

    def __len__(self) -> int:
        return len(self._columns["input_ids"]) + self.num_empty

    @override
    def __getitem__(self, index: int) -> PackedSequence:
        """Return a sequence."""
        index = range(len(self))[index]  # raises where there is none, which ends a loop
        if index >= len(self) - self.num_empty:
            return self.packer.empty()
        return {name: column[index] for name, column in self._columns.items()}
