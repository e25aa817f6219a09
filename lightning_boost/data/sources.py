"""Where documents come from."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from lightning_boost.data.records import READ_TEXT, Document, RecordReader

AnyDocument = TypeVar("AnyDocument", bound=Document)


def builtin_documents() -> list[str]:
    """Return the language reference that ships with every CPython: some 80 English documents, about 460 kB.

    It needs no download, and it is the same text wherever the same minor version of Python runs.
    """
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def check_files(paths: Iterable[str]) -> None:
    """Check that text files are there, before anything else is done.

    Raises:
        FileNotFoundError: If one is not.
    """
    for path in paths:
        if not Path(path).is_file():
            raise FileNotFoundError(f"text file {path} does not exist.")


def read_documents(paths: Iterable[str], reader: RecordReader = READ_TEXT) -> list[Document]:
    """Read files in the given order: a text file is one document, each line of a ``.jsonl`` file is one.

    Args:
        paths: The files.
        reader: Makes a document of the object that stands in a line; by default of its ``text``.

    Raises:
        ValueError: If a file is not UTF-8, or a line is no such object, or there is no line at all.
    """
    documents: list[Document] = []
    files = [Path(path) for path in paths]
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"text file {path} must be UTF-8; byte {error.start} is not.") from error
        documents += _json_lines(text, path, reader) if path.suffix == ".jsonl" else [text]
    if not documents:
        raise ValueError(f"{', '.join(map(str, files))} must hold at least one line with {reader.form}.")
    return documents


def _json_lines(text: str, path: Path, reader: RecordReader) -> Iterator[Document]:
    # a string may hold what splitlines takes for an end of line
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"line {number} of {path}"
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            values = None
        if not isinstance(values, dict) or not all(reader.fits(field, values.get(field)) for field in reader.fields):
            raise ValueError(f"{place} must be an object with {reader.form}.")
        try:
            yield reader.read(values)
        except ValueError as error:
            raise ValueError(f"{place} {error}") from None


def hold_out(documents: Sequence[AnyDocument], share: float) -> tuple[list[AnyDocument], list[AnyDocument]]:
    """Split documents into those to train on and those held out, about ``share`` of the text.

    A document is held out when those held out so far, with it, are no more than ``share`` of what was seen so far: the
    held-out text is spread over the whole, and the same every time.

    Raises:
        ValueError: If one of the parts would be empty.
    """
    rest: list[AnyDocument] = []
    held_out: list[AnyDocument] = []
    num_seen = num_held = 0
    for document in documents:
        num_seen += len(document)
        if num_held + len(document) <= share * num_seen:
            num_held += len(document)
            held_out.append(document)
        else:
            rest.append(document)
    if not held_out or not rest:
        raise ValueError(
            f"{len(documents)} document(s) cannot be split so that about {share:.0%} of the text is held out; give more"
            " training files, or name validation_files."
        )
    return rest, held_out
