import json
import string
from collections import Counter
from dataclasses import replace
from itertools import islice

import datasets
import pytest
import tokenizers
import torch
from lightning.pytorch import seed_everything

from lightning_boost.config import IGNORED_LABEL
from lightning_boost.data.packing import PackedDataset, Packer
from lightning_boost.data.sources import builtin_documents, hold_out, read_documents
from lightning_boost.data.streams import DealtStream, PackedStream, StreamSource
from lightning_boost.data.tokenizers import ByteTokenizer, TokenizerFile, load_tokenizer
from lightning_boost.data_module import TextDataModule
from lightning_boost.language_model import LowRankLanguageModel
from lightning_boost.model.llama import LlamaForCausalLM
from lightning_boost.model.loss import count_valid, next_tokens
from tests.models import small_config

END, NONE = ByteTokenizer.end_of_document, IGNORED_LABEL
PACKINGS = ("across_documents", "separate_documents", "one_document")


def _columns(documents, sequence_length, packing, **options):
    """Give each key's rows, of documents whose tokens are their letters."""
    given = {"fill_last": True, **options}
    sequences = list(Packer(ByteTokenizer(), sequence_length, packing).pack(documents, **given))
    return {name: [sequence[name].tolist() for sequence in sequences] for name in sequences[0]}


def test_documents_are_laid_end_to_end_and_the_fill_is_ignored():
    assert _columns(["abc", "de"], 4, "across_documents") == {
        "input_ids": [[97, 98, 99, END], [100, 101, END, END]],
        "labels": [[97, 98, 99, END], [100, 101, END, NONE]],
    }
    assert len(_columns(["abc", "de"], 4, "across_documents", fill_last=False)["labels"]) == 1


def test_documents_are_kept_apart_and_their_first_token_is_not_predicted():
    """The second is cut: where it goes on nothing is in front of it either."""
    columns = _columns(["a", "bcdef", "g", "h"], 5, "separate_documents")
    assert columns == {
        "input_ids": [[97, END, 98, 99, 100], [101, 102, END, 103, END], [104, END, END, END, END]],
        "labels": [[NONE, END, NONE, 99, 100], [NONE, 102, END, NONE, END], [NONE, END, NONE, NONE, NONE]],
        "document_ids": [[0, 0, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]],
    }
    assert columns["input_ids"] == _columns(["a", "bcdef", "g", "h"], 5, "across_documents")["input_ids"]


def test_each_document_is_a_sequence_cut_or_filled_and_ends_with_its_end_token():
    assert _columns(["a", "", "bcd", "efghij"], 4, "one_document") == {
        "input_ids": [[97, END, END, END], [98, 99, 100, END], [101, 102, 103, END]],
        "labels": [[97, END, NONE, NONE], [98, 99, 100, END], [101, 102, 103, END]],
    }


@pytest.mark.parametrize("packing", PACKINGS)
def test_padding_to_a_multiple_adds_what_predicts_nothing(packing):
    dataset = PackedDataset(["abc", "de", "fghijk", "l"], Packer(ByteTokenizer(), 4, packing))
    padded = dataset.padded_to(5)
    assert len(dataset) == 4
    assert len(padded) == 5
    assert all(padded[index]["labels"].equal(dataset[index]["labels"]) for index in range(4))
    assert padded[4].keys() == padded[0].keys()
    assert padded[4]["labels"].tolist() == padded[-1]["labels"].tolist() == [NONE] * 4
    for sequence in padded:
        assert {(values.dtype, values.shape) for values in sequence.values()} == {(torch.int64, (4,))}


@pytest.mark.parametrize(("documents", "length", "message"), [(["a"], 1, "at least 2"), (["", ""], 8, "no text")])
@pytest.mark.parametrize("packing", PACKINGS)
def test_packing_refuses_what_cannot_be_learnt_from(documents, length, message, packing):
    with pytest.raises(ValueError, match=message):
        PackedDataset(documents, Packer(ByteTokenizer(), length, packing))


