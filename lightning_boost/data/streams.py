"""Documents from anything that the ``datasets`` library loads, read as they are needed and mixed by weight."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset
from typing_extensions import override

from lightning_boost.data.packing import PackedSequence, Packer
from lightning_boost.data.records import READ_TEXT, Document, RecordReader

_FILE_FORMATS = ("csv", "json", "parquet", "text")
_FOUND_BY_THE_LIBRARY = ("://", "*", "?", "[")
"""What stands in an address or a pattern."""


@dataclass(frozen=True, kw_only=True)
class StreamSource:
    """One part of a mixture.

    Raises:
        ValueError: If the weight is not above 0, or the window below 1.
    """

    dataset: str
    """A name that ``datasets.load_dataset`` knows, such as ``allenai/c4``, or ``json``, ``text`` or ``parquet`` with
    ``data_files``."""

    name: str | None = None
    """Its configuration, such as ``en``."""

    split: str = "train"
    data_files: list[str] | None = None
    text_field: str = "text"
    """Its column of texts."""

    prompt_field: str = "prompt"
    answer_field: str = "answer"
    messages_field: str = "messages"
    """Its columns where records are no texts."""

    weight: float = 1.0
    """How often documents are taken from it, relative to the other parts; validation takes all."""

    shuffle_window: int = 1000
    """Documents of it among which the next one is drawn; 1 keeps the order, as validation always does."""

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise ValueError(f"weight ({self.weight}) of dataset {self.dataset} must be above 0; leave the part out.")
        if self.shuffle_window < 1:
            raise ValueError(
                f"shuffle_window ({self.shuffle_window}) of dataset {self.dataset} must be at least 1: that keeps the"
                " order."
            )


def check_streams(sources: Iterable[StreamSource]) -> None:
    """Check that local files are there, before anything else is done; addresses and patterns are left to the library.

    Raises:
        ValueError: If no files are named where only files can be read.
        FileNotFoundError: If one does not exist.
    """
    for source in sources:
        if source.dataset not in _FILE_FORMATS:
            continue
        if not source.data_files:
            raise ValueError(f"data_files ({source.data_files}) of dataset {source.dataset} must name its files.")
        for path in source.data_files:
            if not any(sign in path for sign in _FOUND_BY_THE_LIBRARY) and not Path(path).expanduser().is_file():
                raise FileNotFoundError(f"data_files ({path}) of dataset {source.dataset} does not exist.")


class PackedStream(IterableDataset[PackedSequence]):
    """A mixture to train on, without end: shuffled in windows and packed; each replica sees its own documents.

    What is read depends on the seed, the sources and the number of replicas, and on nothing else. When the first of the
    sources ends the mixture begins anew, so no replica, however short its part, lets the others wait.

    Args:
        sources: Parts of the mixture.
        packer: Makes sequences of documents.
        reader: Makes documents of rows.
        seed: Of the mixture and the shuffling.
        num_replicas: Replicas.
        replica: Which of them this is.

    Raises:
        ValueError: If the sources hold too little for one sequence, or one cannot be read.
    """

    def __init__(
        self,
        sources: Sequence[StreamSource],
        packer: Packer,
        *,
        reader: RecordReader = READ_TEXT,
        seed: int,
        num_replicas: int = 1,
        replica: int = 0,
    ) -> None:
        self.sources = sources
        self.packer = packer
        self.reader = reader
        self.seed = seed
        self.num_replicas = num_replicas
        self.replica = replica

    @override
    def __iter__(self) -> Iterator[PackedSequence]:
        """Yield sequences."""
        for epoch in count():
            is_empty = True
            for sequence in self.one_pass(epoch):
                is_empty = False
                yield sequence
            if is_empty:
                raise ValueError(
                    "a replica's part of the streams holds less than one sequence"
                    f" ({self.packer.sequence_length} tokens): give more text, or set sequence_length lower."
                )

    def one_pass(self, epoch: int) -> Iterator[PackedSequence]:
        """Yield the sequences until the first of the sources ends; each epoch has another order."""
        from datasets.distributed import split_dataset_by_node

        mixed = _mixed(self.sources, self.reader, self.seed + epoch)
        part = split_dataset_by_node(mixed, rank=self.replica, world_size=self.num_replicas)
        # a rest that fills no sequence is left out: there is more to read
        yield from self.packer.pack(_documents(part, self.sources, self.reader), fill_last=False)


class DealtStream(IterableDataset[PackedSequence]):
    """Sources to validate on, read once, one after the other and in their order; every token is counted once.

    Each replica reads and packs everything, and takes its turn of the sequences. That costs reading, but whole rounds
    only are dealt, the last one filled up with sequences that predict nothing: replicas get equally many without
    knowing how many there are, and none waits for another.

    Args:
        sources: What is read.
        packer: Makes sequences of documents.
        reader: Makes documents of rows.
        num_replicas: Replicas.
        replica: Which of them this is.

    Raises:
        ValueError: If a source cannot be read.
    """

    def __init__(
        self,
        sources: Sequence[StreamSource],
        packer: Packer,
        *,
        reader: RecordReader = READ_TEXT,
        num_replicas: int = 1,
        replica: int = 0,
    ) -> None:
        self.sources = sources
        self.packer = packer
        self.reader = reader
        self.num_replicas = num_replicas
        self.replica = replica

    @override
    def __iter__(self) -> Iterator[PackedSequence]:
        """Yield this replica's sequences."""
        documents = chain.from_iterable(
            _documents(_load(source, self.reader), [source], self.reader) for source in self.sources
        )
        sequences = self.packer.pack(documents, fill_last=True)
        while dealt := list(islice(sequences, self.num_replicas)):
            yield dealt[self.replica] if self.replica < len(dealt) else self.packer.empty()


