"""Text as a LightningDataModule."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from lightning.pytorch import LightningDataModule
from torch import Tensor, initial_seed
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_boost.data.packing import PackedDataset
from lightning_boost.data.sources import builtin_documents, check_files, hold_out, read_documents
from lightning_boost.data.streams import PackedStream, StreamSource
from lightning_boost.data.tokenizers import load_tokenizer

_HELD_OUT_SHARE = 0.1

Loader = DataLoader[dict[str, Tensor]]


class TextDataModule(LightningDataModule):
    """Packed sequences from the built-in text, from local files, or from anything that ``datasets`` streams.

    A batch holds ``input_ids`` and ``labels``, each ``[B, T]``. Data in memory is shuffled by Lightning, streams in a
    window, both from the seed of ``seed_everything``; each replica sees its own part.

    Args:
        train_files: Files to train on: texts, one document each, or ``.jsonl``, one a line; none: the built-in text.
        train_streams: Instead of files, parts of a mixture that is read as it is needed.
        validation_files: Files to validate on; none: documents with a tenth of the text are held out (of streams,
            none). Several sets are given by name and logged as ``val_loss/name``; the one named ``""`` as ``val_loss``.
        tokenizer: ``bytes``, or the path of a ``tokenizer.json``.
        end_token: The vocabulary's token that closes a document; none: it is looked for.
        sequence_length: ``T``, tokens of a sequence.
        batch_size: ``B``, sequences of a batch on each replica.
        shuffle_window: Documents of a stream among which the next one is drawn.

    Raises:
        ValueError: If a number is out of range, both files and streams are given, or the tokenizer cannot be used.
        FileNotFoundError: If a file does not exist.
    """

    def __init__(
        self,
        *,
        train_files: str | Sequence[str] = (),
        train_streams: Sequence[StreamSource] = (),
        validation_files: str | Sequence[str] | Mapping[str, list[str]] = (),
        tokenizer: str = "bytes",
        end_token: str | None = None,
        sequence_length: int = 256,
        batch_size: int = 8,
        shuffle_window: int = 1000,
    ) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("shuffle_window", shuffle_window)):
            if value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1.")
        if train_files and train_streams:
            raise ValueError(
                "train_files and train_streams must not both be given: a file is a stream too (json, text)."
            )
        self.train_files = _as_list(train_files)
        self.train_streams = list(train_streams)
        sets = validation_files if isinstance(validation_files, Mapping) else {"": _as_list(validation_files)}
        self.validation_files = {name: files for name, files in sets.items() if files}
        check_files(chain(self.train_files, *self.validation_files.values()))
        self.tokenizer = load_tokenizer(tokenizer, end_token)
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.shuffle_window = shuffle_window
        self.train_set: PackedDataset | None = None
        self.held_out: dict[str, PackedDataset] = {}
        """Sets to validate on, by name; the first has none."""

    @property
    def vocab_size(self) -> int:
        """``V`` of the tokenizer."""
        return self.tokenizer.vocab_size

    @property
    def validation_names(self) -> list[str]:
        """Names of the sets to validate on, in the order of their loaders."""
        return list(self.held_out)

    @override
    def setup(self, stage: str) -> None:
        """Read and pack what is in memory, once."""
        if self.train_set is not None or self.held_out:
            return
        held_out = {name: read_documents(files) for name, files in self.validation_files.items()}
        if not self.train_streams:
            documents = read_documents(self.train_files) if self.train_files else builtin_documents()
            if not held_out:
                documents, held_out[""] = hold_out(documents, _HELD_OUT_SHARE)
            self.train_set = self._pack(documents)
        self.held_out = {name: self._pack(documents) for name, documents in held_out.items()}

    def _pack(self, documents: Sequence[str]) -> PackedDataset:
        return PackedDataset(documents, self.tokenizer, self.sequence_length)

    @override
    def train_dataloader(self) -> Loader:
        """Return shuffled training batches, a short last one left out; those of streams go on without end.

        Raises:
            ValueError: If nothing would end a run on streams.
        """
        if self.train_set is not None:
            return self._loader(self.train_set, shuffle=True)
        if self.trainer and self.trainer.max_steps == -1 and self.trainer.limit_train_batches == 1.0:
            raise ValueError("trainer.max_steps must be given with train_streams: they begin anew when they end.")
        sampling = self._sampling
        stream = PackedStream(
            self.train_streams,
            self.tokenizer,
            self.sequence_length,
            seed=initial_seed() % 2**32,
            shuffle_window=self.shuffle_window,
            num_replicas=sampling.get("num_replicas", 1),
            replica=sampling.get("rank", 0),
        )
        return DataLoader(stream, batch_size=self.batch_size, drop_last=True)

    @override
    def val_dataloader(self) -> list[Loader]:
        """Return every held-out sequence once, over all replicas together; a loader for each set."""
        replicas = self._sampling.get("num_replicas", 1)
        return [self._loader(packed.padded_to(replicas), shuffle=False) for packed in self.held_out.values()]

    @override
    def test_dataloader(self) -> list[Loader]:
        """Return the held-out sequences."""
        return self.val_dataloader()

    @override
    def predict_dataloader(self) -> list[Loader]:
        """Return the held-out sequences, and none beside them."""
        return [self._loader(packed, shuffle=False) for packed in self.held_out.values()]

    @property
    def _sampling(self) -> dict[str, Any]:
        return (self.trainer.distributed_sampler_kwargs if self.trainer else None) or {}

    def _loader(self, dataset: PackedDataset, *, shuffle: bool) -> Loader:
        return DataLoader(dataset, batch_size=self.batch_size, shuffle=shuffle, drop_last=shuffle)


def _as_list(files: str | Sequence[str]) -> list[str]:
    return [files] if isinstance(files, str) else list(files)
