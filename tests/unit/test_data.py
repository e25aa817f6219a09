import pytest

from lightning_boost.config import IGNORED_LABEL
from lightning_boost.data.packing import PackedDataset
from lightning_boost.data.sources import builtin_documents, hold_out, read_documents
from lightning_boost.data.tokenizers import ByteTokenizer
from lightning_boost.data_module import TextDataModule


def test_every_token_is_packed_once_and_padding_is_ignored():
    dataset = PackedDataset(["abc", "de"], ByteTokenizer(), sequence_length=4)
    assert [dataset[index]["input_ids"].tolist() for index in range(2)] == [[97, 98, 99, 256], [100, 101, 256, 256]]
    assert dataset[1]["labels"].tolist() == [100, 101, 256, IGNORED_LABEL]
    assert len(dataset) == 2
    assert dataset.num_tokens == 7


@pytest.mark.parametrize(("documents", "length", "message"), [(["a"], 1, "at least 2"), (["", ""], 8, "no text")])
def test_packing_refuses_what_cannot_be_learnt_from(documents, length, message):
    with pytest.raises(ValueError, match=message):
        PackedDataset(documents, ByteTokenizer(), length)


def test_bytes_go_there_and_back():
    tokenizer = ByteTokenizer()
    text = "naïve – 🙂"
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.end_of_document]) == text


def test_builtin_text_is_a_few_hundred_kilobytes_of_english():
    documents = builtin_documents()
    assert 60 < len(documents) < 120
    assert 3e5 < sum(map(len, documents)) < 7e5


def test_held_out_documents_are_not_trained_on():
    documents = builtin_documents()
    rest, held_out = hold_out(documents, 0.1)
    assert sorted(rest + held_out) == sorted(documents)
    assert 0.08 < sum(map(len, held_out)) / sum(map(len, documents)) <= 0.1
    with pytest.raises(ValueError, match="3 documents cannot be split so that about 10% of the text is held out"):
        hold_out(documents[:3], 0.1)


def test_files_are_read_and_wrong_ones_named(tmp_path):
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("text")
    bad.write_bytes(b"ok\xff")
    assert read_documents([good]) == ["text"]
    with pytest.raises(ValueError, match=r"bad.txt must be UTF-8; byte 2"):
        read_documents([bad])
    with pytest.raises(FileNotFoundError, match=r"missing.txt does not exist"):
        TextDataModule(train_files=str(tmp_path / "missing.txt"))


def test_data_module_gives_packed_batches_from_files(tmp_path):
    for name in ("train.txt", "validation.txt"):
        (tmp_path / name).write_text(name * 20)
    data = TextDataModule(
        train_files=str(tmp_path / "train.txt"),
        validation_files=[str(tmp_path / "validation.txt")],
        sequence_length=16,
        batch_size=3,
    )
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == batch["labels"].shape == (3, 16)
    counted = sum((batch["labels"] != IGNORED_LABEL).sum().item() for batch in data.val_dataloader())
    assert counted == len("validation.txt") * 20 + 1
