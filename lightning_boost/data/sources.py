"""Where documents come from."""

from collections.abc import Iterable, Sequence
from pathlib import Path


def builtin_documents() -> list[str]:
    """Return the language reference that ships with every CPython: some 80 English documents, about 460 kB.

    It needs no download, and it is the same text wherever the same minor version of Python runs.
    """
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def read_documents(paths: Iterable[str | Path]) -> list[str]:
    """Read text files, one document each, in the given order.

    Raises:
        FileNotFoundError: If a path is no file.
        ValueError: If a file is not UTF-8.
    """
    documents = []
    for path in map(Path, paths):
        if not path.is_file():
            raise FileNotFoundError(f"text file {path} does not exist.")
        try:
            documents.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"text file {path} must be UTF-8; byte {error.start} is not.") from error
    return documents


def hold_out(documents: Sequence[str], every: int) -> tuple[list[str], list[str]]:
    """Split documents into those to train on and, every ``every``-th one, those held out.

    Raises:
        ValueError: If one of the parts would be empty.
    """
    held_out = list(documents[every - 1 :: every])
    rest = [document for index, document in enumerate(documents) if (index + 1) % every]
    if not held_out or not rest:
        raise ValueError(
            f"holding out every {every}th of {len(documents)} documents leaves a part empty; give at least {every}"
            " training files, or name validation_files."
        )
    return rest, held_out
