"""Models of other projects start on any layout from the weights in their files, each process from its part of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_boost import BoostParallelStrategy, LowRankLanguageModel
from lightning_boost.checkpoint_tools.conversion import convert_model, open_any
from lightning_boost.checkpoint_tools.export import export_checkpoint
from lightning_boost.checkpoint_tools.stored import StoredCheckpoint
from lightning_boost.interchange import files
from lightning_boost.interchange.source import open_model
from lightning_boost.layout import find_decoder
from lightning_boost.mesh import ParallelSizes, build_mesh
from lightning_boost.model.llama import LlamaForCausalLM
from lightning_boost.parallelize import parallelize
from tests.checkpoints import CHECKPOINTS, DATA, expected, same_tensors, tensors_of, write_model
from tests.distributed import test_meta_start as meta_start
from tests.models import CPU, gradient_errors, masked_batch, small_config, whole
from tests.processes import run_processes
from tests.users_module import UsersModule, loader, trainer_for

LAYOUTS = {
    "one process": {},
    "tensor 2": {"tensor_parallel_size": 2},
    "tensor 4": {"tensor_parallel_size": 4},
    "tensor 2, pipeline 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "tensor 2, data 2, sharded": {"tensor_parallel_size": 2, "data_parallel_size": 2},
}


def _spread(path, sizes):
    source = open_model(path)
    with torch.device("meta"):
        model = LlamaForCausalLM(source.config, source.values)
    data_axis = "shard" if "data_parallel_size" in sizes else "replicate"
    mesh = build_mesh(ParallelSizes(**sizes), "cpu")
    parallelize(find_decoder(model), mesh, device=CPU, seed=0, data_axis=data_axis)
    return model


def _results(name, sizes):
    model, (found, _) = _spread(DATA / name, sizes), expected(name)
    with torch.no_grad():
        logits = model(found["input_ids"])
    loss = model(found["input_ids"], labels=found["labels"])
    loss.backward()
    gradients = {name: whole(parameter.grad).norm().item() for name, parameter in model.named_parameters()}
    return (logits - found["logits"]).abs().max().item(), loss.item(), gradients


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_loss_and_gradients_are_those_of_the_original_code(name, layout):
    found, norms = expected(name)
    sizes = LAYOUTS[layout]
    gradients = {}
    for difference, loss, own in run_processes(_results, ParallelSizes(**sizes).world_size, name, sizes):
        assert difference < 1e-5
        assert loss == pytest.approx(found["loss"].item(), abs=1e-6)
        gradients |= own
    if not norms:
        ((_, _, norms),) = run_processes(_results, 1, name, {})
    assert gradients == pytest.approx(norms, rel=1e-4)


ODD = {
    "cola": {"vocab_size": 131, "intermediate_size": 173, "attention_bias": True, "mlp_bias": True},
    "cola_m": {"vocab_size": 131, "low_rank": {"bottleneck_size": 13}},
    "svd_llm": {"num_key_value_heads": 2, "low_rank": {"kind": "svd", "mlp_bottleneck_size": 23}, "mlp_bias": True},
    "asvd": {
        "num_key_value_heads": 1,
        "attention_bias": True,
        "low_rank": {"kind": "svd", "bottleneck_size": 7, "other_bottleneck_sizes": {"layers.1": "dense"}},
    },
    "hf_dense": {"num_key_value_heads": 2, "attention_bias": True, "low_rank": {"kind": "full_rank"}},
}
"""Widths of 173 and a vocabulary of 131, which no layout divides, odd bottlenecks, few key/value heads, biases."""


def _errors(path, sizes):
    """Compare with the model on one process, which reads everything whole."""
    source, model = open_model(path), _spread(path, sizes)
    reference = LlamaForCausalLM(source.config, source.values)
    batch = masked_batch(source.config.vocab_size)
    expected_loss, loss = reference(**batch), model(**batch)
    expected_loss.backward()
    loss.backward()
    with torch.no_grad():
        difference = (model(batch["input_ids"]) - reference(batch["input_ids"])).abs().max().item()
    return (
        difference,
        ((loss - expected_loss) / expected_loss).abs().item(),
        max(gradient_errors(model, reference, is_stage=True).values()),
    )


@pytest.mark.parametrize("layout", ["tensor 2", "tensor 4", "tensor 2, pipeline 2"])
@pytest.mark.parametrize("to", ODD)
def test_odd_sizes_few_heads_and_biases_are_exact(tmp_path, to, layout):
    """known_failures A32, V14."""
    own, sizes = write_model(tmp_path / "own", small_config(**ODD[to])), LAYOUTS[layout]
    convert_model(open_any(own), tmp_path / to, to=to, max_shard_bytes=2**30)
    for logits, loss, gradient in run_processes(_errors, ParallelSizes(**sizes).world_size, tmp_path / to, sizes):
        assert logits < 1e-5
        assert loss < 1e-6
        assert gradient < 1e-5


def _read_values(name, sizes):
    """Return how many values this process has read, of which tensors, and how many it holds."""
    read = {}
    original = files.SafetensorsTensor.read

    def counted(tensor, dim, start, stop):
        values = original(tensor, dim, start, stop)
        read[tensor.key] = read.get(tensor.key, 0) + values.numel()
        return values

    files.SafetensorsTensor.read = counted
    model = _spread(DATA / name, sizes)
    held = sum(parameter.to_local().numel() for parameter in model.parameters() if not parameter.is_meta)
    return read, held


@pytest.mark.parametrize("layout", ["tensor 2", "tensor 4", "tensor 2, pipeline 2"])
@pytest.mark.parametrize("name", ["cola_latent_only", "asvd_mixed_gqa"])
def test_a_process_reads_what_it_holds_and_nothing_else(name, layout):
    sizes = LAYOUTS[layout]
    results = run_processes(_read_values, ParallelSizes(**sizes).world_size, name, sizes)
    for read, held in results:
        assert sum(read.values()) == held
        layers = {key.split(".")[2] for key in read if key.startswith("model.layers.")}
        assert len(layers) == (1 if "pipeline_parallel_size" in sizes else 2)


SEVEN_B_SHAPED = replace(meta_start.SEVEN_B_SHAPED, num_hidden_layers=8)


def _peak(path):
    Path("/proc/self/clear_refs").write_text("5")
    before = meta_start.status("VmRSS")
    model = _spread(path, {"tensor_parallel_size": 4})
    sizes = [(parameter.to_local().nbytes, parameter.nbytes) for parameter in model.parameters()]
    return meta_start.status("VmHWM") - before, sum(own for own, _ in sizes) + max(whole for _, whole in sizes)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from /proc")
def test_a_process_peaks_below_its_share_and_the_largest_tensor(tmp_path):
    """known_failures A74."""
    for peak, allowed in run_processes(_peak, 4, write_model(tmp_path / "model", SEVEN_B_SHAPED)):
        assert peak < 1.3 * allowed


def _losses(name, checkpoint, again, sizes):
    """Train two steps from a checkpoint of another project; go on from the run's own without that."""
    found, _ = expected(name)
    rows = [{key: found[key][row] for key in ("input_ids", "labels")} for row in range(2)]
    batches = torch.utils.data.DataLoader(rows, batch_size=2)
    strategy = BoostParallelStrategy(**sizes)
    trainer = trainer_for(strategy=strategy, max_steps=2, max_epochs=-1)
    module = LowRankLanguageModel(checkpoint=str(checkpoint), warmup_steps=0, max_steps=9, learning_rate=1e-3)
    trainer.fit(module, batches)
    trainer.save_checkpoint(again)
    resumed = LowRankLanguageModel(module.config, warmup_steps=0, max_steps=9, learning_rate=1e-3)
    trainer = trainer_for(strategy=BoostParallelStrategy(**sizes), max_steps=3, max_epochs=-1)
    trainer.fit(resumed, batches, ckpt_path=again)
    assert "checkpoint" not in module.hparams
    return trainer.global_step, trainer.callback_metrics["train_loss"].item()


