"""Which format a checkpoint has, by its keys."""

from collections.abc import Collection
from difflib import get_close_matches

from lightning_boost.interchange.cola import COLA, COLA_M
from lightning_boost.interchange.hugging_face import HF_DENSE
from lightning_boost.interchange.keys import Format, Stated
from lightning_boost.interchange.own import BOOST, VERSION_KEY
from lightning_boost.interchange.svd import ASVD, SVD_LLM

FORMATS = {format.name: format for format in (BOOST, COLA, COLA_M, SVD_LLM, ASVD, HF_DENSE)}
"""By name, in the order in which they are looked for: others may hold Hugging Face's dense keys too."""


def format_called(name: str) -> Format:
    """Return a format.

    Raises:
        ValueError: If there is none of that name.
    """
    if name not in FORMATS:
        near = get_close_matches(name, FORMATS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"format ({name!r}) must be one of {', '.join(FORMATS)}.{hint}")
    return FORMATS[name]


def detect(keys: Collection[str], stated: Stated) -> Format:
    """Return the format of a checkpoint; never by its ``model_type``, which says little.

    Args:
        keys: Of its tensors, as ``own_keys`` gives them.
        stated: Its ``config.json``. A dense model of this package's is told from Hugging Face's by that alone.

    Raises:
        ValueError: If no format has such keys.
    """
    if VERSION_KEY in stated:
        return BOOST
    adapters = [key for key in keys if ".lora_" in key or ".sparse_" in key]
    if adapters:
        raise ValueError(
            f"it holds {adapters[0]}: adapters that are added to other matrices, which is no low-rank model by itself."
            " Merge them into the matrices first, with the library that made them."
        )
    for format in FORMATS.values():
        if any(format.mark.fullmatch(key) for key in keys):
            return format
    shown = ", ".join(sorted(keys)[:3]) or "no tensors at all"
    raise ValueError(f"its keys ({shown}, …) are those of no format that is read: {', '.join(FORMATS)}.")
