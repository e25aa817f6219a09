import pytest
import torch

from lightning_boost.config import IGNORED_LABEL, RopeScaling
from lightning_boost.model.initialization import initial_values, initialize
from lightning_boost.model.llama import LlamaForCausalLM
from lightning_boost.model.loss import NextTokenLoss
from lightning_boost.model.low_rank import LowRankLinear
from tests.models import masked_batch, meta_model, one_process_model, small_config


def test_labels_are_shifted_by_the_model_and_ignored_ones_do_not_count():
    config = small_config()
    model, batch = one_process_model(config), masked_batch(config.vocab_size)
    logits, labels = model(batch["input_ids"]), batch["labels"]
    log_probabilities = logits[:, :-1].log_softmax(-1)
    targets = labels[:, 1:]
    valid = targets != IGNORED_LABEL
    picked = log_probabilities.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    assert model(**batch).item() == pytest.approx(-picked[valid].mean().item(), rel=1e-6)


def test_no_valid_label_gives_zero_loss_and_zero_gradient():
    hidden = torch.randn(2, 5, 8, requires_grad=True)
    loss = NextTokenLoss()(hidden, torch.randn(11, 8), torch.full((2, 5), IGNORED_LABEL))
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad.abs().max() == 0.0


DOCUMENTS = ((0, 5), (5, 6), (6, 12))
"""Where three documents of a sequence start and stop, one of a single token."""


def _document_ids(rows):
    return torch.tensor([number for number, (start, stop) in enumerate(DOCUMENTS) for _ in range(start, stop)])[
        None
    ].expand(rows, -1)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        RopeScaling(rope_type="dynamic", factor=4.0),
        RopeScaling(rope_type="dynamic", factor=4.0, original_max_position_embeddings=4),
    ],
)
def test_documents_in_one_sequence_are_as_each_by_itself(scaling):
    """Neither attention nor positions know of the documents before."""
    config = small_config(rope_scaling=scaling)
    model, input_ids = one_process_model(config), masked_batch(config.vocab_size)["input_ids"]
    packed = model(input_ids, document_ids=_document_ids(len(input_ids)))
    for start, stop in DOCUMENTS:
        torch.testing.assert_close(packed[:, start:stop], model(input_ids[:, start:stop]), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(packed[:, 6:], model(input_ids)[:, 6:], atol=1e-3)


def test_a_document_begins_wherever_the_id_changes():
    config = small_config()
    model, input_ids = one_process_model(config), masked_batch(config.vocab_size, rows=1)["input_ids"]
    falling = torch.tensor([[7, 7, 7, 7, 7, 0, 7, 7, 7, 7, 7, 7]])
    assert torch.equal(model(input_ids, document_ids=falling), model(input_ids, document_ids=_document_ids(1)))


def test_dropout_acts_in_training_only():
    config = small_config(attention_dropout=0.5)
    model, batch = one_process_model(config), masked_batch(config.vocab_size)
    losses = {model.train(training)(**batch).item() for training in (True, False, True, False)}
    assert len(losses) == 3


def test_low_rank_linear_multiplies_by_both_factors():
    layer = LowRankLinear(6, 5, 3, activation="silu", bias=True)
    x = torch.randn(2, 6)
    latent = torch.nn.functional.silu(x @ layer.factor_a.weight.T)
    torch.testing.assert_close(layer(x), latent @ layer.factor_b.weight.T + layer.factor_b.bias)


@pytest.mark.parametrize("size", [0, -1, 6, 2.0])
def test_low_rank_linear_refuses_bottlenecks_outside_the_range(size):
    with pytest.raises(ValueError, match=rf"bottleneck_size \({size}\) must be a whole number from 1 to 5"):
        LowRankLinear(6, 5, size)


def test_low_rank_linear_refuses_unknown_activations():
    with pytest.raises(ValueError, match=r"activation \('softmax'\) must be None or one of silu"):
        LowRankLinear(6, 5, 2, activation="softmax")


def test_factors_start_with_cola_s_deviation():
    config = small_config(hidden_size=256, intermediate_size=700, low_rank={"bottleneck_size": 64})
    model = one_process_model(config)
    for pair, fan in ((model.model.layers[0].self_attn.q_proj, 512), (model.model.layers[1].mlp.down_proj, 956)):
        tau = 64**-0.25 * fan**-0.25
        assert pair.factor_a.weight.std().item() == pytest.approx(tau, rel=0.05)
        assert pair.factor_b.weight.std().item() == pytest.approx(tau, rel=0.05)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert (model.model.norm.weight == 1).all()


def test_initial_values_depend_on_seed_and_name_only():
    torch.manual_seed(11)
    built = LlamaForCausalLM(small_config())
    torch.rand(100)
    materialized = meta_model(small_config())
    initialize(materialized, seed=11)
    deeper = meta_model(small_config(num_hidden_layers=3))
    initialize(deeper, seed=11)
    other_seed = meta_model(small_config())
    initialize(other_seed, seed=12)
    for name, parameter in built.named_parameters():
        assert torch.equal(parameter, materialized.get_parameter(name))
        assert torch.equal(parameter, deeper.get_parameter(name))
    embedding = "model.embed_tokens.weight"
    assert not torch.equal(built.get_parameter(embedding), other_seed.get_parameter(embedding))
    layers = [built.get_parameter(f"model.layers.{layer}.mlp.up_proj.factor_a.weight") for layer in (0, 1)]
    assert not torch.equal(*layers)


def test_parameters_without_a_known_initial_value_are_named():
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 2, 1))
    with pytest.raises(TypeError, match=r"parameter '0.weight' of a Conv1d"):
        initial_values(model)
