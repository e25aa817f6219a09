"""From text to token ids and back."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

END_TOKENS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]")
"""Names under which a vocabulary's end of document is looked for."""


class Tokenizer(Protocol):
    """What packing and sampling need."""

    vocab_size: int
    """One more than the largest id."""

    end_of_document: int
    """Id of the token that closes a document."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, without special tokens but those that stand in it."""

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids of ``text``, and behind which of its characters each of them ends."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ``token_ids``, without special tokens."""


class ByteTokenizer:
    """One token for each byte of UTF-8, and one that ends a document. Needs no vocabulary file."""

    end_of_document = 256
    vocab_size = 257

    def encode(self, text: str) -> list[int]:
        """Return the bytes of ``text``."""
        return list(text.encode("utf-8"))

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Return the bytes of ``text``, and the place behind each one's character."""
        ends = [place for place, character in enumerate(text, start=1) for _ in character.encode("utf-8")]
        return self.encode(text), ends

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ``token_ids``; ends of documents are dropped, broken bytes are marked ``�``."""
        return bytes(token for token in token_ids if token < self.end_of_document).decode("utf-8", errors="replace")


@dataclass(frozen=True, kw_only=True)
class TokenizerFile:
    """A vocabulary, and what is to be known about it."""

    path: str
    """A ``tokenizer.json``."""

    end_token: str | None = None
    """Name of the token that closes a document; none: it is looked for under the usual ones."""

    num_unused_tokens: int = 0
    """Ids at the end of the vocabulary that text never gives, and that the model has no token for; T5's: 100."""

    chat_template: str | None = None
    """A Jinja template, or a file that holds one; none: that of ``chat_template.jinja`` or ``tokenizer_config.json``
    beside the vocabulary, which messages need."""


class FileTokenizer:
    """A vocabulary in a ``tokenizer.json``, read by the ``tokenizers`` library.

    Args:
        file: The file, its end token and its unused tokens.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the library is not installed, the file is no vocabulary, or does not fit what is said about it.
    """

    def __init__(self, file: TokenizerFile) -> None:
        self.file = file
        self._vocabulary = _read(file.path)
        # ids may have gaps: what is counted is not the tokens
        size = max(self._vocabulary.get_vocab().values(), default=-1) + 1
        if not 0 <= file.num_unused_tokens < size:
            raise ValueError(
                f"num_unused_tokens ({file.num_unused_tokens}) must be at least 0 and below {size}, one more than"
                f" the largest id of {file.path}."
            )
        self.vocab_size = size - file.num_unused_tokens
        self.end_of_document = self._find_end()

    def _find_end(self) -> int:
        names = END_TOKENS if self.file.end_token is None else (self.file.end_token,)
        ids = {name: self._vocabulary.token_to_id(name) for name in names}
        name = next((name for name in names if ids[name] is not None), None)
        if name is None:
            raise ValueError(
                f"tokenizer file {self.file.path} has none of {', '.join(names)}; name its end token in end_token."
            )
        end: int = ids[name]
        if end >= self.vocab_size:
            raise ValueError(
                f"num_unused_tokens ({self.file.num_unused_tokens}) must not count the end token {name} (id {end}) of"
                f" {self.file.path}; set it to {self.vocab_size + self.file.num_unused_tokens - 1 - end} at most, or"
                " name another end_token."
            )
        return end

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``.

        Raises:
            ValueError: If one of them was said to be unused.
        """
        ids, _ = self.encode_with_ends(text)
        return ids

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids of ``text``, and behind which of its characters each of them ends.

        Raises:
            ValueError: If one of them was said to be unused.
        """
        encoding = self._vocabulary.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        if self.file.num_unused_tokens and max(ids, default=0) >= self.vocab_size:
            self._refuse(text, encoding)
        return ids, [end for _, end in encoding.offsets]

    def _refuse(self, text: str, encoding: Any) -> NoReturn:
        place = next(place for place, token in enumerate(encoding.ids) if token >= self.vocab_size)
        start, end = encoding.offsets[place]
        raise ValueError(
            f"num_unused_tokens ({self.file.num_unused_tokens}) must count only tokens of {self.file.path} that text"
            f" never gives, but id {encoding.ids[place]} ({encoding.tokens[place]}) stands in"
            f" {text[max(0, start - 20) : end + 20]!r}; take it out of the text, or lower num_unused_tokens."
        )

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ``token_ids``."""
        text: str = self._vocabulary.decode(token_ids)
        return text


def _read(path: str) -> Any:
    if not Path(path).is_file():
        raise FileNotFoundError(f"tokenizer file {path} does not exist.")
    try:
        from tokenizers import Tokenizer as Vocabulary
    except ImportError:
        raise ValueError(
            f"tokenizer ({path}) needs the tokenizers library: install this package with its extra 'tokenizers'."
        ) from None
    try:
        vocabulary = Vocabulary.from_file(path)
    except Exception as error:
        raise ValueError(f"tokenizer file {path} is no tokenizer.json: {error}") from None
    # a file keeps what was last set: documents would be cut, and trained on with their padding
    vocabulary.no_truncation()
    vocabulary.no_padding()
    return vocabulary


def load_tokenizer(given: str | TokenizerFile) -> Tokenizer:
    """Return ``bytes``' tokenizer, or that of a ``tokenizer.json`` file.

    Raises:
        ValueError: If what is given is neither a text nor a file's description.
    """
    if given == "bytes":
        return ByteTokenizer()
    if not isinstance(given, str | TokenizerFile):
        raise ValueError(f"tokenizer ({given}) must be 'bytes', the path of a tokenizer.json, or a TokenizerFile.")
    return FileTokenizer(TokenizerFile(path=given) if isinstance(given, str) else given)