def test_an_unknown_packing_is_refused():
    with pytest.raises(ValueError, match=r"packing \('documents'\) must be one of 'across_documents', 'separate_docu"):
        TextDataModule(packing="documents")


@pytest.mark.parametrize("tokenizer", [{"path": "t.json"}, None])
def test_a_tokenizer_of_another_type_is_refused(tokenizer):
    with pytest.raises(ValueError, match=rf"tokenizer \({tokenizer}\) must be 'bytes', .* or a TokenizerFile"):
        TextDataModule(tokenizer=tokenizer)


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
    with pytest.raises(ValueError, match=r"3 document\(s\) cannot be split so that about 10% of the text is held out"):
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
    counted = sum((batch["labels"] != IGNORED_LABEL).sum().item() for batch in data.val_dataloader()[0])
    assert counted == len("validation.txt") * 20 + 1


def test_each_json_line_is_a_document_and_a_wrong_one_is_named(tmp_path):
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "one", "id": 1}\n\n{"text": "two\\nlines"}\n')
    assert read_documents([lines]) == ["one", "two\nlines"]
    lines.write_text('{"text": "one"}\n{"txt": "two"}\n')
    with pytest.raises(ValueError, match=r'line 2 of .*lines.jsonl must be an object with a "text"'):
        read_documents([lines])


@pytest.fixture
def vocabulary(tmp_path):
    """A tokenizer.json of whole words."""
    words = tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "</s>": 3}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_a_vocabulary_file_is_read(vocabulary):
    tokenizer = load_tokenizer(str(vocabulary))
    assert tokenizer.vocab_size == 4
    assert tokenizer.end_of_document == 3
    assert tokenizer.encode("a b c") == [1, 2, 0]
    assert tokenizer.decode([1, 2]) == "a b"


def test_a_vocabulary_that_cannot_be_used_is_named(vocabulary, tmp_path):
    with pytest.raises(ValueError, match=r"has none of <end>; name its end token"):
        load_tokenizer(TokenizerFile(path=str(vocabulary), end_token="<end>"))
    with pytest.raises(FileNotFoundError, match=r"tokenizer file .*nowhere.json does not exist"):
        load_tokenizer(str(tmp_path / "nowhere.json"))
    vocabulary.write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is no tokenizer.json"):
        load_tokenizer(str(vocabulary))


def test_truncation_and_padding_of_a_vocabulary_file_are_off(vocabulary):
    """Documents are cut and filled by the packer alone."""
    stored = tokenizers.Tokenizer.from_file(str(vocabulary))
    stored.enable_truncation(2)
    stored.enable_padding(length=6, pad_id=3, pad_token="</s>")
    stored.save(str(vocabulary))
    tokenizer = load_tokenizer(str(vocabulary))
    assert tokenizer.encode("a") == [1]
    assert tokenizer.encode("a b a b a b a") == [1, 2, 1, 2, 1, 2, 1]


def test_a_vocabulary_with_gaps_needs_its_largest_id(tmp_path):
    words = {"<unk>": 0, "a": 1, "b": 7, "</s>": 10, "<extra_0>": 12}
    vocabulary = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    path = str(tmp_path / "tokenizer.json")
    vocabulary.save(path)
    assert load_tokenizer(path).vocab_size == 13
    assert load_tokenizer(TokenizerFile(path=path, num_unused_tokens=2)).vocab_size == 11
    with pytest.raises(ValueError, match=r"must not count the end token </s> \(id 10\) of .*; set it to 2 at most"):
        load_tokenizer(TokenizerFile(path=path, num_unused_tokens=3))


