import lightning.pytorch as pl
import pytest
import torch

from lightning_boost.data_module import TextDataModule
from lightning_boost.language_model import LowRankLanguageModel, Perplexity
from lightning_boost.optimization import warmup_then_cosine
from tests.models import small_config


def test_perplexity_weighs_batches_by_their_tokens():
    perplexity = Perplexity()
    perplexity.update(torch.tensor(1.0), torch.tensor(30))
    perplexity.update(torch.tensor(4.0), torch.tensor(10))
    assert perplexity.compute().item() == pytest.approx(torch.tensor(1.75).exp().item())


def test_rate_rises_linearly_and_falls_to_a_tenth():
    shares = [warmup_then_cosine(step, 10, 110) for step in range(120)]
    assert shares[0] == pytest.approx(0.1)
    assert shares[9] == shares[10] == 1.0
    assert shares[60] == pytest.approx(0.55)
    assert shares[110] == shares[119] == pytest.approx(0.1)


@pytest.mark.parametrize("everything", [False, True])
def test_only_matrices_decay_unless_told_otherwise(everything):
    """known_failures A85."""
    module = LowRankLanguageModel(
        small_config(attention_bias=True), max_steps=10, weight_decay=0.3, decay_all_parameters=everything
    )
    groups = module.configure_optimizers()["optimizer"].param_groups
    decayed = {id(parameter) for group in groups if group["weight_decay"] == 0.3 for parameter in group["params"]}
    for name, parameter in module.named_parameters():
        assert (id(parameter) in decayed) == (everything or parameter.dim() == 2), name
    assert sum(len(group["params"]) for group in groups) == len(list(module.parameters()))


def test_frozen_parameters_are_not_given_to_the_optimizer():
    module = LowRankLanguageModel(small_config(), max_steps=10, frozen_parameters=["model.embed_tokens.*"])
    held = sum(len(group["params"]) for group in module.configure_optimizers()["optimizer"].param_groups)
    assert held == len(list(module.parameters())) - 1


def _trained(module):
    return {name for name, parameter in module.model.named_parameters() if parameter.requires_grad}


def test_what_is_trained_is_chosen_by_names():
    everything = _trained(LowRankLanguageModel(small_config()))
    factors = _trained(LowRankLanguageModel(small_config(), trained_parameters=["*.factor_b.*"]))
    assert factors == {name for name in everything if ".factor_b." in name}
    frozen = ["model.embed_tokens.*", "model.layers.0.*"]
    rest = _trained(LowRankLanguageModel(small_config(), frozen_parameters=frozen))
    assert rest == {name for name in everything if "embed_tokens" not in name and "layers.0." not in name}


def test_rates_are_multiplied_by_names():
    factors = {"model.norm.*": 0.0, "*.factor_b.*": 2.0, "model.layers.*": 0.5}
    module = LowRankLanguageModel(
        small_config(), max_steps=10, learning_rate=0.1, weight_decay=0.3, learning_rate_factors=factors
    )
    optimizer = module.configure_optimizers()["optimizer"]
    rates = {
        id(p): (group["initial_lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]
    }
    expected = {
        "model.norm.weight": (0.0, 0.0),
        "model.layers.1.self_attn.q_proj.factor_b.weight": (0.2, 0.3),
        "model.layers.1.self_attn.q_proj.factor_a.weight": (0.05, 0.3),
        "model.layers.0.input_layernorm.weight": (0.05, 0.0),
        "lm_head.weight": (0.1, 0.3),
    }
    for name, rate in expected.items():
        assert rates[id(module.model.get_parameter(name))] == pytest.approx(rate)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"frozen_parameters": ["model.embedding.*"]},
            r"frozen_parameters \('model.embedding.\*'\) must match .* model.embed_tokens.weight",
        ),
        ({"trained_parameters": ["*.factor_c.*"]}, r"trained_parameters \('\*.factor_c.\*'\) must match"),
        ({"learning_rate_factors": {"head": 2.0}}, r"learning_rate_factors \('head'\) must match .* lm_head"),
        ({"frozen_parameters": ["*"]}, "leave nothing to train"),
    ],
)
def test_patterns_that_match_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LowRankLanguageModel(small_config(), **options)


def test_it_trains_without_this_package_s_strategy_too():
    torch.manual_seed(0)
    module = LowRankLanguageModel(small_config(num_hidden_layers=1), warmup_steps=1)
    batch = {"input_ids": torch.randint(131, (8,)), "labels": torch.randint(131, (8,))}
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader([batch] * 4, batch_size=2))
    assert not module.model.lm_head.weight.is_meta
    assert trainer.callback_metrics["gradient_norm"] > 0


@pytest.mark.parametrize("option", ["learning_rate", "warmup_steps"])
def test_negative_values_are_refused(option):
    with pytest.raises(ValueError, match=rf"{option} \(-1\) must not be negative"):
        LowRankLanguageModel(small_config(), **{option: -1})


def test_every_validation_set_has_a_loss_of_its_own(tmp_path):
    (tmp_path / "a.txt").write_text("aaaa" * 40)
    (tmp_path / "b.txt").write_text("some other text " * 20)
    sets = {"": [str(tmp_path / "a.txt")], "b": [str(tmp_path / "b.txt")]}
    data = TextDataModule(validation_files=sets, sequence_length=16, batch_size=4)
    module = LowRankLanguageModel(small_config(vocab_size=257, num_hidden_layers=1))
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    found = {name: value for result in trainer.validate(module, data, verbose=False) for name, value in result.items()}
    assert found.keys() == {"val_loss", "val_perplexity", "val_loss/b", "val_perplexity/b"}
    assert found["val_loss"] != found["val_loss/b"]
