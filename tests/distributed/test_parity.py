"""Parity through the strategy, and planted defects that it must see."""

import contextlib
import io
import logging

import pytest
import torch
import torch.distributed as dist

from lightning_boost import collectives, gradients
from lightning_boost.kernels import reference
from lightning_boost.parity import check_parity
from lightning_boost.strategy import boost
from lightning_boost.tensor_parallel import bottleneck, bottleneck_scheme, gathered_norm, ops, vocabulary
from tests.models import small_config
from tests.processes import run_processes

FORMS = {
    "cola": {},
    "cola keeping the outer SiLU": {"low_rank": {"keep_outer_activation": True}},
    "svd": {"low_rank": {"kind": "svd"}},
    "svd dropping the outer SiLU": {"low_rank": {"kind": "svd", "keep_outer_activation": False}},
}
BIASED = {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}


def _report(config, precision, plant=None):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if plant is not None:
        plant()
    with contextlib.redirect_stderr(io.StringIO()):
        return check_parity(config, num_processes=dist.get_world_size(), precision=precision)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_training_is_that_of_one_process(form, size):
    """known_failures A08, A28."""
    report = run_processes(_report, size, small_config(**FORMS[form]), "32-true")[0]
    assert report.passed, report
    assert report.layout == ("one process" if size == 1 else f"tensor {size}")
    assert report.replicas_equal


@pytest.mark.parametrize("size", [2, 4])
def test_biases_and_grouped_queries_train_as_on_one_process(size):
    """known_failures A30."""
    report = run_processes(_report, size, small_config(**BIASED), "32-true")[0]
    assert report.passed, report


@pytest.mark.parametrize("kind", ["cola", "svd"])
def test_bf16_is_no_farther_from_fp32_than_twice_one_process_in_bf16(kind):
    report = run_processes(_report, 2, small_config(low_rank={"kind": kind}), "bf16-true")[0]
    assert report.passed, report
    assert report.gradient_tolerance < 0.1


def test_parity_needs_a_step():
    with pytest.raises(ValueError, match=r"steps \(0\) must be at least 1"):
        check_parity(small_config(), steps=0)


# ---- planted defects: each changes one thing in one process, as a slip of the pen would


def _patch_backward(function, change):
    """Let a Function's backward pass its gradients through ``change``."""
    original = function.backward

    def backward(ctx, *upstream):
        return change(original(ctx, *upstream))

    function.backward = staticmethod(backward)


def _scaled(position, factor):
    def change(gradients_):
        scaled = gradients_[position] * factor
        return (*gradients_[:position], scaled, *gradients_[position + 1 :])

    return change


def _without(chunk, pass_):
    """Skip the sum of one chunk in one pass."""
    reduce, start = collectives.all_reduce, collectives.start_all_reduce

    def all_reduce(tensor, group, label):
        if label != (chunk, pass_):
            reduce(tensor, group, label)

    def start_all_reduce(tensor, group, label):
        return start(torch.zeros_like(tensor) if label == (chunk, pass_) else tensor, group, label)

    ops.all_reduce, ops.start_all_reduce = all_reduce, start_all_reduce


def gradient_times_two():
    _patch_backward(vocabulary.VocabularyLoss, lambda found: tuple(g if g is None else 2 * g for g in found))


def one_weight_gradient_times_two():
    _patch_backward(ops.ProjectReduce, _scaled(1, 2.0))


def no_forward_sum_in_attention_output():
    _without("o", "forward")


def no_backward_sum_of_grouped_latents():
    _without("gate_up", "backward")


def no_backward_sum_of_the_down_projection():
    _without("down", "backward")


def local_statistic():
    """Normalise by this process's own features: the norm of the published default."""

    def read(columns, num_processes):
        index = dist.get_rank()
        own = torch.zeros_like(columns[..., :1])
        own += columns[..., :1] / num_processes * (1.0 + 0.1 * index)
        return own

    reference.read_statistic = read


def eps_once_for_each_process():
    original = bottleneck_scheme.norm_eps
    bottleneck_scheme.norm_eps = lambda norm, name: dist.get_world_size() * original(norm, name)


def no_gradient_through_the_statistic():
    original = ops.NormProjectReduce.backward

    def backward(ctx, grad_z, grad_rho):
        ctx.hidden_size = 2**60
        return original(ctx, grad_z, grad_rho)

    ops.NormProjectReduce.backward = staticmethod(backward)


def no_gradient_through_the_last_statistic():
    gathered_norm.read_statistic = lambda columns, num_processes: torch.zeros_like(columns[..., :1])


def activation_before_the_sum():
    original = bottleneck.ProjectReduce.apply
    bottleneck.ProjectReduce = type(
        "Early", (), {"apply": staticmethod(lambda x, *rest: original(torch.nn.functional.silu(x), *rest))}
    )


def no_activation():
    reference.activate = lambda z, _: z


def bias_on_every_process():
    original = bottleneck.expand

    def expand(z, pairs, group, chunk):
        outputs = original(z, pairs, group, chunk)
        return [y + bottleneck.local(pair.factor_b.bias) for y, pair in zip(outputs, pairs, strict=True)]

    bottleneck.expand = expand


def keys_and_values_swapped():
    original = bottleneck.GroupMember.forward

    def forward(self, outputs):
        members = self.__dict__["members"]
        return original(members[{1: 2, 2: 1}[self.index]] if len(members) == 3 and self.index else self, outputs)

    bottleneck.GroupMember.forward = forward


def vocabulary_offset_of_process_zero():
    vocabulary.shard_bounds = lambda size, num_shards, index: (0, -(-size // num_shards))


def loss_over_all_tokens():
    vocabulary.count_valid = lambda targets: torch.tensor(targets.numel())


def norm_of_own_gradients_only():
    gradients.all_reduce = lambda *_: None


def clipping_by_lightning():
    boost.BoostParallelStrategy._clip_by_norm = lambda self, optimizer, clip_val: setattr(
        self, "gradient_norm", torch.nn.utils.clip_grad_norm_(self.precision_plugin.main_params(optimizer), 1e9)
    )


def different_initial_weights():
    boost.BoostParallelStrategy.broadcast = lambda self, value, src=0: (
        value + 1 if isinstance(value, int) and not isinstance(value, bool) else value
    )


DEFECTS = (
    gradient_times_two,
    one_weight_gradient_times_two,
    no_forward_sum_in_attention_output,
    no_backward_sum_of_grouped_latents,
    no_backward_sum_of_the_down_projection,
    local_statistic,
    eps_once_for_each_process,
    no_gradient_through_the_statistic,
    no_gradient_through_the_last_statistic,
    activation_before_the_sum,
    no_activation,
    bias_on_every_process,
    keys_and_values_swapped,
    vocabulary_offset_of_process_zero,
    loss_over_all_tokens,
    norm_of_own_gradients_only,
    clipping_by_lightning,
    different_initial_weights,
)


@pytest.mark.parametrize("plant", DEFECTS, ids=lambda plant: plant.__name__)
def test_a_planted_defect_is_seen(plant):
    """known_failures A34, A48."""
    config = small_config(**BIASED, rms_norm_eps=1e-5)
    report = run_processes(_report, 2, config, "32-true", plant)[0]
    assert not report.passed, report
    assert report.worst_of_tolerance > 3, report