def test_training_starts_from_a_checkpoint_on_any_layout(tmp_path):
    name = "svd_llm_uneven"
    ends = []
    for layout in ("one process", "tensor 2", "tensor 2, pipeline 2"):
        sizes, again = LAYOUTS[layout], tmp_path / f"{layout}.ckpt"
        results = run_processes(_losses, ParallelSizes(**sizes).world_size, name, DATA / name, again, sizes)
        assert {step for step, _ in results} == {3}
        ends.append(results[0][1])
        _check_way_back(again, tmp_path / layout)
    assert ends == pytest.approx([ends[0]] * 3, abs=1e-5)
    assert ends[0] < expected(name)[0]["loss"].item()


def _after_a_step_of_nothing(name):
    rows = [{"input_ids": torch.arange(12), "labels": torch.arange(12)}] * 2
    module = LowRankLanguageModel(
        checkpoint=str(DATA / name), learning_rate=0.0, weight_decay=0.0, warmup_steps=0, max_steps=1
    )
    trainer = trainer_for(strategy=BoostParallelStrategy(2), max_steps=1, precision="bf16-true")
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2))
    values = open_model(DATA / name).values
    return [
        torch.equal(parameter.full_tensor(), values[key].whole().bfloat16())
        for key, parameter in module.model.named_parameters()
    ]


