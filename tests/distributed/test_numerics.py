"""What the tensor axis computes with: collectives on any memory, any upstream gradient, bf16 over many rows."""

import pytest
import torch
import torch.distributed as dist

from lightning_boost import collectives
from lightning_boost.collectives import Label, register_group
from lightning_boost.model.rotary import rotary_tables
from tests.models import one_process_model, parallel_model, relative_error, small_config, whole
from tests.processes import run_processes

LABEL = Label("test", "forward")


def _reduced(view):
    """Sum a view of a larger tensor; return what became of both, or the refusal."""
    group = register_group(dist.group.WORLD)
    base = torch.arange(24.0).view(4, 6) + dist.get_rank()
    before, part = base.clone(), view(base)
    try:
        collectives.all_reduce(part, group, LABEL)
    except RuntimeError as error:
        return str(error), torch.equal(base, before)
    inside = torch.zeros_like(base, dtype=torch.bool)
    view(inside)[...] = True
    expected = 2 * torch.arange(24.0).view(4, 6) + 1
    return torch.equal(base[inside], expected[inside]), torch.equal(base[~inside], before[~inside])


@pytest.mark.parametrize(
    ("view", "contiguous"),
    [
        (lambda base: base[:, 1:3], False),
        (lambda base: base.t(), False),
        (lambda base: base[1:3], True),
        (lambda base: base[2, 3], True),
        (lambda base: base[:0], True),
    ],
    ids=["columns", "transposed", "rows", "scalar", "empty"],
)
def test_a_view_is_reduced_where_it_lies_or_refused(view, contiguous):
    """known_failures A29: gloo would reduce the memory behind a view with gaps."""
    for result, neighbours_untouched in run_processes(_reduced, 2, view):
        assert neighbours_untouched
        assert result is True if contiguous else "must get a contiguous tensor" in result


def _share(tensor):
    return tensor.chunk(dist.get_world_size(), -1)[dist.get_rank()]


UPSTREAM = {
    "expanded": lambda y: y.sum(),
    "with gaps": lambda y: y[:, 1::2].sum() + y[::3].square().sum(),
    "transposed": lambda y: (y.transpose(0, 1) * torch.linspace(-1.0, 1.0, 48).view(12, 4, 1)).sum(),
}
"""Sums over features: that of all is the sum of the processes' sums."""


def _block_errors(upstream):
    config = small_config()
    model, reference = parallel_model(config, dist.get_world_size()), one_process_model(config)
    x = torch.randn(4, 12, 64, generator=torch.Generator().manual_seed(1))
    rotary = rotary_tables(torch.arange(12), 12, config, like=x)
    layer = reference.model.layers[0]
    UPSTREAM[upstream](model.model.layers[0](_share(x), rotary)).backward()
    UPSTREAM[upstream](layer(x, rotary)).backward()
    return max(
        relative_error(whole(parameter.grad), layer.get_parameter(name).grad)
        for name, parameter in model.model.layers[0].named_parameters()
    )


@pytest.mark.parametrize("upstream", UPSTREAM)
def test_gradients_are_right_whatever_memory_the_upstream_gradient_has(upstream):
    """known_failures A44: a gradient that is expanded, has gaps or is transposed."""
    assert max(run_processes(_block_errors, 2, upstream)) < 1e-5


def _many_rows():
    config = small_config(low_rank={"bottleneck_size": 16})
    model = parallel_model(config, dist.get_world_size(), torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    x, gradient = (torch.randn(65536, 64, generator=generator).bfloat16() for _ in range(2))
    projection = model.model.layers[0].self_attn.o_proj
    exact = one_process_model(config).bfloat16().double().model.layers[0].self_attn.o_proj
    (projection(_share(x)) * _share(gradient)).sum().backward()
    (exact(x.double()) * gradient.double()).sum().backward()
    return {
        name: relative_error(whole(parameter.grad), exact.get_parameter(name).grad)
        for name, parameter in projection.named_parameters()
    }


def test_weight_gradients_over_many_rows_are_summed_in_more_than_bf16():
    """known_failures A45."""
    for errors in run_processes(_many_rows, 2):
        assert len(errors) == 2
        assert max(errors.values()) < 1e-2


def _deep():
    config = small_config(num_hidden_layers=32)
    input_ids = torch.randint(131, (2, 12), generator=torch.Generator().manual_seed(1))
    exact = one_process_model(config).bfloat16().float()(input_ids)
    narrow = one_process_model(config, torch.bfloat16)(input_ids)
    split = parallel_model(config, dist.get_world_size(), torch.bfloat16)(input_ids)
    return relative_error(split, exact), relative_error(narrow, exact)


@torch.no_grad()
def test_the_error_of_bf16_does_not_grow_faster_with_depth_than_on_one_process():
    """known_failures A46: 32 layers."""
    for split, narrow in run_processes(_deep, 2):
        assert split < 1.5 * narrow
