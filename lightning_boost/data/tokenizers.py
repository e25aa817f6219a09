"""From text to token ids and back."""


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
