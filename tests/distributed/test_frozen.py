"""Frozen parameters have no gradient, no optimizer state and no communication, and the others are trained exactly."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_boost import BoostParallelStrategy, LowRankLanguageModel
from lightning_boost.collectives import count_collectives
from lightning_boost.gradients import clip_gradients_by_norm
from lightning_boost.layout import find_decoder
from lightning_boost.mesh import DATA_AXIS, ParallelSizes, build_mesh
from lightning_boost.parallelize import parallelize
from tests.models import CPU, SEED, masked_batch, meta_model, one_process_model, relative_error, small_config, whole
from tests.processes import run_processes
from tests.users_module import trainer_for

CONFIG = small_config(num_hidden_layers=4, num_key_value_heads=2, attention_bias=True)
TRAINED = {
    "all but the embedding": lambda name: "embed_tokens" not in name,
    "all but the head": lambda name: "lm_head" not in name,
    "the second factors alone": lambda name: "factor_b" in name,
    "the upper half": lambda name: "layers.2" in name or "layers.3" in name or "model.norm" in name,
    "the head alone": lambda name: "lm_head" in name,
    "one layer in the middle": lambda name: "layers.1." in name,
}
LAYOUTS = {
    "tensor 2": (2, 1, 2, "replicate"),
    "tensor 4": (4, 1, 4, "replicate"),
    "data 2": (2, 1, 1, "replicate"),
    "data 2, sharded": (2, 1, 1, "shard"),
    "pipeline 2": (2, 2, 1, "replicate"),
    "pipeline 4": (4, 4, 1, "replicate"),
    "tensor 2, pipeline 2": (4, 2, 2, "replicate"),
    "pipeline 2, data 2, sharded": (4, 2, 1, "shard"),
}


def _freeze(model, trained):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(TRAINED[trained](name))


def _step(model, batch):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    loss = model(**batch)
    loss.backward()
    norm = clip_gradients_by_norm(model.parameters(), 0.1)
    gradients = {name: None if p.grad is None else whole(p.grad).clone() for name, p in model.named_parameters()}
    optimizer.step()
    return norm.item(), gradients, len(optimizer.state)


def _errors(trained, layout):
    _, pipeline, tensor, data_axis = LAYOUTS[layout]
    replicas = dist.get_world_size() // (pipeline * tensor)
    sizes = ParallelSizes(pipeline_parallel_size=pipeline, tensor_parallel_size=tensor, data_parallel_size=replicas)
    mesh = build_mesh(sizes, "cpu")
    model, reference = meta_model(CONFIG), one_process_model(CONFIG)
    _freeze(model, trained)
    _freeze(reference, trained)
    parallelize(find_decoder(model), mesh, device=CPU, seed=SEED, data_axis=data_axis)
    batch = masked_batch(CONFIG.vocab_size, rows=8)
    replica = mesh[DATA_AXIS].get_local_rank()
    with count_collectives() as log:
        norm, gradients, num_states = _step(model, {name: value[replica::replicas] for name, value in batch.items()})
    expected_norm, expected, _ = _step(reference, batch)
    assert norm == pytest.approx(expected_norm, rel=1e-5)
    assert num_states == sum(gradient is not None for gradient in gradients.values())
    errors, weights = {}, dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert (gradients[name] is None) == (expected[name] is None), name
        if gradients[name] is not None:
            errors[name] = ((gradients[name] - expected[name]).norm() / max(expected[name].norm(), 1e-6 * norm)).item()
        errors[f"weight {name}"] = relative_error(whole(parameter), weights[name])
    chunks = ("qkv", "o", "gate_up", "down")
    backward = sum(log.total(operation="all_reduce", chunk=chunk, pass_="backward").launches for chunk in chunks)
    return errors, backward


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_trained_is_trained_as_on_one_process(trained, layout):
    for errors, _ in run_processes(_errors, LAYOUTS[layout][0], trained, layout):
        assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize(
    ("trained", "backward"),
    [
        ("all but the embedding", 4 * 4),
        # of the lowest layer that is trained, the first all-reduce has nothing below it
        ("the second factors alone", 4 * 4 - 1),
        ("the head alone", 0),
        ("the upper half", 2 * 4),
    ],
)
def test_nothing_is_sent_for_what_lies_below(trained, backward):
    for _, found in run_processes(_errors, 2, trained, "tensor 2"):
        assert found == backward


def _fit(pipeline, path, epochs, resume):
    torch.manual_seed(5)
    module = LowRankLanguageModel(
        CONFIG,
        warmup_steps=1,
        max_steps=8,
        frozen_parameters=["model.embed_tokens.*", "model.layers.0.*", "model.layers.1.*"],
        learning_rate_factors={"*.factor_b.*": 0.5},
    )
    batch = masked_batch(CONFIG.vocab_size, rows=8)
    rows = [{name: tensor[row] for name, tensor in batch.items()} for row in range(8)]
    strategy = BoostParallelStrategy(1, pipeline_parallel_size=pipeline)
    trainer = trainer_for(strategy=strategy, max_epochs=epochs)
    trainer.fit(module, DataLoader(rows, batch_size=4), ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    return {name: whole(parameter).detach().numpy() for name, parameter in module.model.named_parameters()}


def test_a_stage_that_is_frozen_trains_saves_and_goes_on(tmp_path):
    whole_run = run_processes(_fit, 1, 1, tmp_path / "whole.ckpt", 2, False)[0]
    run_processes(_fit, 2, 2, tmp_path / "half.ckpt", 1, False)
    for weights in run_processes(_fit, 2, 2, tmp_path / "half.ckpt", 2, True):
        for name, weight in weights.items():
            assert abs(weight - whole_run[name]).max() < 1e-5, name


def _go_on(path, frozen, resume):
    torch.manual_seed(5)
    module = LowRankLanguageModel(CONFIG, warmup_steps=1, max_steps=8, frozen_parameters=frozen)
    batch = masked_batch(CONFIG.vocab_size, rows=8)
    rows = [{name: tensor[row] for name, tensor in batch.items()} for row in range(8)]
    trainer = trainer_for(strategy=BoostParallelStrategy(2), max_steps=4 if resume else 2, max_epochs=-1)
    trainer.fit(module, DataLoader(rows, batch_size=4), ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    steps = {int(state["step"]) for state in trainer.optimizers[0].state.values()}
    return steps, len(trainer.optimizers[0].state), sum(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("frozen", [[], ["model.layers.0.*"], ["model.*"]])
def test_a_run_goes_on_with_other_parts_frozen(tmp_path, frozen):
    """What was frozen until now begins with a fresh state; with the head alone a group of the optimizer is empty."""
    run_processes(_go_on, 2, tmp_path / "a.ckpt", ["model.embed_tokens.*", "model.layers.0.*"], False)
    for steps, num_states, num_trained in run_processes(_go_on, 2, tmp_path / "a.ckpt", frozen, True):
        assert num_states == num_trained
        assert steps == ({4} if frozen == ["model.*"] else {2, 4})
