"""Vocabulary-parallel loss and head against torch's cross-entropy on whole logits."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, linear

from lightning_boost.collectives import Label, all_reduce, register_group
from lightning_boost.config import IGNORED_LABEL
from lightning_boost.mesh import shard_bounds
from lightning_boost.tensor_parallel import vocabulary
from tests.models import relative_error
from tests.processes import run_processes

ROWS, HIDDEN = 37, 12


def _compare(vocab_size, chunk_tokens, all_ignored, dtype, smoothing=0.0):
    vocabulary.CHUNK_TOKENS = chunk_tokens
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    # large values: a maximum that is not subtracted would overflow
    weight = (40 * torch.randn(vocab_size, HIDDEN, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(vocab_size, (ROWS,), generator=generator)
    targets[:: 1 if all_ignored else 3] = IGNORED_LABEL
    divisor = (targets != IGNORED_LABEL).sum().clamp(min=1)
    logits = linear(hidden, weight).float()
    expected = cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing) / divisor
    expected.backward()

    group, size = register_group(dist.group.WORLD), dist.get_world_size()
    start, stop = shard_bounds(vocab_size, size, dist.get_rank())
    mine = hidden.detach().clone().requires_grad_()
    share = weight.detach()[start:stop].clone().requires_grad_()
    loss = vocabulary.VocabularyLoss.apply(mine, share, targets, divisor, vocab_size, smoothing, group)
    (2 * loss).backward()
    all_reduce(mine.grad, group, Label("test", "backward"))
    if all_ignored:
        return loss.item(), mine.grad.abs().max().item(), share.grad.abs().sum().item()
    weight_error = relative_error(share.grad / 2, weight.grad[start:stop]) if stop > start else 0.0
    return abs(loss.item() - expected.item()), relative_error(mine.grad / 2, hidden.grad), weight_error


@pytest.mark.parametrize("chunk_tokens", [8, 1024])
@pytest.mark.parametrize(("size", "vocab_size"), [(2, 50), (2, 51), (4, 50), (4, 5)])
def test_loss_and_gradients_are_those_of_whole_logits(size, vocab_size, chunk_tokens):
    for errors in run_processes(_compare, size, vocab_size, chunk_tokens, False, torch.float32):
        assert errors[0] < 1e-4
        assert max(errors[1:]) < 1e-6


@pytest.mark.parametrize("vocab_size", [50, 5])
def test_label_smoothing_is_torch_s(vocab_size):
    """known_failures A31."""
    for errors in run_processes(_compare, 4, vocab_size, 8, False, torch.float32, 0.1):
        assert errors[0] < 1e-4
        assert max(errors[1:]) < 1e-6


def test_bf16_gradients_are_as_good_as_bf16():
    for errors in run_processes(_compare, 2, 51, 8, False, torch.bfloat16):
        assert max(errors[1:]) < 2e-2


def test_all_labels_ignored_gives_zero_loss_and_zero_gradients():
    for numbers in run_processes(_compare, 2, 51, 8, True, torch.float32):
        assert numbers == (0.0, 0.0, 0.0)


def _evaluate():
    gradients = []
    vocabulary.operators.cross_entropy_gradient = lambda *args: gradients.append(args)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, HIDDEN, generator=generator) for rows in (ROWS, 50))
    targets = torch.randint(50, (ROWS,), generator=generator)
    group, start = register_group(dist.group.WORLD), 25 * dist.get_rank()
    share, divisor = weight[start : start + 25], torch.tensor(ROWS)
    loss = vocabulary.VocabularyLoss.apply(hidden, share, targets, divisor, 50, 0.0, group)
    return abs(loss.item() - cross_entropy(linear(hidden, weight), targets).item()), len(gradients)


def test_no_gradients_are_made_where_none_are_needed():
    """In evaluation."""
    for error, num_gradients in run_processes(_evaluate, 2):
        assert error < 1e-5
        assert num_gradients == 0
