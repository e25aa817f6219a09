"""Online RMSNorm + A: error against the one-process layer and against float64, and the exactness of its statistic."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import linear

from lightning_boost.collectives import Label, all_gather, all_reduce, register_group
from lightning_boost.kernels.statistic import read_statistic, statistic_columns, write_statistic
from lightning_boost.layout import find_decoder
from lightning_boost.mesh import ParallelSizes, build_mesh
from lightning_boost.model.norm import RMSNorm, normalize
from lightning_boost.parallelize import parallelize
from lightning_boost.tensor_parallel.ops import NormProjectReduce
from lightning_boost.tensor_parallel.verification import compare_with_exact
from tests.distributed.test_projection_forms import users_model
from tests.models import CPU, parallel_model, relative_error, small_config
from tests.processes import run_processes

HIDDEN = 1024
EPS = 1e-6


def _share(tensor, dim):
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def _world():
    return register_group(dist.group.WORLD)


def _errors(num_tokens, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    weight = (0.02 * torch.randn(HIDDEN, HIDDEN, generator=generator)).to(dtype)
    gamma = torch.ones(HIDDEN, dtype=dtype)
    shares = _share(x, 1), _share(gamma, 0), EPS, HIDDEN, _world(), "qkv", "none", _share(weight, 1)
    online, _ = NormProjectReduce.apply(*shares)
    norm = RMSNorm(HIDDEN, eps=EPS).to(dtype)
    one_process = linear(norm(x), weight)
    exact = linear(normalize(x.double(), EPS), weight.double())
    errors = [(result.double() - exact).abs() for result in (online, one_process)]
    apart = (online.double() - one_process.double()).abs().mean()
    return apart.item(), *((error.max().item(), error.mean().item()) for error in errors)


def test_fp32_is_closer_to_float64_than_one_process():
    """Two tokens. Held against float64: the one-process layer's own error, one long sum, is the larger one."""
    for _, (maximum, mean), (_, one_process_mean) in run_processes(_errors, 4, 2, torch.float32):
        assert maximum <= 7e-7
        assert mean <= 1.2e-7
        assert mean <= one_process_mean


def test_bf16_is_close_to_one_process():
    for apart, *_ in run_processes(_errors, 4, 256, torch.bfloat16):
        assert apart <= 2.0e-3


def _statistic(dtype):
    index, size, group = dist.get_rank(), dist.get_world_size(), _world()
    generator = torch.Generator().manual_seed(index)
    scales = torch.logspace(-4, 4, 300)
    mine = torch.randn(300, 64, generator=generator).mul(scales[:, None]).square().sum(-1)
    buffer = torch.randn(300, 16 + statistic_columns(dtype, size), generator=generator).to(dtype)
    write_statistic(buffer[:, 16:], mine, index)
    all_reduce(buffer, group, Label("statistic", "forward"))
    parts = all_gather(mine, group, Label("statistic", "forward"))
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    return read_statistic(buffer[:, 16:], size)[:, 0].numpy(), expected.numpy()


@pytest.mark.parametrize("size", [2, 4])
def test_with_a_bf16_payload_every_process_gets_the_fp32_sum_bit_for_bit(size):
    for received, expected in run_processes(_statistic, size, torch.bfloat16):
        assert received.dtype == np.float32
        assert (received == expected).all()


def test_a_bf16_sum_would_not_do():
    """The test above can fail: the plain sum of bf16 values is nowhere near."""
    received, expected = run_processes(_statistic, 2, torch.bfloat16)[0]
    in_bf16 = torch.from_numpy(expected).bfloat16().float().numpy()
    assert not (in_bf16 == received).all()


def test_fp32_statistic_is_the_sum():
    received, expected = run_processes(_statistic, 2, torch.float32)[0]
    np.testing.assert_allclose(received, expected, rtol=1e-6, atol=0)


