"""Unmodified models of the transformers library, their linears low-rank, in a LightningModule of a user's own."""

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lightning_boost import BoostParallelStrategy, LowRankLinear, compilation
from lightning_boost.benchmark.live_memory import LiveMemory
from lightning_boost.collectives import count_collectives
from lightning_boost.cost import CHUNKS
from lightning_boost.layout import find_decoder
from lightning_boost.mesh import ParallelSizes, build_mesh
from lightning_boost.parallelize import parallelize
from lightning_boost.recompute import RecomputeOptions
from tests.models import CPU, masked_batch, whole
from tests.processes import run_processes
from tests.users_module import trainer_for

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
VOCAB, LAYERS, STEPS, ROWS = 131, 3, 3, 4
PROJECTIONS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
PROJECTIONS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def network(family, **options):
    """Return a model of the library with a sequence of two linears in the place of each linear."""
    config_class, model_class = FAMILIES[family]
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 173, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": False}
    torch.manual_seed(0)
    model = model_class(config_class(**{**sizes, **heads, **options}))
    for layer in model.model.layers:
        for name in PROJECTIONS:
            linear = layer.get_submodule(name)
            pair = LowRankLinear(
                linear.in_features, linear.out_features, 15, activation="silu", bias=linear.bias is not None
            )
            layer.set_submodule(name, nn.Sequential(pair.factor_a, pair.activation, pair.factor_b))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


