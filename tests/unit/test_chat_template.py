"""Conversations through a chat template, beside what ``transformers`` makes of them."""

import json

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_boost.config import IGNORED_LABEL
from lightning_boost.data.chat_template import ChatTemplate
from lightning_boost.data.packing import RecordPacker
from lightning_boost.data.records import make_reader
from lightning_boost.data.streams import DealtStream, StreamSource
from lightning_boost.data.tokenizers import TokenizerFile, load_tokenizer
from lightning_boost.data_module import TextDataModule

NONE = IGNORED_LABEL
TOKENS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
INST = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
MARKED = (
    "{{- bos_token }}{% if tools is not none or documents is not none %}tools{% endif %}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'assistant' %}\n"
    "        {{- '<|im_start|>assistant ' }}"
    "{% generation %}{{ message.content | trim }}{{ '<|im_end|>' }}{% endgeneration %}\n"
    "    {%- else %}\n"
    "        {{- '<|im_start|>' ~ message.role ~ ' ' }}\n"
    "        {{- {'said': message.content} | tojson(indent=1) ~ '<|im_end|>' }}\n"
    "        {%- if message.content == 'stop' %}{%- break %}{%- endif %}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "inst": INST, "marked": MARKED}

LEARNT = {
    "chatml": "it is said<|im_end|>\nit is<|im_end|>\n",
    "inst": " it is said</s> it is</s>",
    # the space before an answer is in the token of its first word
    "marked": " it is said<|im_end|> it is<|im_end|>",
}

CONVERSATION = [
    {"role": "user", "content": "say it <b> – 🙂"},
    {"role": "assistant", "content": "it is said"},
    {"role": "user", "content": "once more"},
    {"role": "assistant", "content": "it is"},
]


@pytest.fixture
def vocabulary(tmp_path):
    """A folder as ``transformers`` saves it: a byte-level vocabulary with merges over words, and special tokens."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=TOKENS,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(["it is said once more", "say it is", "assistant user system"] * 3, trainer)
    model.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None, "chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def _file(vocabulary, **options):
    return TokenizerFile(path=str(vocabulary / "tokenizer.json"), **options)


def _read(vocabulary, messages, **options):
    """Give ids and labels of a conversation."""
    file = _file(vocabulary, **options)
    tokenizer = load_tokenizer(file)
    record = make_reader("messages", file, tokenizer).read({"messages": messages})
    (sequence,) = RecordPacker(tokenizer, 200, "one_document").pack([record], fill_last=True)
    length = len(tokenizer.encode(record.text))
    return sequence["input_ids"].tolist()[:length], sequence["labels"].tolist()[:length]


def _reference(vocabulary, template):
    return PreTrainedTokenizerFast(
        tokenizer_file=str(vocabulary / "tokenizer.json"), bos_token="<s>", eos_token="</s>", chat_template=template
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_transformers_and_special_tokens_are_special(vocabulary, name):
    ids, labels = _read(vocabulary, CONVERSATION, chat_template=TEMPLATES[name])
    reference = _reference(vocabulary, TEMPLATES[name])
    assert ids == reference.apply_chat_template(CONVERSATION, tokenize=True, return_dict=False)
    assert set(ids) & {0, 1, 2, 3}
    learnt = reference.decode([token for token, label in zip(ids, labels, strict=True) if label != NONE])
    assert learnt == LEARNT[name]


def test_labels_are_the_marks_that_transformers_makes_where_a_template_marks_turns(vocabulary):
    _, labels = _read(vocabulary, CONVERSATION, chat_template=MARKED)
    reference = _reference(vocabulary, MARKED).apply_chat_template(
        CONVERSATION, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert [int(label != NONE) for label in labels] == reference["assistant_masks"]


def test_tokens_and_labels_of_a_small_conversation_by_hand(tmp_path):
    words = {name: number for number, name in enumerate([*TOKENS, "user", "assistant", "a", "b", "c"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(TOKENS)
    model.save(str(tmp_path / "tokenizer.json"))
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b c"},
        {"role": "user", "content": "c"},
    ]
    ids, labels = _read(tmp_path, messages, chat_template=CHATML)
    assert ids == [2, 4, 6, 3, 2, 5, 7, 8, 3, 2, 4, 8, 3]
    assert labels == [NONE] * 6 + [7, 8, 3] + [NONE] * 4


def test_a_template_lies_beside_its_vocabulary_or_is_given(vocabulary, tmp_path):
    def first(**options):
        return _read(vocabulary, CONVERSATION[:2], **options)

    beside = first()
    assert beside == first(chat_template=CHATML)
    assert beside != first(chat_template=INST)
    (vocabulary / "chat_template.jinja").write_text(INST)
    assert first() == first(chat_template=INST) == first(chat_template=str(vocabulary / "chat_template.jinja"))
    (vocabulary / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": INST}, {"name": "default", "template": CHATML}]
    (vocabulary / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert first() == beside


def test_plain_records_take_the_template_that_is_given_and_not_the_one_that_lies_beside(vocabulary):
    plain, templated = (_file(vocabulary, chat_template=template) for template in (None, CHATML))
    values = {"prompt": "say it ", "answer": "it is"}
    tokenizer = load_tokenizer(plain)
    assert make_reader("prompt_answer", plain, tokenizer).read(values).text == "say it it is"
    text = make_reader("prompt_answer", templated, tokenizer).read(values).text
    assert text == "<|im_start|>user\nsay it <|im_end|>\n<|im_start|>assistant\nit is<|im_end|>\n"


def test_messages_of_files_and_streams_give_the_same(vocabulary):
    path = vocabulary / "chat.jsonl"
    # a data set gives each message the keys of all
    rows = [CONVERSATION[:2], [{**CONVERSATION[0], "name": "Ann"}, CONVERSATION[1]], CONVERSATION]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    source = StreamSource(dataset="json", data_files=[str(path)])
    given = {"tokenizer": _file(vocabulary), "records": "messages", "packing": "separate_documents"}
    files = TextDataModule(train_files=str(path), validation_files=str(path), **given)
    streams = TextDataModule(train_streams=[source], validation_streams=[source], **given)
    files.setup("fit")
    ((batch,), (other,)) = (list(data.val_dataloader()[0]) for data in (files, streams))
    assert all(batch[name].equal(other[name]) for name in batch)
    assert int(batch["document_ids"].max()) == 2


# ---- what is refused

FORGETFUL = (
    "{% for message in messages %}{{ message.content if loop.last or message.role == 'user' else '…' }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        (
            CONVERSATION[1:],
            {"chat_template": INST},
            r"cannot be used: chat_template \(as given\) fails on it: Conversation roles",
        ),
        (
            CONVERSATION,
            {"chat_template": FORGETFUL},
            r"cannot be used: chat_template \(as given\) writes message 2 otherwise",
        ),
        (CONVERSATION[:1], {}, r"has no message whose role is assistant \(roles: user\)"),
        ([], {}, r"has no message whose role is assistant \(roles: none\)"),
        ([CONVERSATION[0], {"role": "assistant", "content": ""}], {}, "has an empty answer"),
        (
            CONVERSATION,
            {"chat_template": "{{ 1 + messages }}"},
            r"cannot be used: chat_template \(as given\) fails on it",
        ),
        (CONVERSATION, {"chat_template": "{{ strftime_now('%d') }}"}, r"fails on it: 'strftime_now' is undefined"),
    ],
)
def test_a_conversation_that_cannot_be_learnt_from_is_told(vocabulary, messages, options, message):
    with pytest.raises(ValueError, match=f"{message}"):
        _read(vocabulary, messages, **options)
    path = vocabulary / "a.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    given = {"tokenizer": _file(vocabulary, **options), "records": "messages", "packing": "one_document"}
    with pytest.raises(ValueError, match=f"^line 1 of .*a.jsonl .*{message}"):
        TextDataModule(train_files=str(path), **given).setup("fit")
    reader = make_reader("messages", _file(vocabulary, **options), load_tokenizer(_file(vocabulary)))
    packer = RecordPacker(load_tokenizer(_file(vocabulary)), 8, "one_document")
    with pytest.raises(ValueError, match=f"^a record of dataset json .*{message}|^messages_field"):
        list(DealtStream([StreamSource(dataset="json", data_files=[str(path)])], packer, reader=reader))


@pytest.mark.parametrize(
    "messages", ['"a"', '[{"role": "user"}]', '[{"role": "user", "content": ["a"]}]', "[1]", "null"]
)
def test_what_are_no_messages_is_told(vocabulary, messages):
    path = vocabulary / "a.jsonl"
    path.write_text(f'{{"messages": {messages}}}\n')
    data = TextDataModule(
        train_files=str(path), tokenizer=_file(vocabulary), records="messages", packing="one_document"
    )
    with pytest.raises(
        ValueError, match=r'^line 1 of .*a.jsonl must be an object with "messages" of a role and a conten'
    ):
        data.setup("fit")


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("{% for", ValueError, r"chat_template \(as given\) is no Jinja template"),
        (
            "chat.jinja",
            FileNotFoundError,
            r"tokenizer.chat_template \(chat.jinja\) is no Jinja template, and no such fil",
        ),
        (None, ValueError, r"tokenizer.chat_template must be given: beside .*tokenizer.json lies neither chat_templ"),
        (
            "{{ bos_token }}",
            ValueError,
            r"chat_template \(as given\) writes bos_token, and .*tokenizer_config.json, which",
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_told_at_once(vocabulary, template, error, message):
    (vocabulary / "tokenizer_config.json").unlink()
    with pytest.raises(error, match=message):
        _read(vocabulary, CONVERSATION, chat_template=template)


def test_a_special_token_that_is_none_of_the_vocabulary_is_told(vocabulary):
    (vocabulary / "tokenizer_config.json").write_text('{"bos_token": "<begin>", "sep_token": "<unused>"}')
    with pytest.raises(ValueError, match=r"bos_token \(<begin>\) of .*tokenizer_config.json must be one token of"):
        _read(vocabulary, CONVERSATION, chat_template=INST)


def test_a_template_cannot_reach_out_of_its_sandbox():
    template = ChatTemplate("{{ messages.__class__.__base__.__subclasses__() }}", name="a", tokens={})
    with pytest.raises(ValueError, match=r"chat_template \(a\) fails on it: access to attribute '__class__'"):
        template.render([{"role": "assistant", "content": "a"}])


def test_a_template_with_texts_is_refused(vocabulary):
    with pytest.raises(
        ValueError, match=r"records \('text'\) must be 'messages' or 'prompt_answer' with tokenizer.chat"
    ):
        TextDataModule(tokenizer=_file(vocabulary, chat_template=CHATML))