def test_ids_at_the_end_that_text_never_gives_are_left_out(tmp_path):
    """As in T5's vocabulary: the model has no token for its last 100."""
    words = {"<unk>": 0, "a": 1, "</s>": 2, "<extra_1>": 3, "<extra_0>": 4}
    vocabulary = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    vocabulary.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    path = str(tmp_path / "tokenizer.json")
    vocabulary.save(path)

    def left_out(number):
        return load_tokenizer(TokenizerFile(path=path, num_unused_tokens=number))

    assert left_out(0).vocab_size == 5
    assert left_out(2).vocab_size == 3
    assert left_out(2).encode("a b") == [1, 0]
    assert left_out(1).encode("<extra_1>") == [3]
    with pytest.raises(
        ValueError, match=r"num_unused_tokens \(1\) must count .* id 4 \(<extra_0>\) stands in 'a <extra_0> b'"
    ):
        left_out(1).encode("a <extra_0> b")
    with pytest.raises(ValueError, match=r"must not count the end token </s> \(id 2\) of .*; set it to 2 at most"):
        left_out(3)
    for number in (-1, 5):
        with pytest.raises(
            ValueError, match=rf"num_unused_tokens \({number}\) must be at least 0 and below 5, one more"
        ):
            left_out(number)


@pytest.fixture
def streams(tmp_path):
    """Two sources of 40 one-token documents each, in their order."""
    sources = []
    for word, weight in (("a", 3.0), ("b", 1.0)):
        path = tmp_path / f"{word}.jsonl"
        path.write_text("".join(json.dumps({"content": word}) + "\n" for _ in range(40)))
        given = {"data_files": [str(path)], "text_field": "content", "weight": weight, "shuffle_window": 1}
        sources.append(StreamSource(dataset="json", **given))
    return sources


@pytest.fixture
def letters(tmp_path):
    """A source of 26 documents, each of one letter."""
    path = tmp_path / "letters.jsonl"
    path.write_text("".join(json.dumps({"text": letter}) + "\n" for letter in string.ascii_lowercase))
    return StreamSource(dataset="json", data_files=[str(path)])


def _packer(vocabulary):
    return Packer(load_tokenizer(str(vocabulary)), 2)


def _read(streams, vocabulary, *, epoch=0, **options):
    stream = PackedStream(streams, _packer(vocabulary), **{"seed": 0, **options})
    return [sequence["input_ids"].tolist() for sequence in stream.one_pass(epoch)]


def test_a_mixture_is_taken_by_weight_and_the_same_every_time(streams, vocabulary):
    sequences = _read(streams, vocabulary)
    assert sequences == _read(streams, vocabulary)
    assert sequences != _read(streams, vocabulary, seed=1)
    counts = Counter(first for first, _ in sequences)
    assert 2.0 < counts[1] / counts[2] < 4.5
    assert {end for _, end in sequences} == {3}