class Module(pl.LightningModule):
    """Fine-tunes it as anybody would; knows nothing of processes."""

    def __init__(self, family, loss_from, options):
        super().__init__()
        self.model = network(family, **options)
        self.loss_from, self.losses, self.launches = loss_from, [], []
        self.checkpoints_layers = False

    def on_fit_start(self):
        if self.checkpoints_layers:
            self.model.gradient_checkpointing_enable()

    def training_step(self, batch, batch_idx):
        if self.loss_from == "model":
            return self.model(**batch).loss
        logits = self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())

    def on_train_batch_start(self, batch, batch_idx):
        self.context = count_collectives()
        self.log_of_batch = self.context.__enter__()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.context.__exit__(None, None, None)
        count = self.log_of_batch.total
        self.launches.append(
            [count(operation="all_reduce", chunk=chunk).launches for chunk in ("qkv", "o", "gate_up", "down")]
        )
        self.losses.append(self.trainer.strategy.reduce(outputs["loss"].detach().clone()).item())

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch).loss, sync_dist=True, batch_size=1)

    def predict_step(self, batch, batch_idx):
        return self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits

    def train_dataloader(self):
        batch = masked_batch(VOCAB, rows=STEPS * ROWS)
        # the last sequences are padded in front, as batches for a decoder may be
        padding = torch.zeros_like(batch["input_ids"])
        padding[2::4, :3] = 1
        batch["attention_mask"] = 1 - padding
        batch["labels"] = batch["labels"].masked_fill(padding.bool(), -100)
        place = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        replicas = place["num_replicas"]
        rows = [
            {name: value[row] for name, value in batch.items()} for row in range(place["rank"], STEPS * ROWS, replicas)
        ]
        return DataLoader(rows, batch_size=ROWS // replicas)

    val_dataloader = predict_dataloader = train_dataloader

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _life(family, strategy, loss_from="model", options=None, checkpointing=False):
    module = Module(family, loss_from, options or {})
    module.checkpoints_layers = checkpointing
    trainer = trainer_for(
        strategy=BoostParallelStrategy(**strategy),
        max_steps=STEPS,
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
    )
    trainer.fit(module)
    with torch.no_grad():
        predicted = torch.cat(trainer.predict(module))
    weights = {name: whole(parameter).numpy() for name, parameter in module.named_parameters()}
    return module.losses, weights, module.launches, predicted.numpy() if dist.get_world_size() != 4 else None


@pytest.mark.parametrize(
    ("family", "strategy", "loss_from"),
    [
        ("llama", {"tensor_parallel_size": 2}, "model"),
        ("llama", {"tensor_parallel_size": 2}, "training_step"),
        ("llama", {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}, "model"),
        ("llama", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "model"),
        ("llama", {"tensor_parallel_size": 2, "data_parallel_size": 2}, "model"),
        ("mistral", {"tensor_parallel_size": 2, "data_axis": "shard", "data_parallel_size": 2}, "model"),
        ("qwen2", {"tensor_parallel_size": 2}, "model"),
        ("qwen3", {"tensor_parallel_size": 2}, "model"),
        ("qwen3", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "model"),
        ("llama", {"tensor_parallel_size": 4}, "model"),
        ("llama", {"tensor_parallel_size": 2, "recompute": "low_rank"}, "model"),
        pytest.param("qwen3", {"tensor_parallel_size": 2, "compile": True}, "model", marks=pytest.mark.slow),
        ("qwen3", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "recompute": "low_rank"}, "model"),
        (
            "mistral",
            {"tensor_parallel_size": 2, "data_axis": "shard", "data_parallel_size": 2, "recompute": "low_rank"},
            "model",
        ),
    ],
)
def test_a_model_of_the_library_is_trained_exactly(family, strategy, loss_from, monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    options = {"num_key_value_heads": 2} if strategy["tensor_parallel_size"] == 4 else {}
    processes = strategy["tensor_parallel_size"] * strategy.get("pipeline_parallel_size", 1)
    processes *= strategy.get("data_parallel_size", 1)
    losses, weights, _, predicted = run_processes(_life, 1, family, {}, loss_from, options)[0]
    start = dict(network(family, **options).named_parameters())
    names = set()
    for found, found_weights, launches, found_predicted in run_processes(
        _life, processes, family, strategy, loss_from, options
    ):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, weight in found_weights.items():
            origin = start[name.removeprefix("model.")].detach().numpy()
            change = weights[name] - origin
            error = abs(weight - weights[name]).max() / max(abs(change).max(), 0.01 * abs(origin).max())
            assert error < 1e-4, (name, error)
        names |= found_weights.keys()
        if found_predicted is not None:
            assert abs(found_predicted - predicted).max() < 1e-4
        if strategy["tensor_parallel_size"] > 1 and "pipeline_parallel_size" not in strategy and not options:
            assert launches == [[2 * LAYERS] * 4] * STEPS
    assert names == weights.keys()


@pytest.mark.parametrize(
    "strategy", [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}]
)
def test_the_library_s_gradient_checkpointing_changes_nothing(strategy):
    losses, weights, *_ = run_processes(_life, 1, "llama", {})[0]
    for found, found_weights, launches, _ in run_processes(_life, 2, "llama", strategy, "model", None, True):
        # the first chunk of each layer runs once more
        again = LAYERS if strategy["tensor_parallel_size"] > 1 else 0
        assert [step[0] - 2 * again for step in launches] == [again] * STEPS
        assert found == pytest.approx(losses, rel=1e-5)
        for name, weight in found_weights.items():
            assert abs(weight - weights[name]).max() < 1e-5, name


