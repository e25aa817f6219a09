"""Documents from anything that the ``datasets`` library loads, read as they are needed and mixed by weight."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from typing_extensions import override

from lightning_boost.data.tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class StreamSource:
    """One part of a mixture.

    Raises:
        ValueError: If the weight is not above 0.
    """

    dataset: str
    """A name that ``datasets.load_dataset`` knows, such as ``allenai/c4``, or ``json``, ``text`` or ``parquet`` with
    ``data_files``."""

    name: str | None = None
    """Its configuration, such as ``en``."""

    split: str = "train"
    data_files: list[str] | None = None
    text_field: str = "text"
    weight: float = 1.0
    """How often documents are taken from it, relative to the other parts."""

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise ValueError(f"weight ({self.weight}) of dataset {self.dataset} must be above 0; leave the part out.")


class PackedStream(IterableDataset[dict[str, Tensor]]):
    """A mixture of streams, shuffled in a window, tokenized and packed; each replica sees its own part.

    What is read depends on the seed, the sources and the number of replicas, and on nothing else. When the first of the
    sources ends the mixture begins anew, so no replica, however short its part, lets the others wait.

    Args:
        sources: Parts of the mixture.
        tokenizer: Turns documents into ids.
        sequence_length: ``T``.
        seed: Of the mixture and the shuffling.
        shuffle_window: Documents among which the next one is drawn; 1 keeps the order.
        num_replicas: Replicas.
        replica: Which of them this is.
        repeat: Whether to begin anew without end.

    Raises:
        ValueError: If the sources hold too little for one sequence.
    """

    def __init__(
        self,
        sources: Sequence[StreamSource],
        tokenizer: Tokenizer,
        sequence_length: int,
        *,
        seed: int,
        shuffle_window: int,
        num_replicas: int,
        replica: int,
        repeat: bool = True,
    ) -> None:
        self.repeat = repeat
        self.tokenizer = tokenizer
        self.sequence_length = sequence_length
        self.documents = _mixed(sources, seed, shuffle_window, num_replicas, replica)

    @override
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield ``input_ids`` and ``labels``, each ``[T]``."""
        for epoch in count():
            # another order of the window's documents each time
            self.documents.set_epoch(epoch)
            is_empty = True
            for sequence in self._once():
                is_empty = False
                yield {"input_ids": sequence, "labels": sequence}
            if not self.repeat:
                return
            if is_empty:
                raise ValueError(
                    f"a replica's part of the streams holds less than one sequence ({self.sequence_length} tokens):"
                    " give more text, or set sequence_length lower."
                )

    def _once(self) -> Iterator[Tensor]:
        rest: list[int] = []
        for document in self.documents:
            ids = [*rest, *self.tokenizer.encode(document["text"]), self.tokenizer.end_of_document]
            whole = len(ids) - len(ids) % self.sequence_length
            yield from torch.tensor(ids[:whole], dtype=torch.long).view(-1, self.sequence_length)
            rest = ids[whole:]


def _mixed(sources: Sequence[StreamSource], seed: int, window: int, num_replicas: int, replica: int) -> Any:
    from datasets import interleave_datasets, load_dataset
    from datasets.distributed import split_dataset_by_node

    streams = []
    for source in sources:
        stream = load_dataset(
            source.dataset, source.name, split=source.split, data_files=source.data_files, streaming=True
        ).select_columns([source.text_field])
        streams.append(stream if source.text_field == "text" else stream.rename_column(source.text_field, "text"))
    mixed = streams[0]
    if len(streams) > 1:
        total = sum(source.weight for source in sources)
        probabilities = [source.weight / total for source in sources]
        mixed = interleave_datasets(streams, probabilities=probabilities, seed=seed)
    if window > 1:
        mixed = mixed.shuffle(seed=seed, buffer_size=window)
    return split_dataset_by_node(mixed, rank=replica, world_size=num_replicas)
