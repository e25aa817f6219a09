"""What one document is: a text, or a record of which only the answers are learnt."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_boost.data.chat_template import ASSISTANT, ChatTemplate, load_chat_template
from lightning_boost.data.tokenizers import Tokenizer, TokenizerFile

Records = Literal["text", "prompt_answer", "messages"]

_FIELDS: dict[Records, tuple[str, ...]] = {
    "text": ("text",),
    "prompt_answer": ("prompt", "answer"),
    "messages": ("messages",),
}
_FORMS: dict[Records, str] = {
    "text": 'a "text", such as {"text": "…"}',
    "prompt_answer": 'texts "prompt" and "answer", such as {"prompt": "…", "answer": "…"}',
    "messages": (
        '"messages" of a role and a content each, such as {"messages": [{"role": "user", "content": "…"}, {"role":'
        f' "{ASSISTANT}", "content": "…"}}]}}'
    ),
}


@dataclass(frozen=True)
class Record:
    """A text of which only the answers are predicted."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """Where they begin and end, in characters."""

    needs_end: bool
    """Whether the tokenizer's end token is to close the last answer; a chat template closes them itself."""

    def __len__(self) -> int:
        return len(self.text)


Document = str | Record


@dataclass(frozen=True)
class RecordReader:
    """Makes documents of the values that stand in a line of a file or a row of a data set."""

    kind: Records = "text"
    template: ChatTemplate | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the values."""
        return _FIELDS[self.kind]

    @property
    def form(self) -> str:
        """What an object must have, in words."""
        return _FORMS[self.kind]

    def fits(self, field: str, value: Any) -> bool:
        """Return whether a value is of the type that its field takes."""
        if field != "messages":
            return isinstance(value, str)
        return isinstance(value, list) and all(
            isinstance(message, Mapping) and isinstance(message.get(key), str)
            for message in value
            for key in ("role", "content")
        )

    def read(self, values: Mapping[str, Any]) -> Document:
        """Return the document of some values, all of their types.

        Raises:
            ValueError: If nothing can be learnt from them; what the message is about must be put in front.
        """
        if self.kind == "text":
            text: str = values["text"]
            return text
        if self.kind == "prompt_answer" and self.template is None:
            prompt, answer = values["prompt"], values["answer"]
            _check_answer(answer)
            return Record(prompt + answer, ((len(prompt), len(prompt) + len(answer)),), needs_end=True)
        return self._conversation(values)

    def _conversation(self, values: Mapping[str, Any]) -> Record:
        if self.kind == "messages":
            # a data set gives every message the keys that any of them has
            messages = [
                {key: value for key, value in message.items() if value is not None} for message in values["messages"]
            ]
        else:
            turns = (("user", values["prompt"]), (ASSISTANT, values["answer"]))
            messages = [{"role": role, "content": content} for role, content in turns]
        answers = [message["content"] for message in messages if message["role"] == ASSISTANT]
        if not answers:
            roles = ", ".join(message["role"] for message in messages) or "none"
            raise ValueError(f"has no message whose role is {ASSISTANT} (roles: {roles}); leave it out, or name it so.")
        for answer in answers:
            _check_answer(answer)
        assert self.template is not None
        text, spans = self.template.render(messages)
        return Record(text, tuple(spans), needs_end=False)


READ_TEXT = RecordReader()


def _check_answer(answer: str) -> None:
    if not answer.strip():
        raise ValueError("has an empty answer, from which nothing can be learnt; leave it out.")


def make_reader(kind: Records, given: str | TokenizerFile, tokenizer: Tokenizer) -> RecordReader:
    """Return the reader of a kind of records.

    Args:
        kind: What a document is.
        given: The option ``tokenizer``, which may bring a chat template.
        tokenizer: What was made of it.

    Raises:
        ValueError: If there is no such kind, or the chat template is missing or cannot be used.
        FileNotFoundError: If the chat template is a file that does not exist.
    """
    if kind not in get_args(Records):
        raise ValueError(f"records ({kind!r}) must be one of {', '.join(map(repr, get_args(Records)))}.")
    file = TokenizerFile(path=given) if isinstance(given, str) else given
    if kind == "text" and file.chat_template is not None:
        raise ValueError(f"records ({kind!r}) must be 'messages' or 'prompt_answer' with tokenizer.chat_template.")
    if kind == "messages" and given == "bytes":
        raise ValueError(
            f"records ({kind!r}) need a vocabulary with a chat template: tokenizer ('bytes') must be the path of a"
            " tokenizer.json, or records 'prompt_answer'."
        )
    # what lies beside a vocabulary must not change what plain records mean
    has_template = kind == "messages" or file.chat_template is not None
    return RecordReader(kind, load_chat_template(file, tokenizer) if has_template else None)