def _gradients(scale):
    """Return gradients of x, γ and A in float64 beside autograd's through the plain formula."""
    generator = torch.Generator().manual_seed(1)
    x = (scale * torch.randn(5, 16, generator=generator)).double().requires_grad_()
    gamma = torch.randn(16, generator=generator).double().requires_grad_()
    weight = torch.randn(6, 16, generator=generator).double().requires_grad_()
    upstream = torch.randn(5, 6, generator=generator).double()
    eps = 1e-3
    linear(gamma * normalize(x, eps), weight).backward(upstream)
    shares = [_share(tensor.detach(), dim).requires_grad_() for tensor, dim in ((x, 1), (gamma, 0), (weight, 1))]
    z, _ = NormProjectReduce.apply(shares[0], shares[1], eps, 16, _world(), "qkv", "none", shares[2])
    z.backward(upstream)
    expected = [_share(tensor.grad, dim) for tensor, dim in ((x, 1), (gamma, 0), (weight, 1))]
    return [relative_error(share.grad, right) for share, right in zip(shares, expected, strict=True)]


@pytest.mark.parametrize("scale", [1e-3, 0.03, 1.0, 100.0])
def test_closed_form_backward_is_exact_where_eps_counts_and_where_not(scale):
    for errors in run_processes(_gradients, 2, scale):
        assert max(errors) < 1e-13


def _compared(form, dtype):
    """Return a comparison's figures, and the same in float64 from the whole weights and the same latents."""
    size, index = dist.get_world_size(), dist.get_rank()
    reference, model = users_model(form).to(dtype), users_model(form).to(dtype)
    parallelize(find_decoder(model), build_mesh(ParallelSizes(tensor_parallel_size=size), "cpu"), device=CPU, seed=0)
    module, norm = (each.model.layers[0].post_attention_layernorm for each in (model, reference))
    x = torch.randn(2, 3, module.hidden_size, generator=torch.Generator().manual_seed(2)).to(dtype)
    share = x.chunk(size, -1)[index]
    found = compare_with_exact(module, share, "norm")
    mlp = reference.model.layers[0].mlp
    pairs = [getattr(mlp, f"{name}_proj") for name in ("gate", "up")]
    factors = [pair.cola_a if form == "cola" else pair.BLinear.weight.t() for pair in pairs]
    normed = norm.weight.double() * x.double() / (x.double().square().mean(-1, keepdim=True) + norm.eps).sqrt()
    exact = torch.cat([normed @ factor.double() for factor in factors], -1).flatten(0, 1)
    difference = module.latents(share.flatten(0, 1), "test").double() - exact
    relative = (difference.square().sum(-1) / exact.square().sum(-1)).sqrt()
    expected = (difference.abs().max(), difference.abs().mean(), relative.max(), relative.mean(), exact.abs().max())
    figures = found.max_absolute, found.mean_absolute, found.max_relative, found.mean_relative, found.max_exact
    return figures, [value.item() for value in expected]


@pytest.mark.parametrize("form", ["asvd", "cola"])
def test_figures_are_those_of_an_independent_computation(form):
    """In bf16, where they are far above the rounding of the exact norm itself; CoLA keeps its factors transposed."""
    for found, expected in run_processes(_compared, 2, form, torch.bfloat16):
        assert found == pytest.approx(expected, rel=1e-3)
        assert 1e-3 < found[3] < found[2] < 1e-2


@pytest.mark.parametrize("form", ["asvd", "cola"])
def test_fp32_figures_are_rounding_alone(form):
    for found, _ in run_processes(_compared, 2, form, torch.float32):
        assert found[2] < 1e-6


def _verified():
    model = parallel_model(small_config(), dist.get_world_size())
    module = model.model.layers[0].input_layernorm
    x = torch.randn(2, 3, module.hidden_size // dist.get_world_size())

    def relative_difference():
        return compare_with_exact(module, x, "norm").max_relative

    right = relative_difference()
    module.hidden_size //= dist.get_world_size()
    return right, relative_difference()


def test_verification_sees_a_statistic_over_the_wrong_number_of_features():
    for right, wrong in run_processes(_verified, 2):
        assert right < 1e-6
        assert wrong > 0.1