def _load(source: StreamSource, reader: RecordReader) -> Any:
    """Return a source with the columns that are read, under the reader's names."""
    from datasets import load_dataset

    fields = {_column(source, field): field for field in reader.fields}
    given = {"name": source.name, "split": source.split, "data_files": source.data_files}
    try:
        stream = load_dataset(source.dataset, **given, streaming=True)
        # the library may not know the columns before it has read a document
        columns = list(stream.column_names or next(iter(stream), fields))
    except Exception as error:
        # also a plain StopIteration, where a pattern fits no file
        name, split, files = (f"{option} ({value})" for option, value in given.items())
        raise ValueError(
            f"dataset ({source.dataset}) cannot be read with {name}, {split} and {files}:"
            f" {str(error) or type(error).__name__}"
        ) from None
    for column, field in fields.items():
        if column not in columns:
            raise ValueError(f"{_option(source, field)} must be one of its columns: {', '.join(columns)}.")
    stream = stream.select_columns(list(fields))
    renamed = {column: field for column, field in fields.items() if column != field}
    return stream.rename_columns(renamed) if renamed else stream


def _column(source: StreamSource, field: str) -> str:
    column: str = getattr(source, f"{field}_field")
    return column


def _option(source: StreamSource, field: str) -> str:
    return f"{field}_field ({_column(source, field)!r}) of dataset {source.dataset}"


def _mixed(sources: Sequence[StreamSource], reader: RecordReader, seed: int) -> Any:
    from datasets import interleave_datasets

    streams = []
    for source in sources:
        stream = _load(source, reader)
        is_shuffled = source.shuffle_window > 1
        streams.append(stream.shuffle(seed=seed, buffer_size=source.shuffle_window) if is_shuffled else stream)
    if len(streams) == 1:
        return streams[0]
    total = sum(source.weight for source in sources)
    return interleave_datasets(streams, probabilities=[source.weight / total for source in sources], seed=seed)


def _documents(stream: Iterable[Any], sources: Sequence[StreamSource], reader: RecordReader) -> Iterator[Document]:
    """Yield the documents of rows that come from ``sources``."""
    for row in stream:
        for field in reader.fields:
            if not reader.fits(field, row[field]):
                options = " or ".join(_option(source, field) for source in sources)
                what = "messages of a role and a content each" if field == "messages" else "texts"
                raise ValueError(f"{options} must name a column of {what}, and one holds {row[field]!r:.60}.")
        try:
            yield reader.read(row)
        except ValueError as error:
            names = " or ".join(source.dataset for source in sources)
            raise ValueError(f"a record of dataset {names} ({str(row):.60}) {error}") from None
