"""Records, of which only the answers are learnt."""

import json
from itertools import islice

import pytest
import torch

from lightning_boost.config import IGNORED_LABEL
from lightning_boost.data.packing import RecordPacker
from lightning_boost.data.records import Record, RecordReader
from lightning_boost.data.sources import read_documents
from lightning_boost.data.streams import DealtStream, PackedStream, StreamSource
from lightning_boost.data.tokenizers import ByteTokenizer
from lightning_boost.data_module import TextDataModule
from lightning_boost.model.llama import LlamaForCausalLM
from tests.models import small_config

END, NONE = ByteTokenizer.end_of_document, IGNORED_LABEL
PACKINGS = ("separate_documents", "one_document")
PLAIN = RecordReader("prompt_answer")


def _record(prompt, answer):
    return PLAIN.read({"prompt": prompt, "answer": answer})


def _packed(records, sequence_length, packing):
    """Give each key's rows, of records whose tokens are their letters."""
    packer = RecordPacker(ByteTokenizer(), sequence_length, packing)
    sequences = list(packer.pack(records, fill_last=False))
    return {name: [sequence[name].tolist() for sequence in sequences] for name in sequences[0]}, packer.num_skipped


RECORDS = [_record("ab", "c"), _record("d", "ef"), _record("gh", "i")]


def test_records_stay_whole_and_as_many_as_fit_share_a_sequence_kept_apart():
    assert _packed(RECORDS, 9, "separate_documents")[0] == {
        "input_ids": [[97, 98, 99, END, 100, 101, 102, END, END], [103, 104, 105, END, *[END] * 5]],
        "labels": [[NONE, NONE, 99, END, NONE, 101, 102, END, NONE], [NONE, NONE, 105, END, *[NONE] * 5]],
        "document_ids": [[0, 0, 0, 0, 1, 1, 1, 1, 1], [0] * 9],
    }


def test_each_record_is_a_sequence_filled_up():
    assert _packed(RECORDS[:2], 5, "one_document")[0] == {
        "input_ids": [[97, 98, 99, END, END], [100, 101, 102, END, END]],
        "labels": [[NONE, NONE, 99, END, NONE], [NONE, 101, 102, END, NONE]],
    }


def test_a_first_token_is_not_predicted_from_the_record_before():
    columns, _ = _packed([_record("a", "b"), _record("", "cd")], 6, "separate_documents")
    assert columns["labels"] == [[NONE, 98, END, NONE, 100, END]]
    assert columns["document_ids"] == [[0, 0, 0, 1, 1, 1]]


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_record_is_cut_at_its_end_and_left_out_if_no_answer_is_left(packing):
    """A cut answer is not taught to end there."""
    columns, num_skipped = _packed([_record("ab", "cdef"), _record("abcd", "e"), _record("a", "bc")], 4, packing)
    assert columns["input_ids"] == [[97, 98, 99, 100], [97, 98, 99, END]]
    assert columns["labels"] == [[NONE, NONE, 99, 100], [NONE, 98, 99, END]]
    assert num_skipped == 1


def test_only_what_lies_behind_the_first_token_counts_as_an_answer():
    """Nothing predicts it."""
    assert _packed([Record("ab", ((0, 1),), needs_end=False), *RECORDS], 9, "one_document")[1] == 1


def test_a_token_of_both_is_the_answer_s():
    class Pairs(ByteTokenizer):
        def encode_with_ends(self, text):
            return [ord(text[i]) for i in range(0, len(text), 2)], [
                min(i + 2, len(text)) for i in range(0, len(text), 2)
            ]

    packer = RecordPacker(Pairs(), 8, "one_document")
    (sequence,) = packer.pack([_record("abc", "def")], fill_last=True)
    assert sequence["labels"].tolist() == [NONE, 99, 101, END, *[NONE] * 4]


def test_records_may_not_flow_into_one_another():
    with pytest.raises(ValueError, match=r"packing \('across_documents'\) must be 'separate_documents' or 'one_docume"):
        RecordPacker(ByteTokenizer(), 8)


# ---- the loss