def _recomputed(family, sizes, options, call):
    """Return a step's loss and gradients, its collectives, and the bytes that are alive behind forward."""
    model = network(family, attention_dropout=0.2).train()
    mesh = build_mesh(ParallelSizes(**sizes), "cpu")
    parallelize(find_decoder(model), mesh, device=CPU, seed=0, recompute=options)
    torch.manual_seed(1)
    with count_collectives() as log, LiveMemory() as live:
        output = model(**masked_batch(VOCAB), **call)
        kept = live.settled()
        output.loss.backward()
    gradients = {name: whole(parameter.grad).numpy() for name, parameter in model.named_parameters()}
    return output.loss.item(), gradients, {tuple(key): traffic for key, traffic in log.traffic.items()}, kept


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("sizes", "call", "is_kept"),
    [
        ({"tensor_parallel_size": 1}, {}, False),
        ({"tensor_parallel_size": 2}, {}, False),
        # who asks for a cache gets it, and nothing is recomputed
        ({"tensor_parallel_size": 2}, {"use_cache": True}, True),
    ],
)
def test_a_model_that_makes_a_cache_is_recomputed_exactly(family, sizes, call, is_kept):
    processes = sizes["tensor_parallel_size"]
    plain = run_processes(_recomputed, processes, family, sizes, RecomputeOptions(), call)
    for options in (RecomputeOptions(kind="low_rank"), RecomputeOptions(kind="low_rank", store_latents="sharded")):
        for (loss, gradients, traffic, kept), (other_loss, other_gradients, other_traffic, other_kept) in zip(
            plain, run_processes(_recomputed, processes, family, sizes, options, call), strict=True
        ):
            assert other_loss == loss
            assert all((other_gradients[name] == gradient).all() for name, gradient in gradients.items())
            gathers = other_traffic.keys() - traffic.keys()
            assert {key: other_traffic[key] for key in traffic} == traffic
            has_gathers = options.store_latents == "sharded" and processes > 1 and not is_kept
            assert gathers == ({("all_gather", chunk, "backward") for chunk in CHUNKS} if has_gathers else set())
            assert all(other_traffic[key].launches == LAYERS for key in gathers)
            assert other_kept == kept if is_kept else other_kept < 0.3 * kept


def _checkpointed_twice():
    model = network("llama").train()
    mesh = build_mesh(ParallelSizes(tensor_parallel_size=2), "cpu")
    parallelize(find_decoder(model), mesh, device=CPU, seed=0, recompute=RecomputeOptions(kind="low_rank"))
    model.gradient_checkpointing_enable()
    model(**masked_batch(VOCAB))


def test_the_library_s_gradient_checkpointing_is_refused_beside_recompute():
    with pytest.raises(RuntimeError, match=r"gradient_checkpointing_enable\(\) must not be called with recompute"):
        run_processes(_checkpointed_twice, 2)


def _asked_for_inner_outputs(sizes, by_config):
    model = network("llama")
    parallelize(find_decoder(model), build_mesh(ParallelSizes(**sizes), "cpu"), device=CPU, seed=0)
    token_ids = masked_batch(VOCAB)["input_ids"]
    with torch.no_grad():
        model(token_ids, output_hidden_states=False)
        if by_config:
            model.config.output_hidden_states = True
            model(token_ids)
        else:
            model(token_ids, output_hidden_states=True)


@pytest.mark.parametrize(
    ("sizes", "by_config"),
    [({"tensor_parallel_size": 2}, False), ({"tensor_parallel_size": 2}, True), ({"pipeline_parallel_size": 2}, False)],
)
def test_what_a_process_has_a_share_of_is_refused(sizes, by_config):
    with pytest.raises(RuntimeError, match="output_hidden_states must be False"):
        run_processes(_asked_for_inner_outputs, 2, sizes, by_config)


def _loss_of_another_kind(sizes):
    model = network("llama")
    parallelize(find_decoder(model), build_mesh(ParallelSizes(**sizes), "cpu"), device=CPU, seed=0)
    model(**masked_batch(VOCAB), num_items_in_batch=7)


@pytest.mark.parametrize("axis", ["data", "pipeline"])
def test_a_loss_that_is_no_mean_over_tokens_is_refused(axis):
    with pytest.raises(RuntimeError, match="num_items_in_batch must be left out"):
        run_processes(_loss_of_another_kind, 2, {f"{axis}_parallel_size": 2})


def _given_whole_embeddings():
    model = network("llama")
    embeddings = model.get_input_embeddings()(masked_batch(VOCAB)["input_ids"])
    parallelize(find_decoder(model), build_mesh(ParallelSizes(tensor_parallel_size=2), "cpu"), device=CPU, seed=0)
    model(inputs_embeds=embeddings)


def test_whole_embeddings_are_refused():
    with pytest.raises(RuntimeError, match="the hidden state has 64 features and must have this process's 32 of 64"):
        run_processes(_given_whole_embeddings, 2)
