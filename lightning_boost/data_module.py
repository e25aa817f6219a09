"""Text as a LightningDataModule."""

import os
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_boost.data.packing import PackedDataset, Packer, Packing, RecordPacker
from lightning_boost.data.records import Document, Records, make_reader
from lightning_boost.data.sources import builtin_documents, check_files, hold_out, read_documents
from lightning_boost.data.streams import DealtStream, PackedStream, StreamSource, check_streams
from lightning_boost.data.tokenizers import TokenizerFile, load_tokenizer
from lightning_boost.options import plain

_HELD_OUT_SHARE = 0.1

Loader = DataLoader[dict[str, Tensor]]


class TextDataModule(LightningDataModule):
    """Packed sequences from the built-in text, from local files, or from anything that ``datasets`` streams.

    A batch holds ``input_ids`` and ``labels``, each ``[B, T]``, and ``document_ids`` where documents are kept apart.
    Data in memory is shuffled by Lightning, streams in a window, both from the seed of ``seed_everything``; each
    replica sees its own part.

    Args:
        train_files: Files to train on: texts, one document each, or ``.jsonl``, one a line; none: the built-in text.
        train_streams: Instead of files, parts of a mixture that is read as it is needed.
        validation_files: Files to validate on; none: documents with a tenth of the text are held out (of streams,
            none). Several sets are given by name and logged as ``val_loss/name``; the one named ``""`` as ``val_loss``.
        validation_streams: Streams to validate on, read one after the other until they end or
            ``trainer.limit_val_batches`` is reached; logged as ``val_loss``, so files beside them need names.
        tokenizer: ``bytes``, or the path of a ``tokenizer.json``, or such a file with its end token and unused tokens.
        records: What a document is. ``text``: a text; ``prompt_answer`` and ``messages``: a record, whose answers alone
            are learnt.
        packing: ``across_documents``: documents end to end, attention crosses; ``separate_documents``: end to end, kept
            apart; ``one_document``: each document in a sequence of its own, cut or filled up. Records stay whole, and
            need one of the last two.
        sequence_length: ``T``, tokens of a sequence.
        batch_size: ``B``, sequences of a batch on each replica.

    Raises:
        ValueError: If a number is out of range, both files and streams are given, or the tokenizer cannot be used.
        FileNotFoundError: If a file does not exist, of a stream one of this machine's.
    """

    def __init__(
        self,
        *,
        train_files: str | Sequence[str] = (),
        train_streams: Sequence[StreamSource] = (),
        validation_files: str | Sequence[str] | Mapping[str, list[str]] = (),
        validation_streams: Sequence[StreamSource] = (),
        tokenizer: str | TokenizerFile = "bytes",
        records: Records = "text",
        packing: Packing = "across_documents",
        sequence_length: int = 256,
        batch_size: int = 8,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size ({batch_size}) must be at least 1.")
        self.save_hyperparameters(
            {
                "train_files": plain(train_files),
                "train_streams": plain(train_streams),
                "validation_files": plain(validation_files),
                "validation_streams": plain(validation_streams),
                "tokenizer": plain(tokenizer),
                "records": records,
                "packing": packing,
                "sequence_length": sequence_length,
                "batch_size": batch_size,
            }
        )
        self.train_files = _as_list(train_files)
        self.train_streams = list(train_streams)
        sets = validation_files if isinstance(validation_files, Mapping) else {"": _as_list(validation_files)}
        self.validation_files = {name: files for name, files in sets.items() if files}
        self.validation_streams = list(validation_streams)
        self._check_sources()
        self.tokenizer = load_tokenizer(tokenizer)
        self.reader = make_reader(records, tokenizer, self.tokenizer)
        if records != "text":
            self._check_records()
        self.packer = (Packer if records == "text" else RecordPacker)(self.tokenizer, sequence_length, packing)
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.train_set: PackedDataset | None = None
        self.held_out: dict[str, PackedDataset] = {}
        """Sets in memory to validate on, by name; the first has none."""

    def _check_sources(self) -> None:
        if self.train_files and self.train_streams:
            raise ValueError(
                "train_files and train_streams must not both be given: a file is a stream too (json, text)."
            )
        if self.validation_streams and "" in self.validation_files:
            raise ValueError(
                "validation_files must have names, {name: [file]}, beside validation_streams: they give val_loss."
            )
        check_files(chain(self.train_files, *self.validation_files.values()))
        check_streams(chain(self.train_streams, self.validation_streams))

    def _check_records(self) -> None:
        """Check that all that is read can hold records."""
        if not self.train_files and not self.train_streams:
            raise ValueError(
                f"train_files or train_streams must be given with records ({self.reader.kind!r}): the built-in text has"
                " none."
            )
        for path in chain(self.train_files, *self.validation_files.values()):
            if Path(path).suffix != ".jsonl":
                raise ValueError(
                    f"file {path} must be a .jsonl with records ({self.reader.kind!r}), an object a line with"
                    f" {self.reader.form}."
                )

    def check_ends(self, trainer: Trainer) -> None:
        """Check that a run of ``trainer`` ends.

        Raises:
            ValueError: If nothing would end it: streams have no end.
        """
        if self.train_streams and trainer.max_steps == -1 and trainer.limit_train_batches == 1.0:
            raise ValueError(
                f"trainer.max_steps ({trainer.max_steps}) must be given with train_streams: they begin anew when they"
                " end."
            )

    @property
    def vocab_size(self) -> int:
        """``V`` of the tokenizer, without what text never gives."""
        return self.tokenizer.vocab_size

    @property
    def validation_names(self) -> list[str]:
        """Names of the sets to validate on, in the order of their loaders."""
        return [*([""] if self.validation_streams else []), *self.held_out]

    @override
    def setup(self, stage: str) -> None:
        """Read and pack what is in memory, once."""
        if self.train_set is not None or self.held_out:
            return
        held_out = {name: read_documents(files, self.reader) for name, files in self.validation_files.items()}
        if not self.train_streams:
            documents: list[Document] = (
                read_documents(self.train_files, self.reader) if self.train_files else [*builtin_documents()]
            )
            if not held_out and not self.validation_streams:
                documents, held_out[""] = hold_out(documents, _HELD_OUT_SHARE)
            self.train_set = PackedDataset(documents, self.packer)
        self.held_out = {name: PackedDataset(documents, self.packer) for name, documents in held_out.items()}
        self._tell_skipped()

    @override
    def teardown(self, stage: str) -> None:
        """Tell what was left out of streams."""
        self._tell_skipped()

    def _tell_skipped(self) -> None:
        if self.packer.num_skipped:
            rank_zero_warn(
                f"{self.packer.num_skipped} record(s) were left out: their answers begin behind sequence_length"
                f" ({self.sequence_length} tokens)."
            )
        self.packer.num_skipped = 0

    @override
    def train_dataloader(self) -> Loader:
        """Return shuffled training batches, a short last one left out; those of streams go on without end.

        Raises:
            ValueError: If nothing would end a run on streams.
        """
        if self.train_set is not None:
            return self._loader(self.train_set, shuffle=True)
        if self.trainer:
            self.check_ends(self.trainer)
        replicas, replica = self._replica
        # as Lightning's sampler does; of seeds of their own, replicas would draw the same documents
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        stream = PackedStream(
            self.train_streams, self.packer, reader=self.reader, seed=seed, num_replicas=replicas, replica=replica
        )
        return DataLoader(stream, batch_size=self.batch_size, drop_last=True)

    @override
    def val_dataloader(self) -> list[Loader]:
        """Return every held-out sequence once, over all replicas together; a loader for each set."""
        replicas, _ = self._replica
        padded = [packed.padded_to(replicas) for packed in self.held_out.values()]
        return [*self._stream_loaders(), *(self._loader(packed, shuffle=False) for packed in padded)]

    @override
    def test_dataloader(self) -> list[Loader]:
        """Return the held-out sequences."""
        return self.val_dataloader()

    @override
    def predict_dataloader(self) -> list[Loader]:
        """Return the held-out sequences, and of data in memory none beside them."""
        return [*self._stream_loaders(), *(self._loader(packed, shuffle=False) for packed in self.held_out.values())]

    def _stream_loaders(self) -> list[Loader]:
        if not self.validation_streams:
            return []
        replicas, replica = self._replica
        stream = DealtStream(
            self.validation_streams, self.packer, reader=self.reader, num_replicas=replicas, replica=replica
        )
        return [DataLoader(stream, batch_size=self.batch_size)]

    @property
    def _replica(self) -> tuple[int, int]:
        """How many replicas there are, and which of them this is."""
        sampling: dict[str, Any] = (self.trainer.distributed_sampler_kwargs if self.trainer else None) or {}
        return sampling.get("num_replicas", 1), sampling.get("rank", 0)

    def _loader(self, dataset: PackedDataset, *, shuffle: bool) -> Loader:
        return DataLoader(dataset, batch_size=self.batch_size, shuffle=shuffle, drop_last=shuffle)


def _as_list(files: str | Sequence[str]) -> list[str]:
    return [files] if isinstance(files, str) else list(files)
