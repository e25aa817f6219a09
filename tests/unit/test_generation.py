import pytest
import torch

from lightning_boost.config import RopeScaling
from lightning_boost.model.cache import KeyValueCache
from lightning_boost.model.generation import Sampling, generate
from tests.models import one_process_model, parallel_model, small_config
from tests.processes import run_processes

PROMPT = torch.tensor([[3, 14, 15, 92, 65], [35, 89, 79, 32, 38]])


def tokens(model, num_tokens=12, **options):
    return torch.cat(list(generate(model.eval(), PROMPT, num_tokens, **options)), dim=1)


@pytest.mark.parametrize(
    "changes", [{}, {"num_key_value_heads": 2}, {"rope_scaling": RopeScaling(rope_type="linear", factor=2.0)}]
)
def test_a_cache_changes_no_token(changes):
    model = one_process_model(small_config(**changes))
    assert torch.equal(tokens(model, cache=KeyValueCache(2)), tokens(model))


def test_logits_with_a_cache_are_those_without():
    """In parts of any length: all at once, several tokens behind others, one by one."""
    model = one_process_model(small_config(num_key_value_heads=4), torch.float64).eval()
    ids = torch.randint(131, (2, 11), generator=torch.Generator().manual_seed(0))
    cache, found = KeyValueCache(2), []
    with torch.no_grad():
        for part in ids.split([4, 1, 5, 1], dim=1):
            found.append(model(part, cache=cache))
        torch.testing.assert_close(torch.cat(found, dim=1), model(ids))
    assert cache.num_tokens == 11


def test_old_context_is_dropped_without_a_cache():
    model = one_process_model(small_config())
    found = tokens(model, 3, max_context=5)
    last = torch.cat([PROMPT, found[:, :2]], dim=1)[:, -5:]
    assert torch.equal(found[:, 2], model(last)[:, -1].argmax(-1))


def _parallel(sampling):
    model = parallel_model(small_config(num_key_value_heads=2), torch.distributed.get_world_size())
    return tokens(model, cache=KeyValueCache(2), sampling=sampling).tolist()


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=5)])
def test_processes_that_share_layers_give_the_same_tokens(processes, sampling):
    expected = tokens(one_process_model(small_config(num_key_value_heads=2)), sampling=sampling)
    for found in run_processes(_parallel, processes, sampling):
        assert found == expected.tolist()


def _counts(sampling, logits, draws=4000):
    rows = torch.tensor(logits).log().expand(draws, -1)
    chosen = sampling.choose(rows, torch.Generator().manual_seed(sampling.seed))
    return (torch.bincount(chosen[:, 0], minlength=len(logits)) / draws).tolist()


def test_tokens_are_drawn_by_their_probabilities():
    probabilities = [0.5, 0.3, 0.15, 0.05]
    assert _counts(Sampling(), probabilities) == [1.0, 0.0, 0.0, 0.0]
    assert _counts(Sampling(temperature=1.0), probabilities) == pytest.approx(probabilities, abs=0.03)
    halved = [p**2 for p in probabilities]
    assert _counts(Sampling(temperature=0.5), probabilities) == pytest.approx(
        [p / sum(halved) for p in halved], abs=0.03
    )
    assert _counts(Sampling(temperature=1.0, top_p=0.79), probabilities) == pytest.approx(
        [0.625, 0.375, 0, 0], abs=0.03
    )
    assert _counts(Sampling(temperature=1.0, top_p=0.5), probabilities) == [1.0, 0.0, 0.0, 0.0]
    assert _counts(Sampling(temperature=1.0, top_p=1e-9), probabilities) == [1.0, 0.0, 0.0, 0.0]


def test_a_seed_gives_the_same_draws_and_another_one_others():
    model = one_process_model(small_config())
    first, again, other = (tokens(model, sampling=Sampling(temperature=2.0, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, r"temperature \(-1.0\) must be at least 0"),
        ({"temperature": float("nan")}, r"temperature \(nan\) must be at least 0"),
        ({"top_p": 0.0}, r"top_p \(0.0\) must be above 0"),
        ({"top_p": 1.5}, r"top_p \(1.5\) must be above 0 and at most 1"),
    ],
)
def test_wrong_sampling_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)
