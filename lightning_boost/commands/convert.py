"""``convert``: a model's files in another format, dense matrices factorised on the way if wanted."""

import json as json_format
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from rich.table import Table
from torch import Tensor

from lightning_boost.checkpoint_tools.conversion import Conversion, convert_model, open_any
from lightning_boost.checkpoint_tools.factorization import FactorizedProjection, factorize_model
from lightning_boost.checkpoint_tools.logit_probe import Probe, probe
from lightning_boost.checkpoint_tools.output import check_out
from lightning_boost.checkpoint_tools.svd import BottleneckRule
from lightning_boost.commands.display import console_for_results, progress_bar
from lightning_boost.config import PROJECTIONS
from lightning_boost.data.packing import Packer
from lightning_boost.data.sources import check_files, read_documents
from lightning_boost.data.tokenizers import load_tokenizer
from lightning_boost.interchange.detect import format_called
from lightning_boost.interchange.pickles import sha256

_CALIBRATION_LENGTH = 512
_CALIBRATION_TOKENS = 32768


def convert(
    src: str,
    out: str,
    *,
    to: str = "boost",
    from_: str | None = None,
    factorize: Literal["svd"] | None = None,
    bottleneck_size: int | None = None,
    keep_ratio: float | None = None,
    energy: float | None = None,
    calibration: str | Sequence[str] = (),
    calibration_tokens: int | None = None,
    tokenizer: str | None = None,
    dtype: Literal["float32", "float64"] | None = None,
    trust_pickle: bool = False,
    max_shard_gib: float = 5.0,
    overwrite: bool = False,
    json: bool = False,
) -> int:
    """Write a model of another project, or of a run, in another format, and compare what both compute.

    Formats: boost (this package's own), cola, cola_m, svd_llm, asvd, hf_dense (Hugging Face's LLaMA; factors with
    nothing between them are multiplied). One layer is in memory at a time; with factorize all factors are.

    Args:
        src: Directory or file of the model, or a checkpoint of a run.
        out: Directory to make; it gets its name when it is complete.
        to: Format to write.
        from_: Format of SRC, if its keys do not tell.
        factorize: Make dense projections low-rank, by their singular values.
        bottleneck_size: Width of every bottleneck.
        keep_ratio: Instead, the share of a matrix' parameters that its factors have at most.
        energy: Instead, the share of squared singular values that are kept at least.
        calibration: One text file, or several, for which the factors are to be good; none: for any input alike.
        calibration_tokens: How much of them is looked at; 32768 if not given.
        tokenizer: Of that text; none: the tokenizer.json beside SRC.
        dtype: To factorise in; float32 if not given.
        trust_pickle: Read files that can run code as they are read; each is named with its SHA-256.
        max_shard_gib: Size above which there are several files, and an index of them.
        overwrite: Whether to replace an earlier result of that name.
        json: Whether the last line of standard output is one JSON object, and all else goes to standard error.
    """
    if max_shard_gib <= 0:
        raise ValueError(f"max_shard_gib ({max_shard_gib}) must be above 0.")
    rule = _rule(factorize, bottleneck_size=bottleneck_size, keep_ratio=keep_ratio, energy=energy)
    texts = [calibration] if isinstance(calibration, str) else list(calibration)
    if rule is None:
        _refuse("--factorize svd", calibration=texts or None, dtype=dtype)
    if not texts:
        _refuse("calibration", calibration_tokens=calibration_tokens, tokenizer=tokenizer)
    format_called(to)
    check_out(Path(out), Path(src), overwrite=overwrite)
    source = open_any(Path(src), format_name=from_, on_pickle=_tell_of_pickle if trust_pickle else None)
    source_format, dense, report = source.format.name, None, list[FactorizedProjection]()
    if rule is not None:
        tokens = _calibration_text(texts, tokenizer, Path(src), calibration_tokens) if texts else None
        dense = probe(source.config, source.values)
        with progress_bar("factorizing layers", in_bytes=False) as on_layer:
            source, report = factorize_model(
                source, rule, tokens=tokens, dtype=getattr(torch, dtype or "float32"), on_layer=on_layer
            )
        _show_factors(report, is_aside=json)
    with progress_bar("writing") as on_bytes:
        converted = convert_model(
            source,
            Path(out),
            to=to,
            max_shard_bytes=int(max_shard_gib * 2**30),
            overwrite=overwrite,
            on_bytes=on_bytes,
        )
    before = converted.before if dense is None else dense
    difference = (before.logits - converted.after.logits).abs().max().item()
    rows = [(src, source_format, before), (out, converted.format, converted.after)]
    _show(converted, rows, difference, out, is_aside=json)
    if json:
        result = {
            "format": converted.format,
            "source_format": source_format,
            "parameters": converted.num_parameters,
            "max_logit_difference": difference,
            "output": out,
        }
        if report:
            result["factorized"] = [each._asdict() for each in report]
        print(json_format.dumps(result))
    return 0


