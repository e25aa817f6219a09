"""Fits that ``CommunicationProfiler`` watches, and what it says of them."""

import contextlib
import io
import json
import warnings

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_boost import BoostParallelStrategy, LowRankLanguageModel
from lightning_boost.callbacks.communication_profiler import CommunicationProfiler
from lightning_boost.callbacks.gathered_report import REPORT_NAME
from tests.models import masked_batch, small_config
from tests.users_module import trainer_for

ROWS, TOKENS = 4, 12


def data_for(config, num_batches=4, rows=ROWS):
    batch = masked_batch(config.vocab_size, rows=rows * num_batches, tokens=TOKENS)
    samples = [{name: tensor[row] for name, tensor in batch.items()} for row in range(rows * num_batches)]
    return DataLoader(samples, batch_size=rows)


def fit_profiled(folder, module, train, validation=None, *, strategy=None, every_n_steps=2, callbacks=(), **options):
    """Train, and return the profiler's file and what this process printed and warned of.

    ``strategy`` holds the options of ``"boost"``, or is another one.
    """
    torch.manual_seed(0)
    if strategy is None or isinstance(strategy, dict):
        strategy = BoostParallelStrategy(**strategy or {"tensor_parallel_size": dist.get_world_size()})
    trainer = trainer_for(
        strategy=strategy,
        callbacks=[CommunicationProfiler(every_n_steps=every_n_steps), *callbacks],
        default_root_dir=folder,
        **options,
    )
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()) as printed:
        warnings.simplefilter("always")
        trainer.fit(module, train, validation)
    told = [str(warning.message) for warning in caught if "the formula says" in str(warning.message)]
    dist.barrier()
    return json.loads((folder / REPORT_NAME).read_text(), parse_constant=refuse_constant), printed.getvalue(), told


def refuse_constant(constant):
    raise ValueError(f"{constant} is no JSON")


def figures_of(report, process, name="bytes"):
    """Return what a process has counted, by axis, pass, chunk and operation."""
    rows = report["processes"][process]["rows"]
    return {(row["axis"], row["pass"], row["chunk"], row["operation"]): row[name] for row in rows}


def fit_language_model(folder, changes, strategy, options):
    config = small_config(**changes)
    return fit_profiled(
        folder, LowRankLanguageModel(config), data_for(config), data_for(config, 1), strategy=strategy, **options
    )