def _batch(packing, packer=RecordPacker):
    records = [_record("1+1=", "2"), _record("say it: ", "hello"), _record("x", "yz")]
    sequences = list(
        packer(ByteTokenizer(), 40 if packing == "separate_documents" else 16, packing).pack(records, fill_last=True)
    )
    return {name: torch.stack([sequence[name] for sequence in sequences]) for name in sequences[0]}


def _loss_by_hand(model):
    """Take each record by itself, and of it the tokens of the answer and the end, each behind all before it."""
    losses = []
    for prompt, answer in (("1+1=", "2"), ("say it: ", "hello"), ("x", "yz")):
        ids = [*(prompt + answer).encode(), END]
        scores = model(torch.tensor([ids]))[0].log_softmax(-1)
        losses += [-scores[place - 1, ids[place]] for place in range(len(prompt), len(ids))]
    return torch.stack(losses).mean().item()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(small_config(vocab_size=257)).eval()


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_loss_is_that_of_the_answers_by_hand(model, packing):
    assert model(**_batch(packing)).item() == pytest.approx(_loss_by_hand(model), rel=1e-5)


class _LearnsPrompts(RecordPacker):
    def _encode(self, record):
        ids, _ = super()._encode(record)
        return ids, ids


class _LosesTheEnd(RecordPacker):
    def _encode(self, record):
        ids, targets = super()._encode(record)
        return ids, [*targets[:-1], NONE]


class _ForgetsBorders(RecordPacker):
    def _sequence(self, ids, targets, owners):
        return super()._sequence(ids, targets, [0] * len(owners))


@pytest.mark.parametrize("defect", [_LearnsPrompts, _LosesTheEnd, _ForgetsBorders])
def test_the_loss_by_hand_tells_defects_apart(model, defect):
    assert model(**_batch("separate_documents", defect)).item() != pytest.approx(_loss_by_hand(model), rel=1e-3)


# ---- files and streams

TRAIN = [{"prompt": f"{number} and 1: ", "answer": f"{number + 1}" * (1 + number % 3)} for number in range(30)]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in TRAIN))
    return str(path)


def _data(file, **options):
    given = {"records": "prompt_answer", "packing": "separate_documents", "sequence_length": 64, "batch_size": 2}
    return TextDataModule(train_files=file, **{**given, **options})


def _answers(sequences):
    """Read the answers off labels, an end behind each."""
    tokens = [token for sequence in sequences for token in sequence["labels"].flatten().tolist() if token != NONE]
    return "".join("|" if token == END else chr(token) for token in tokens).split("|")[:-1]


def test_every_answer_is_trained_on_or_held_out_once(file):
    data = _data(file)
    data.setup("fit")
    held_out = _answers(data.val_dataloader()[0])
    assert 1 <= len(held_out) <= 3
    assert sorted(_answers(data.train_set) + held_out) == sorted(record["answer"] for record in TRAIN)


def test_a_separator_of_lines_inside_a_text_is_no_end_of_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert read_documents([path]) == ["a\u2028b\x85c"]


def test_what_is_streamed_gives_the_same_sequences_under_columns_of_any_name(file, tmp_path):
    renamed = tmp_path / "renamed.jsonl"
    rows = [{"question": each["prompt"], "prompt": 7, "reply": each["answer"]} for each in TRAIN]
    renamed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = StreamSource(
        dataset="json", data_files=[str(renamed)], prompt_field="question", answer_field="reply", shuffle_window=1
    )
    packer = RecordPacker(ByteTokenizer(), 64, "separate_documents")
    expected = [each["labels"].tolist() for each in packer.pack(read_documents([file], PLAIN), fill_last=True)]
    streams = (DealtStream([source], packer, reader=PLAIN), PackedStream([source], packer, reader=PLAIN, seed=0))
    for stream in streams:
        assert [each["labels"].tolist() for each in islice(stream, len(expected))] == expected


