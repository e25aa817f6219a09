"""``convert``: a model's files in another format."""

import json as json_format
import sys
from pathlib import Path

from rich.table import Table

from lightning_boost.checkpoint_tools.conversion import Conversion, convert_checkpoint
from lightning_boost.commands.display import console_for_results, progress_bar
from lightning_boost.interchange.pickles import sha256


def convert(
    src: str,
    out: str,
    *,
    to: str = "boost",
    from_: str | None = None,
    trust_pickle: bool = False,
    max_shard_gib: float = 5.0,
    overwrite: bool = False,
    json: bool = False,
) -> int:
    """Write a model of another project, or of a run, in another format, and compare what both compute.

    Formats: boost (this package's own), cola, cola_m, svd_llm, asvd, hf_dense (Hugging Face's LLaMA; factors with
    nothing between them are multiplied). One layer is in memory at a time.

    Args:
        src: Directory or file of the model, or a checkpoint of a run.
        out: Directory to make; it gets its name when it is complete.
        to: Format to write.
        from_: Format of SRC, if its keys do not tell.
        trust_pickle: Read files that can run code as they are read; each is named with its SHA-256.
        max_shard_gib: Size above which there are several files, and an index of them.
        overwrite: Whether to replace an earlier result of that name.
        json: Whether the last line of standard output is one JSON object, and all else goes to standard error.
    """
    if max_shard_gib <= 0:
        raise ValueError(f"max_shard_gib ({max_shard_gib}) must be above 0.")
    with progress_bar("writing") as on_bytes:
        converted = convert_checkpoint(
            Path(src),
            Path(out),
            to=to,
            format_name=from_,
            on_pickle=_tell_of_pickle if trust_pickle else None,
            max_shard_bytes=int(max_shard_gib * 2**30),
            overwrite=overwrite,
            on_bytes=on_bytes,
        )
    _show(converted, src, out, is_aside=json)
    if json:
        result = {
            "format": converted.format,
            "source_format": converted.source_format,
            "parameters": converted.num_parameters,
            "max_logit_difference": converted.max_logit_difference,
            "output": out,
        }
        print(json_format.dumps(result))
    return 0


def _tell_of_pickle(path: Path) -> None:
    sys.stderr.write(
        f"trusted: {path}, SHA-256 {sha256(path)}. Code that it holds or names runs now, with all that you may do.\n"
    )


def _show(converted: Conversion, src: str, out: str, *, is_aside: bool) -> None:
    table = Table(title="The same tokens through both", title_justify="left")
    for heading in ("", "format", "loss", "largest logit"):
        table.add_column(heading, overflow="fold")
    for path, format_name, probe in (
        (src, converted.source_format, converted.before),
        (out, converted.format, converted.after),
    ):
        table.add_row(path, format_name, f"{probe.loss:.7f}", f"{probe.logits.abs().max().item():.7f}")
    console = console_for_results(is_aside=is_aside)
    console.print(table)
    lines = [f"largest difference of a logit: {converted.max_logit_difference:.3g}"]
    lines += [f"left out: {option}, of training alone" for option in converted.left_out]
    lines += [f"{out}: {converted.num_parameters:,} parameters in {', '.join(converted.files)}"]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
