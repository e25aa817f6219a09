"""From a LightningModule to one that is spread over the mesh, once, however many Trainers it is given to."""

from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torchmetrics import Metric

from lightning_boost.compilation import compile_layers
from lightning_boost.layout import Decoder, DecoderLayout, find_decoder
from lightning_boost.mesh import DATA_AXIS, ParallelSizes
from lightning_boost.parallelize import parallelize, process_0s
from lightning_boost.strategy.probe import check_probe, probe, probe_before
from lightning_boost.strategy.sizes import RequestedSizes

_SPREAD = "_boost_spread"


@dataclass(frozen=True)
class Spread:
    """What has become of a model; it is kept with it, since a spread model no longer has all that a layout names."""

    decoder: Decoder
    sizes: ParallelSizes
    requested: RequestedSizes


def find_spread(module: Module) -> Spread | None:
    """Return what an earlier Trainer has made of a module's model, if one has."""
    found = (submodule.__dict__.get(_SPREAD) for submodule in module.modules())
    return next((spread for spread in found if spread is not None), None)


def decoder_of(module: Module, layout: DecoderLayout | None) -> Decoder:
    """Return a module's decoder, whether it is spread or not.

    Raises:
        ValueError: If there is none.
    """
    spread = find_spread(module)
    return find_decoder(module, layout) if spread is None else spread.decoder


def spread_over_mesh(
    module: LightningModule,
    decoder: Decoder,
    mesh: DeviceMesh,
    sizes: ParallelSizes,
    requested: RequestedSizes,
    device: torch.device,
) -> None:
    """Put a module's model on the mesh, in place, and check on the model itself that nothing changed.

    Raises:
        ValueError: If it computes something else then.
    """
    vocab_size = decoder.root.get_parameter(f"{decoder.layout.head}.weight").shape[0]
    strategy = module.trainer.strategy
    before = None
    if sizes.tensor_parallel_size > 1 or sizes.pipeline_parallel_size > 1:
        # the processes' weights may differ still: process 0's are the ones that count
        before = strategy.broadcast(probe_before(decoder.root, vocab_size))
    for buffer in module.buffers():
        if not buffer.is_meta:
            buffer.copy_(process_0s(buffer, device))
    parallelize(
        decoder,
        mesh,
        device=device,
        seed=strategy.broadcast(torch.initial_seed()),
        data_axis=requested.data_axis,
        pipeline=requested.pipeline,
        recompute=requested.recompute,
        scheme=requested.scheme,
    )
    decoder.root.__dict__[_SPREAD] = Spread(decoder, sizes, requested)
    if before is not None:
        check_probe(before.to(device), probe(decoder.root, vocab_size), decoder.root)
    if requested.compiles:
        # behind the probe, which a layer's own errors are to come through
        compile_layers(decoder)


def let_metrics_sum_over_replicas(module: Module, mesh: DeviceMesh) -> None:
    """Have metrics take one value from each replica: its processes hold the same, which would count several times."""
    data_axis = mesh[DATA_AXIS]
    for metric in module.modules():
        if isinstance(metric, Metric):
            metric.process_group = data_axis.get_group() if data_axis.size() > 1 else None
            metric.distributed_available_fn = _is_distributed if data_axis.size() > 1 else _is_alone


def _is_distributed() -> bool:
    return torch.distributed.is_initialized()


def _is_alone() -> bool:
    return False