@pytest.mark.parametrize("packing", PACKINGS)
def test_replicas_share_records_and_each_answer_counts_once(file, packing):
    source = StreamSource(dataset="json", data_files=[file])
    packer = RecordPacker(ByteTokenizer(), 64, packing)
    given = {"reader": PLAIN, "num_replicas": 2}
    trained = [
        _answers(PackedStream([source], packer, seed=0, replica=replica, **given).one_pass(0)) for replica in (0, 1)
    ]
    validated = [list(DealtStream([source], packer, replica=replica, **given)) for replica in (0, 1)]
    assert len(validated[0]) == len(validated[1])
    expected = sorted(record["answer"] for record in TRAIN)
    assert [len(part) for part in trained] == [15, 15]
    assert sorted(trained[0] + trained[1]) == expected
    assert sorted(_answers(validated[0]) + _answers(validated[1])) == expected


def test_what_is_left_out_is_told_once_with_its_number(file, recwarn):
    data = _data(file, sequence_length=10, packing="one_document", validation_files=file)
    data.setup("fit")
    data.teardown("fit")
    (told,) = recwarn
    # the prompts of 20 records have 10 letters; both sets hold them
    assert str(told.message) == "40 record(s) were left out: their answers begin behind sequence_length (10 tokens)."


def test_what_is_left_out_of_a_stream_is_told_at_its_end(file):
    source = StreamSource(dataset="json", data_files=[file])
    data = _data((), train_streams=[source], validation_streams=[source], sequence_length=10)
    data.setup("fit")
    learnt = [int((batch["labels"] != NONE).sum()) for batch in data.val_dataloader()[0]]
    assert sum(learnt) == 10
    with pytest.warns(UserWarning, match=r"^20 record\(s\) were left out"):
        data.teardown("fit")


# ---- what is refused


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"prompt": "a"}',
            r'line 2 of .*\.jsonl must be an object with texts "prompt" and "answer", such as {"prompt"',
        ),
        ('{"prompt": "a", "answer": 4}', r'line 2 of .*\.jsonl must be an object with texts "prompt" and "answer"'),
        ('["a"]', r"line 2 of .*\.jsonl must be an object with texts"),
        ("{", r"line 2 of .*\.jsonl must be an object with texts"),
        (
            '{"prompt": "a", "answer": " "}',
            r"line 2 of .*\.jsonl has an empty answer, from which nothing can be learnt",
        ),
    ],
)
def test_a_wrong_record_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"^{message}"):
        _data(str(path)).setup("fit")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a"}, r"answer_field \('answer'\) of dataset json must be one of its columns: prompt\."),
        (
            {"prompt": "a", "answer": 4},
            r"answer_field \('answer'\) of dataset json must name a column of texts, and one h",
        ),
        ({"prompt": "a", "answer": ""}, r"a record of dataset json \(\{'prompt': 'a', .* has an empty answer"),
    ],
)
def test_a_wrong_record_of_a_stream_is_named(tmp_path, record, message):
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    source = StreamSource(dataset="json", data_files=[str(tmp_path / "a.jsonl")])
    packer = RecordPacker(ByteTokenizer(), 8, "one_document")
    with pytest.raises(ValueError, match=f"^{message}"):
        list(DealtStream([source], packer, reader=PLAIN))


def test_files_without_a_record_are_refused(tmp_path, file):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"empty.jsonl must hold at least one line with texts \"prompt\" and \"answer"):
        _data(file, validation_files=str(tmp_path / "empty.jsonl")).setup("fit")
    with pytest.raises(ValueError, match=r"there is no record whose answer begins within sequence_length \(4 tokens\)"):
        _data(file, sequence_length=4, validation_files=file).setup("fit")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"records": "answers"}, r"records \('answers'\) must be one of 'text', 'prompt_answer', 'messages'"),
        ({"packing": "across_documents"}, r"packing \('across_documents'\) must be"),
        ({"records": "messages"}, r"records \('messages'\) need a vocabulary with a chat template"),
        ({"validation_files": __file__}, r"file .*\.py must be a \.jsonl with records \('prompt_answer'\)"),
        ({"train_files": ()}, r"train_files or train_streams must be given with records \('prompt_answer'\)"),
    ],
)
def test_options_that_do_not_fit_are_refused_at_once(file, options, message):
    with pytest.raises(ValueError, match=message):
        _data(
            options.get("train_files", file), **{name: each for name, each in options.items() if name != "train_files"}
        )