def test_replicas_share_a_stream_without_overlap(streams, vocabulary):
    """known_failures A58: together they read what one would."""
    whole = _read(streams, vocabulary)
    parts = [_read(streams, vocabulary, num_replicas=2, replica=replica) for replica in (0, 1)]
    assert [len(part) for part in parts] == [len(whole) // 2 + len(whole) % 2, len(whole) // 2]
    assert [parts[index % 2][index // 2] for index in range(len(whole))] == whole


def _letters_of(sequences):
    return "".join(chr(sequence["input_ids"][0]) for sequence in sequences)


def test_shuffled_replicas_share_a_stream_without_overlap_in_another_order_each_time(letters):
    packer = Packer(ByteTokenizer(), 2)

    def read(epoch, num_replicas=1, replica=0):
        stream = PackedStream([letters], packer, seed=0, num_replicas=num_replicas, replica=replica)
        return _letters_of(stream.one_pass(epoch))

    orders = [read(epoch) for epoch in (0, 1)]
    assert string.ascii_lowercase not in orders
    assert orders[0] != orders[1]
    for epoch, order in enumerate(orders):
        assert sorted(order) == list(string.ascii_lowercase)
        assert [read(epoch, 2, replica) for replica in (0, 1)] == [order[0::2], order[1::2]]


def test_a_window_shuffles_its_source_alone(letters):
    stream = PackedStream([replace(letters, shuffle_window=1)], Packer(ByteTokenizer(), 2), seed=0)
    assert _letters_of(stream.one_pass(0)) == string.ascii_lowercase


def test_a_stream_begins_anew_so_that_no_replica_waits(streams, vocabulary):
    """known_failures A55."""
    once = _read(streams, vocabulary)

    def read_on():
        stream = PackedStream(streams, _packer(vocabulary), seed=0)
        return [sequence["input_ids"].tolist() for sequence in islice(stream, 3 * len(once))]

    more = read_on()
    assert more[: len(once)] == once
    assert len(more) == 3 * len(once)
    assert more == read_on()
    # each time in another order, as the mixture's seed goes on
    assert more[len(once) : 2 * len(once)] != once


def test_a_replica_without_text_is_told(tmp_path, vocabulary):
    (tmp_path / "one.jsonl").write_text('{"text": "a"}\n')
    source = StreamSource(dataset="json", data_files=[str(tmp_path / "one.jsonl")])
    with pytest.raises(ValueError, match=r"holds less than one sequence \(2 tokens\): give more text"):
        next(iter(PackedStream([source], _packer(vocabulary), seed=0, num_replicas=2, replica=1)))


@pytest.mark.parametrize("option", ["weight", "shuffle_window"])
def test_a_source_without_weight_or_window_is_refused(option):
    with pytest.raises(ValueError, match=rf"{option} \(0\) of dataset c4 must be "):
        StreamSource(dataset="c4", **{option: 0})


@pytest.mark.parametrize(
    "files", ["hf://datasets/c4/*.gz", "https://example.org/a.jsonl", "books/*.jsonl", "[ab].jsonl"]
)
def test_files_that_only_the_library_can_find_are_left_to_it(files):
    TextDataModule(validation_streams=[StreamSource(dataset="json", data_files=[files])])
    # those of a name are its own
    TextDataModule(train_streams=[StreamSource(dataset="allenai/c4", data_files=["en/c4-train.00000.json.gz"])])


def _pass(**given):
    return list(PackedStream([StreamSource(**given)], Packer(ByteTokenizer(), 2), seed=0).one_pass(0))


def test_a_text_field_that_is_not_there_or_holds_no_text_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "a", "id": 1}\n')
    files = {"dataset": "json", "data_files": [str(path)]}
    with pytest.raises(
        ValueError, match=r"^text_field \('text'\) of dataset json must be one of its columns: content, id"
    ):
        _pass(**files)
    with pytest.raises(ValueError, match=r"^text_field \('id'\) of dataset json must name .*, and one holds 1\.$"):
        _pass(**files, text_field="id")


@pytest.mark.parametrize("columns", [None, ["text"]])
def test_columns_are_those_of_the_first_document_where_the_library_does_not_tell(letters, monkeypatch, columns):
    monkeypatch.setattr(datasets.IterableDataset, "column_names", columns)
    assert len(_letters_of(PackedStream([letters], Packer(ByteTokenizer(), 2), seed=0).one_pass(0))) == 26


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"split": "nowhere"},
            r"name \(None\), split \(nowhere\) and data_files \(\['.*letters.jsonl'\]\): .*Bad split",
        ),
        ({"data_files": ["nowhere/*.jsonl"]}, r"data_files \(\['nowhere/\*.jsonl'\]\): \w+"),
    ],
)
def test_a_source_that_cannot_be_loaded_is_named_with_its_options(letters, given, message):
    with pytest.raises(ValueError, match=rf"^dataset \(json\) cannot be read with .*{message}"):
        _pass(**{"dataset": "json", "data_files": letters.data_files, **given})


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_streams_to_validate_on_are_dealt_out_evenly_and_each_token_counts_once(
    letters, streams, packing, num_replicas
):
    packer = Packer(ByteTokenizer(), 4, packing)
    sources = [letters, *streams]
    given = {"num_replicas": num_replicas}
    parts = [list(DealtStream(sources, packer, replica=replica, **given)) for replica in range(num_replicas)]
    documents = [*string.ascii_lowercase, *"a" * 40, *"b" * 40]
    expected = [sequence["labels"].tolist() for sequence in packer.pack(documents, fill_last=True)]
    assert {len(part) for part in parts} == {-(-len(expected) // num_replicas)}
    dealt = [sequence["labels"].tolist() for turn in zip(*parts, strict=True) for sequence in turn]
    assert dealt[: len(expected)] == expected
    assert dealt[len(expected) :] == [[NONE] * 4] * (-len(expected) % num_replicas)


def test_what_lies_in_memory_and_what_is_streamed_gives_the_same_sequences(letters):
    given = {"packing": "separate_documents", "sequence_length": 4, "batch_size": 3, "train_streams": [letters]}
    files = TextDataModule(validation_files=letters.data_files[0], **given)
    streamed = TextDataModule(validation_streams=[letters], **given)
    for data in (files, streamed):
        data.setup("validate")
        assert data.validation_names == [""]
    batches = list(zip(files.val_dataloader()[0], streamed.val_dataloader()[0], strict=True))
    assert sum(int(count_valid(next_tokens(batch["labels"]))) for batch, _ in batches) == 26
    for batch, other in batches:
        assert batch.keys() == other.keys() == {"input_ids", "labels", "document_ids"}
        assert all(batch[name].equal(other[name]) for name in batch)


def test_streams_and_named_files_are_validated_side_by_side(letters, tmp_path):
    (tmp_path / "a.txt").write_text("a" * 20)
    files = [str(tmp_path / "a.txt")]
    data = TextDataModule(train_files=files, validation_files={"a": files}, validation_streams=[letters])
    data.setup("fit")
    assert data.validation_names == ["", "a"]
    assert len(data.val_dataloader()) == len(data.predict_dataloader()) == 2
    with pytest.raises(ValueError, match="validation_files must have names"):
        TextDataModule(validation_files=files, validation_streams=[letters])


def test_files_and_streams_exclude_each_other(streams, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match="must not both be given"):
        TextDataModule(train_files=str(tmp_path / "a.txt"), train_streams=streams)


def test_every_step_hands_on_what_keeps_documents_apart(letters):
    data = TextDataModule(
        train_streams=[letters], validation_streams=[letters], packing="separate_documents", sequence_length=4
    )
    given = []

    def record(input_ids, labels=None, document_ids=None):
        given.append((labels is not None, document_ids))
        return torch.ones(())

    module = LowRankLanguageModel(small_config(vocab_size=257, num_hidden_layers=1))
    module.model.forward = record
    batch = next(iter(data.val_dataloader()[0]))
    for step in (module.training_step, module.validation_step, module.test_step, module.predict_step):
        step(batch, 0)
    assert [has_labels for has_labels, _ in given] == [True, True, True, False]
    assert all(document_ids is batch["document_ids"] for _, document_ids in given)


def test_a_stream_s_order_is_that_of_seed_everything_and_not_of_a_process(letters):
    def order():
        data = TextDataModule(train_streams=[letters], sequence_length=2, batch_size=26)
        batch = next(iter(data.train_dataloader()))
        return batch["input_ids"][:, 0].tolist()

    seed_everything(1)
    first = order()
    torch.manual_seed(5)
    assert order() == first
    seed_everything(2)
    assert order() != first


def test_documents_kept_apart_are_learnt_as_if_each_stood_alone():
    torch.manual_seed(0)
    model = LlamaForCausalLM(small_config(vocab_size=257))
    documents = ["some text", "a", "more of it", "the end"]

    def total_loss(packing, length):
        total, num_tokens = torch.zeros(()), 0
        for sequence in Packer(ByteTokenizer(), length, packing).pack(documents, fill_last=True):
            batch = {name: values[None] for name, values in sequence.items()}
            count = int(count_valid(next_tokens(batch["labels"])))
            total += model(**batch) * count
            num_tokens += count
        return total.item(), num_tokens

    apart, num_tokens = total_loss("separate_documents", 40)
    alone, expected = total_loss("one_document", 16)
    assert num_tokens == expected == sum(map(len, documents))
    assert apart == pytest.approx(alone, rel=1e-5)
    assert total_loss("across_documents", 40)[0] != pytest.approx(alone, rel=1e-3)
