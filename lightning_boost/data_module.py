"""Text as a LightningDataModule."""

from collections.abc import Sequence

from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_boost.data.packing import PackedDataset
from lightning_boost.data.sources import builtin_documents, check_files, hold_out, read_documents
from lightning_boost.data.tokenizers import ByteTokenizer

_HELD_OUT_SHARE = 0.1

Loader = DataLoader[dict[str, Tensor]]


class TextDataModule(LightningDataModule):
    """Packed sequences of bytes from the built-in text or from local text files.

    A batch holds ``input_ids`` and ``labels``, each ``[B, T]``; training batches are shuffled by Lightning, from the
    seed of ``seed_everything``.

    Args:
        train_files: Text files to train on, one document each; none: the built-in text.
        validation_files: Text files to validate on; none: documents with a tenth of the text are held out.
        sequence_length: ``T``, tokens of a sequence.
        batch_size: ``B``, sequences of a batch on each data-parallel position.
        num_workers: Processes that prepare batches; the data is in memory, so none are needed.

    Raises:
        ValueError: If ``batch_size`` is below 1.
        FileNotFoundError: If a file does not exist.
    """

    def __init__(
        self,
        *,
        train_files: str | Sequence[str] = (),
        validation_files: str | Sequence[str] = (),
        sequence_length: int = 256,
        batch_size: int = 8,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size ({batch_size}) must be at least 1.")
        self.train_files = [train_files] if isinstance(train_files, str) else list(train_files)
        self.validation_files = [validation_files] if isinstance(validation_files, str) else list(validation_files)
        check_files([*self.train_files, *self.validation_files])
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.tokenizer = ByteTokenizer()
        self.train_set: PackedDataset | None = None
        self.validation_set: PackedDataset | None = None

    @property
    def vocab_size(self) -> int:
        """``V`` of the tokenizer."""
        return self.tokenizer.vocab_size

    @override
    def setup(self, stage: str) -> None:
        """Read and pack the text, once."""
        if self.train_set is not None:
            return
        documents = read_documents(self.train_files) if self.train_files else builtin_documents()
        if self.validation_files:
            held_out = read_documents(self.validation_files)
        else:
            documents, held_out = hold_out(documents, _HELD_OUT_SHARE)
        self.train_set = PackedDataset(documents, self.tokenizer, self.sequence_length)
        self.validation_set = PackedDataset(held_out, self.tokenizer, self.sequence_length)

    @override
    def train_dataloader(self) -> Loader:
        """Return shuffled training batches, a short last one left out."""
        assert self.train_set is not None
        return self._loader(self.train_set, shuffle=True)

    @override
    def val_dataloader(self) -> Loader:
        """Return every held-out sequence once, over all replicas together."""
        assert self.validation_set is not None
        sampling = (self.trainer.distributed_sampler_kwargs if self.trainer else None) or {}
        return self._loader(self.validation_set.padded_to(sampling.get("num_replicas", 1)), shuffle=False)

    @override
    def test_dataloader(self) -> Loader:
        """Return the held-out sequences."""
        return self.val_dataloader()

    @override
    def predict_dataloader(self) -> Loader:
        """Return the held-out sequences."""
        return self.val_dataloader()

    def _loader(self, dataset: PackedDataset, *, shuffle: bool) -> Loader:
        return DataLoader(
            dataset, batch_size=self.batch_size, shuffle=shuffle, drop_last=shuffle, num_workers=self.num_workers
        )
