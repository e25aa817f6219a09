"""From text to token ids and back."""

from pathlib import Path
from typing import Protocol

END_TOKENS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]")
"""Names under which a vocabulary's end of document is looked for."""


class Tokenizer(Protocol):
    """What packing and sampling need."""

    vocab_size: int
    end_of_document: int
    """Id of the token that closes a document."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, without special tokens."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ``token_ids``, without special tokens."""


class ByteTokenizer:
    """One token for each byte of UTF-8, and one that ends a document. Needs no vocabulary file."""

    end_of_document = 256
    vocab_size = 257

    def encode(self, text: str) -> list[int]:
        """Return the bytes of ``text``."""
        return list(text.encode("utf-8"))

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ``token_ids``; ends of documents are dropped, broken bytes are marked ``�``."""
        return bytes(token for token in token_ids if token < self.end_of_document).decode("utf-8", errors="replace")


class FileTokenizer:
    """A vocabulary in a ``tokenizer.json``, read by the ``tokenizers`` library.

    Args:
        path: The file.
        end_token: Name of the token that closes a document; ``None``: the first of ``END_TOKENS`` that there is.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the library is not installed, the file is no vocabulary, or has no such token.
    """

    def __init__(self, path: str, end_token: str | None = None) -> None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"tokenizer file {path} does not exist.")
        try:
            from tokenizers import Tokenizer as Vocabulary
        except ImportError:
            raise ValueError(
                f"tokenizer ({path}) needs the tokenizers library: install this package with its extra 'tokenizers'."
            ) from None
        try:
            self._vocabulary = Vocabulary.from_file(path)
        except Exception as error:
            raise ValueError(f"tokenizer file {path} is no tokenizer.json: {error}") from None
        self.vocab_size: int = self._vocabulary.get_vocab_size()
        names = END_TOKENS if end_token is None else (end_token,)
        ids = [self._vocabulary.token_to_id(name) for name in names]
        found = [token_id for token_id in ids if token_id is not None]
        if not found:
            raise ValueError(f"tokenizer file {path} has none of {', '.join(names)}; name its end token in end_token.")
        self.end_of_document: int = found[0]

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``."""
        ids: list[int] = self._vocabulary.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ``token_ids``."""
        text: str = self._vocabulary.decode(token_ids)
        return text


def load_tokenizer(name: str, end_token: str | None = None) -> Tokenizer:
    """Return ``bytes``' tokenizer, or that of a ``tokenizer.json`` file."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(name, end_token)