def _rule(factorize: str | None, **given: float | None) -> BottleneckRule | None:
    if factorize is not None:
        return BottleneckRule(**given)  # type: ignore[arg-type]
    _refuse("--factorize svd", **given)
    return None


def _refuse(missing: str, **given: object) -> None:
    """Refuse options that are given without the one on which they depend."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} means nothing without {missing}.")


def _calibration_text(files: Sequence[str], tokenizer: str | None, src: Path, num_tokens: int | None) -> Tensor:
    """Return the first tokens of some files, ``[N, T]``."""
    if num_tokens is None:
        num_tokens = _CALIBRATION_TOKENS
    if num_tokens < 2:
        raise ValueError(f"calibration_tokens ({num_tokens}) must be at least 2.")
    check_files(files)
    beside = (src if src.is_dir() else src.parent) / "tokenizer.json"
    if tokenizer is None and not beside.is_file():
        raise ValueError(f"tokenizer must be given for calibration: there is no {beside}. It may be 'bytes'.")
    length = min(_CALIBRATION_LENGTH, num_tokens)
    packer = Packer(load_tokenizer(tokenizer or str(beside)), length)
    sequences = islice(packer.pack(read_documents(files), fill_last=False), num_tokens // length)
    rows = [sequence["input_ids"] for sequence in sequences]
    if not rows:
        raise ValueError(f"calibration ({', '.join(files)}) must hold at least {length} tokens of text.")
    return torch.stack(rows)


def _tell_of_pickle(path: Path) -> None:
    sys.stderr.write(
        f"trusted: {path}, SHA-256 {sha256(path)}. Code that it holds or names runs now, with all that you may do.\n"
    )


def _show(
    converted: Conversion, rows: Sequence[tuple[str, str, Probe]], difference: float, out: str, *, is_aside: bool
) -> None:
    table = Table(title="The same tokens through both", title_justify="left")
    for heading in ("", "format", "loss", "largest logit"):
        table.add_column(heading, overflow="fold")
    for path, format_name, found in rows:
        table.add_row(path, format_name, f"{found.loss:.7f}", f"{found.logits.abs().max().item():.7f}")
    console = console_for_results(is_aside=is_aside)
    console.print(table)
    lines = [f"largest difference of a logit: {difference:.3g}"]
    lines += [f"left out: {option}, of training alone" for option in converted.left_out]
    lines += [f"{out}: {converted.num_parameters:,} parameters in {', '.join(converted.files)}"]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _show_factors(report: Sequence[FactorizedProjection], *, is_aside: bool) -> None:
    """Show the bottleneck sizes of each layer's projections, and what of each matrix, or its outputs, is lost."""
    of_outputs = report[0].output_error is not None
    lost = "of the outputs for the calibration text" if of_outputs else "of the matrix"
    table = Table(title=f"Bottleneck sizes, and the share {lost} that is lost", title_justify="left")
    table.add_column("layer", justify="right")
    present = [name for name in PROJECTIONS if any(each.projection == name for each in report)]
    for name in present:
        table.add_column(name.removesuffix("_proj"), justify="right", no_wrap=True)
    cells = {
        (each.layer, each.projection): f"{each.bottleneck_size}  {each.output_error if of_outputs else each.error:.1%}"
        for each in report
    }
    for layer in sorted({each.layer for each in report}):
        table.add_row(str(layer), *(cells.get((layer, name), "-") for name in present))
    console_for_results(is_aside=is_aside).print(table)
