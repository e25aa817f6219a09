"""The strategy inside a Trainer, with modules as users write them."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.utils.data import DataLoader

import lightning_boost  # noqa: F401 - registers the strategy
from lightning_boost import BoostParallelStrategy, LowRankLanguageModel, LowRankLinear, TextDataModule
from lightning_boost.config import IGNORED_LABEL
from tests.models import masked_batch, small_config, whole
from tests.processes import run_processes

WIDTH, HEADS, VOCAB = 32, 4, 37


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (LowRankLinear(WIDTH, WIDTH, 8) for _ in range(4))

    def forward(self, hidden):
        batch, tokens, _ = hidden.shape
        q, k, v = (
            projection(hidden).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class _MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (LowRankLinear(WIDTH, 50, 9, activation="silu") for _ in range(2))
        self.down_proj = LowRankLinear(50, WIDTH, 7, activation="silu")

    def forward(self, hidden):
        return self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = _Attention(), _MLP()
        self.input_layernorm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.post_attention_layernorm = nn.RMSNorm(WIDTH, eps=1e-6)

    def forward(self, hidden):
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([_Layer(), _Layer()])
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)

    def forward(self, input_ids):
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)


class _Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = _Decoder()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.model(input_ids))


class UsersModule(pl.LightningModule):
    """Knows nothing of this package but ``LowRankLinear``; takes its loss from logits."""

    def __init__(self, meta=False):
        super().__init__()
        self.meta = meta
        self.net = None if meta else _Network()
        self.losses = []

    def configure_model(self):
        if self.net is None:
            with torch.device("meta"):
                self.net = _Network()

    def _loss(self, batch):
        logits = self.net(batch["input_ids"])
        return cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED_LABEL)

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.net(batch["input_ids"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


def _loader(num_batches=4):
    batch = masked_batch(VOCAB, rows=12)
    rows = [{name: tensor[row] for name, tensor in batch.items()} for row in range(3 * num_batches)]
    return DataLoader(rows, batch_size=3)


def _trainer(**options):
    warnings.filterwarnings("ignore")
    defaults = {
        "accelerator": "cpu",
        "strategy": "boost",
        "devices": dist.get_world_size(),
        "max_epochs": 1,
        "use_distributed_sampler": False,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**defaults, **options})


def _life_of_a_module(meta):
    # other weights in every process: process 0's must win
    torch.manual_seed(dist.get_rank() if not meta else 5)
    module, trainer = UsersModule(meta), _trainer()
    trainer.fit(module, _loader(), _loader())
    validated = trainer.validate(module, _loader(), verbose=False)[0]["val_loss"]
    tested = trainer.test(module, _loader(), verbose=False)[0]["val_loss"]
    predicted = torch.cat(trainer.predict(module, _loader()))
    # another Trainer and strategy on the same module
    again = _trainer().validate(module, _loader(), verbose=False)[0]["val_loss"]
    weights = {name: whole(parameter).numpy() for name, parameter in module.named_parameters()}
    return module.losses, [validated, tested, again], predicted.numpy(), weights


@pytest.mark.parametrize("meta", [False, True], ids=["real weights", "meta"])
def test_an_unchanged_module_trains_as_on_one_process(meta):
    expected_losses, _, expected_logits, expected_weights = run_processes(_life_of_a_module, 1, meta)[0]
    for size in (2, 4):
        for losses, evaluated, logits, weights in run_processes(_life_of_a_module, size, meta):
            assert losses == pytest.approx(expected_losses, rel=1e-5)
            assert max(evaluated) - min(evaluated) < 1e-6
            assert abs(logits - expected_logits).max() < 1e-4
            assert weights.keys() == expected_weights.keys()
            for name, weight in weights.items():
                assert abs(weight - expected_weights[name]).max() < 1e-4, name


def _fit_and_save(path, steps):
    trainer = _trainer(max_epochs=steps, strategy=BoostParallelStrategy())
    torch.manual_seed(0)
    module = UsersModule()
    trainer.fit(module, _loader(num_batches=1))
    trainer.save_checkpoint(path)
    return module.losses


def _resume(path, steps):
    trainer = _trainer(max_epochs=steps)
    torch.manual_seed(99)
    module = UsersModule()
    trainer.fit(module, _loader(num_batches=1), ckpt_path=path)
    return module.losses, trainer.validate(module, _loader(num_batches=1), ckpt_path=path, verbose=False)[0]["val_loss"]


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 2), (2, 1), (1, 2), (4, 2)])
def test_a_checkpoint_goes_on_on_another_layout(tmp_path, saved_by, loaded_by):
    uninterrupted = run_processes(_fit_and_save, 1, tmp_path / "whole.ckpt", 7)[0]
    run_processes(_fit_and_save, saved_by, tmp_path / "half.ckpt", 4)
    for losses, _ in run_processes(_resume, loaded_by, tmp_path / "half.ckpt", 7):
        assert losses == pytest.approx(uninterrupted[4:], rel=1e-5)


def _overwrite(path):
    _fit_and_save(path, 1)
    before = sorted(entry.name for entry in path.parent.iterdir())
    _fit_and_save(path, 2)
    return before, sorted(entry.name for entry in path.parent.iterdir())


def test_saving_again_under_a_name_replaces_the_checkpoint_and_leaves_nothing_behind(tmp_path):
    for before, after in run_processes(_overwrite, 2, tmp_path / "last.ckpt"):
        assert before == after == ["last.ckpt"]


def _train_text(precision):
    torch.manual_seed(0)
    module = LowRankLanguageModel(small_config(vocab_size=257, num_hidden_layers=1), warmup_steps=2)
    data = TextDataModule(sequence_length=32, batch_size=4)
    trainer = _trainer(
        precision=precision,
        max_steps=6,
        val_check_interval=6,
        limit_val_batches=3,
        gradient_clip_val=1.0,
        use_distributed_sampler=True,
    )
    trainer.fit(module, data)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    dtypes = {parameter.dtype for parameter in module.parameters()}
    return metrics, dtypes


@pytest.mark.parametrize(
    ("precision", "dtype", "tolerance"),
    [("32-true", torch.float32, 1e-5), ("bf16-true", torch.bfloat16, 1e-2), ("bf16-mixed", torch.float32, 1e-2)],
)
def test_metrics_are_equal_on_every_process_and_those_of_one(precision, dtype, tolerance):
    expected, _ = run_processes(_train_text, 1, precision)[0]
    assert {"train_loss", "gradient_norm", "val_loss", "val_perplexity"} <= expected.keys()
    assert expected["val_perplexity"] == pytest.approx(torch.tensor(expected["val_loss"]).exp().item(), rel=1e-4)
    results = run_processes(_train_text, 2, precision)
    assert results[0][0] == results[1][0]
    for metrics, dtypes in results:
        assert dtypes == {dtype}
        assert metrics == pytest.approx(expected, rel=tolerance)


def _clip_by_value():
    torch.manual_seed(0)
    module = UsersModule()
    _trainer(max_steps=2, gradient_clip_val=1e-3, gradient_clip_algorithm="value").fit(module, _loader())
    return {name: whole(parameter).numpy() for name, parameter in module.named_parameters()}


def test_clipping_by_value_is_that_of_one_process():
    expected = run_processes(_clip_by_value, 1)[0]
    for weights in run_processes(_clip_by_value, 2):
        for name, weight in weights.items():
            assert abs(weight - expected[name]).max() < 1e-5, name


class _EarlyOptimizer(UsersModule):
    def __init__(self):
        super().__init__()
        self.early = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self):
        return self.early


class _WithMore(UsersModule):
    def __init__(self):
        super().__init__()
        self.value_head = nn.Linear(WIDTH, 1)


def _error_of(module_class, **options):
    try:
        _trainer(**options).fit(module_class(), _loader())
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("module_class", "message"),
    [
        (_EarlyOptimizer, "built before strategy 'boost' replaced them. Build it inside configure_optimizers"),
        (_WithMore, "parameters outside the decoder cannot be trained with tensor_parallel_size above 1 yet"),
    ],
)
def test_what_would_train_something_else_is_refused(module_class, message):
    for error in run_processes(_error_of, 2, module_class):
        assert message in error
