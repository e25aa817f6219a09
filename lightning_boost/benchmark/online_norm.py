"""Forms of RMSNorm and a linear over split features: how the sum of squares gets to all processes."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from lightning_boost.collectives import Label, all_reduce, register_group
from lightning_boost.model.norm import normalize
from lightning_boost.tensor_parallel.ops import NormProjectReduce

EPS = 1e-6
_LABEL = Label("norm", "forward")


class Share(NamedTuple):
    """What one process has of a layer."""

    x: Tensor
    """``[N, D/tp]``, the hidden state's features."""

    gamma: Tensor
    """``[D/tp]``."""

    weight: Tensor
    """``[R, D/tp]``."""


class Result(NamedTuple):
    """What every process has in the end."""

    output: Tensor
    """``[N, R]``, in the dtype of the share."""

    rho: Tensor
    """``[N, 1]``, fp32: the inverse root of the mean square that the output was scaled by."""


def share_of(x: Tensor, gamma: Tensor, weight: Tensor) -> Share:
    """Return this process's features of a whole layer."""
    parts = (tensor.chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous() for tensor in (x, gamma, weight))
    return Share(*parts)


Form = Callable[[Share], Result]


def one_hot_limbs(share: Share) -> Result:
    """Compute this package's form: in bf16 the statistic travels exact in columns of the payload, else in one."""
    return Result(
        *NormProjectReduce.apply(*share[:2], EPS, _hidden_size(share), _group(), "norm", "none", share.weight)
    )


def rounded_column(share: Share) -> Result:
    """Let the statistic travel in one column of the payload, in its dtype."""
    buffer = torch.cat([_project(share), _squares(share).to(share.x.dtype)], 1)
    all_reduce(buffer, _group(), _LABEL)
    return _scaled(buffer[:, :-1], buffer[:, -1:].float(), share)


def apart(share: Share) -> Result:
    """Let the statistic travel by itself, in fp32."""
    payload, squares = _project(share), _squares(share)
    all_reduce(payload, _group(), _LABEL)
    all_reduce(squares, _group(), _LABEL)
    return _scaled(payload, squares, share)


def local_first(share: Share) -> Result:
    """Do as the BOOST paper: normalise by the RMS of the own features, scale back, the statistic apart in fp32."""
    squares = _squares(share)
    scale_back = (squares / share.x.shape[1] + EPS).sqrt()
    payload = _project(share._replace(x=normalize(share.x, EPS))).float() * scale_back
    payload = payload.to(share.x.dtype)
    all_reduce(payload, _group(), _LABEL)
    all_reduce(squares, _group(), _LABEL)
    return _scaled(payload, squares, share)


def wide_payload(share: Share) -> Result:
    """Let all travel in fp32, the statistic in a column."""
    payload = linear((share.x * share.gamma).float(), share.weight.float())
    buffer = torch.cat([payload, _squares(share)], 1)
    all_reduce(buffer, _group(), _LABEL)
    return _scaled(buffer[:, :-1], buffer[:, -1:], share)


def _project(share: Share) -> Tensor:
    return linear(share.x * share.gamma, share.weight)


def _squares(share: Share) -> Tensor:
    return share.x.float().square().sum(-1, keepdim=True)


def _scaled(payload: Tensor, squares: Tensor, share: Share) -> Result:
    rho = torch.rsqrt(squares / _hidden_size(share) + EPS)
    return Result((payload * rho).to(share.x.dtype), rho)


def _hidden_size(share: Share) -> int:
    return share.x.shape[1] * dist.get_world_size()


def _group() -> str:
    assert dist.group.WORLD is not None
    return register_group(dist.group.WORLD)


def check_draws(features: int, num_processes: int, **numbers: int) -> None:
    """Check that a layer of so many features can be drawn and split.

    Raises:
        ValueError: If a number is below 1, or the processes do not divide the features.
    """
    for name, value in {**numbers, "processes": num_processes}.items():
        if value < 1:
            raise ValueError(f"{name} ({value}) must be at least 1.")
    if features % num_processes:
        raise ValueError(f"processes ({num_processes}) must divide the {features} features; take a power of two.")