def test_the_first_step_goes_on_from_what_was_loaded():
    """known_failures A72."""
    for equal in run_processes(_after_a_step_of_nothing, 2, "cola_latent_only"):
        assert all(equal)


def _check_way_back(saved, out):
    """A fine-tuned model becomes one of the project that it came from."""
    converted = convert_model(open_any(saved), out, to="svd_llm", max_shard_bytes=2**30)
    assert converted.source_format == "boost"
    assert converted.max_logit_difference == 0.0
    was, now = (json.loads((folder / "config.json").read_text()) for folder in (DATA / "svd_llm_uneven", out))
    for name in ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"):
        assert now[name] == was[name]
    stored = StoredCheckpoint(saved)
    for name, value in open_model(out).values.items():
        assert torch.equal(value.whole(), stored.read_tensor(stored.model_tensors[f"model.{name}"]))
    assert tensors_of(out).keys() == tensors_of(DATA / "svd_llm_uneven").keys()


def test_a_run_s_checkpoint_is_told_to_be_converted_first(tmp_path):
    (tmp_path / ".metadata").touch()
    with pytest.raises(ValueError, match=r"is one that a run has saved.*convert .* OUT --to boost"):
        LowRankLanguageModel(checkpoint=str(tmp_path))


def _save_users(path):
    trainer = trainer_for(max_steps=1, max_epochs=-1)
    trainer.fit(UsersModule(), loader())
    trainer.save_checkpoint(path)


def test_a_run_that_noted_no_configuration_is_told(tmp_path):
    run_processes(_save_users, 1, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"the run has not noted its model's configuration.*checkpoint export"):
        convert_model(open_any(tmp_path / "a.ckpt"), tmp_path / "out", to="svd_llm", max_shard_bytes=2**30)
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_an_export_of_a_run_is_a_model_too(tmp_path):
    run_processes(_losses, 1, "svd_llm_uneven", DATA / "svd_llm_uneven", tmp_path / "a.ckpt", {})
    assert "config.json" in export_checkpoint(tmp_path / "a.ckpt", tmp_path / "out", max_shard_bytes=2**30).files
    convert_model(open_any(tmp_path / "a.ckpt"), tmp_path / "converted", to="boost", max_shard_bytes=2**30)
    assert open_model(tmp_path / "out").format.name == "boost"
    assert same_tensors(tmp_path / "out", tmp_path / "converted")
