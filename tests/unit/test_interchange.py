"""What is wrong with a model's files is named, by whoever reads them; no code in them runs unasked."""

import hashlib
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from safetensors.torch import load_file, save_file

from lightning_boost import LlamaConfig, LowRankLanguageModel
from lightning_boost.cli import main
from lightning_boost.interchange.source import open_model
from lightning_boost.model.llama import LlamaForCausalLM
from tests.checkpoints import DATA, expected, write_model
from tests.models import small_config

COLA, DENSE, ASVD = "cola_latent_only", "llama_dense_gqa", "asvd_mixed_gqa"
A_FACTOR, A_MATRIX = "model.layers.1.mlp.up_proj.cola_a", "model.layers.0.self_attn.k_proj.weight"


def _with_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _with_config(**changes):
    def change(folder):
        stated = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**stated, **changes}))

    return change


def _tensors(change):
    return lambda folder: _with_tensors(folder, change)


def _misspell(tensors):
    tensors[A_FACTOR.replace("up_proj", "upp_proj")] = tensors.pop(A_FACTOR)


def _add_biases(tensors):
    tensors |= {f"model.layers.{layer}.self_attn.{name}_proj.bias": torch.zeros(64) for layer in "01" for name in "qkv"}


def _cut(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def _index_of_nothing(folder):
    places = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(places))


def _set_nan(tensors):
    tensors[A_FACTOR][3, 4] = torch.nan


WRONG = {
    "missing": (COLA, _tensors(lambda found: found.pop(A_FACTOR)), f"1 missing: {A_FACTOR}"),
    "misspelt": (COLA, _tensors(_misspell), f"{A_FACTOR} (there is model.layers.1.mlp.upp_proj.cola_a)"),
    "unexpected": (
        DENSE,
        _tensors(lambda found: found.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)})),
        "1 without a place in the model: model.layers.0.self_attn.q_norm.weight",
    ),
    "another number of layers": (DENSE, _with_config(num_hidden_layers=1), "9 without a place in the model: "),
    "transposed factor": (
        COLA,
        _tensors(lambda found: found.update({A_FACTOR: found[A_FACTOR].t().contiguous()})),
        f"tensor {A_FACTOR} is [20, 64] and must be [64, R], R the bottleneck size: it is transposed",
    ),
    "transposed matrix": (
        DENSE,
        _tensors(lambda found: found.update({A_MATRIX: found[A_MATRIX].t().contiguous()})),
        f"tensor {A_MATRIX} is [64, 32] and must be [32, 64]: it is transposed",
    ),
    "another shape": (
        COLA,
        _tensors(lambda found: found.update({A_FACTOR.replace("_a", "_b"): torch.ones(19, 172)})),
        "up_proj.cola_b is [19, 172] and must be [20, 172]",
    ),
    "not finite": (COLA, _tensors(_set_nan), f"tensor {A_FACTOR} is NaN or infinite in 1 of 1,280 values"),
    "quantised": (
        DENSE,
        _tensors(lambda found: found.update({A_MATRIX: torch.ones(32, 64, dtype=torch.int8)})),
        f"tensor {A_MATRIX} is I8, and weights must be F64, F32, F16, BF16",
    ),
    "some biases": (DENSE, _tensors(_add_biases), "q_proj, k_proj, v_proj have biases and the other projections of"),
    "cut": (DENSE, _cut, "model.safetensors is cut or no safetensors file"),
    "index of a missing file": (DENSE, _index_of_nothing, "names the file model-00001-of-00001.safetensors, which is"),
    "no config": (DENSE, lambda folder: (folder / "config.json").unlink(), "has no config.json beside model.safe"),
    "no JSON": (DENSE, lambda folder: (folder / "config.json").write_text("{"), "config.json is no JSON"),
    "a size not stated": (DENSE, _with_config(hidden_size=None), "must state hidden_size as a whole number"),
    "another size": (COLA, _with_config(hidden_size=32, head_dim=None), "must be [32, R], R the bottleneck size; or"),
    "another bottleneck size": (COLA, _with_config(rank=9), "states rank 9, and q_proj of layer 0 has a bottleneck"),
    "another truncation": (
        ASVD,
        _with_config(truncation_ranks={"model.layers.1.self_attn.o_proj": 3}),
        "states 3 in truncation_ranks for model.layers.1.self_attn.o_proj, whose bottleneck size is none: it is dense",
    ),
    "another activation": (DENSE, _with_config(hidden_act="gelu"), "config.json states hidden_act 'gelu'"),
    "a window": (DENSE, _with_config(sliding_window=8), "config.json states sliding_window 8"),
    "another rotary scaling": (
        DENSE,
        _with_config(rope_scaling={"rope_type": "yarn", "factor": 2.0}),
        "rope_scaling.rope_type ('yarn') must be",
    ),
    "no number": (DENSE, _with_config(rms_norm_eps="1e-6"), "states rms_norm_eps '1e-6', and it must be a number"),
    "no flag": (
        DENSE,
        _with_config(tie_word_embeddings="no"),
        "tie_word_embeddings 'no', and it must be true or false",
    ),
    "no scaling": (DENSE, _with_config(rope_scaling="linear"), "rope_scaling 'linear', and it must be an object"),
    "another rotary pairing": (DENSE, _with_config(model_type="helium"), "states model_type 'helium', whose rotary"),
    "layers without positions": (DENSE, _with_config(no_rope_layers=[1, 0]), "config.json states no_rope_layers"),
    "a part of each head": (
        DENSE,
        _with_config(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}),
        "config.json states partial_rotary_factor 0.5",
    ),
    "adapters": (
        DENSE,
        _tensors(lambda found: found.update({"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(1, 64)})),
        "adapters that are added to other matrices",
    ),
    "another network": (
        DENSE,
        lambda folder: save_file({"wte.weight": torch.ones(2)}, folder / "model.safetensors"),
        "its keys (wte.weight, …) are those of no format that is read",
    ),
    "no weights": (DENSE, lambda folder: (folder / "model.safetensors").unlink(), "it has none of model.safetensors"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_named_and_nothing_is_left(tmp_path, capsys, wrong):
    """known_failures A68."""
    name, damage, message = WRONG[wrong]
    folder = shutil.copytree(DATA / name, tmp_path / "in", ignore=shutil.ignore_patterns("expected*"))
    damage(folder)
    with pytest.raises(SystemExit) as exit_info:
        main(["convert", str(folder), str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert message in error
    assert str(folder) in error
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_nothing_there_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="checkpoint nowhere does not exist"):
        LowRankLanguageModel(checkpoint="nowhere")
    with pytest.raises(ValueError, match="which file holds the tensors"):
        LowRankLanguageModel(checkpoint=str(tmp_path))
    with pytest.raises(ValueError, match=r"must be a directory, or a file named .safetensors, .bin"):
        LowRankLanguageModel(checkpoint=__file__)


def test_a_value_that_is_not_finite_is_told_when_its_share_is_read(tmp_path):
    folder = shutil.copytree(DATA / COLA, tmp_path / "in")
    _with_tensors(folder, _set_nan)
    value = open_model(folder).values["model.layers.1.mlp.up_proj.factor_a.weight"]
    value.share(1, 4, 64)
    with pytest.raises(ValueError, match=rf"{A_FACTOR} is NaN or infinite in 1 of"):
        value.share(1, 0, 4)


# ---- other names and files of the same


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "net._orig_mod."])
def test_names_of_wrappers_are_left_out_and_rotary_tables_ignored(tmp_path, prefix):
    """known_failures A70."""
    folder = shutil.copytree(DATA / DENSE, tmp_path / "in")
    tensors = {f"{prefix}{key}": tensor for key, tensor in load_file(folder / "model.safetensors").items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    found, _ = expected(DENSE)
    assert (_logits(folder, found) - found["logits"]).abs().max() < 1e-5


def _logits(path, found, **options):
    source = open_model(path, **options)
    return LlamaForCausalLM(source.config, source.values)(found["input_ids"])


def test_a_single_file_with_its_config_beside_it_will_do(tmp_path):
    folder = shutil.copytree(DATA / ASVD, tmp_path / "in")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    found, _ = expected(ASVD)
    assert (_logits(folder / "weights.safetensors", found) - found["logits"]).abs().max() < 1e-5
    with pytest.raises(ValueError, match=r"holds expected.safetensors, weights.safetensors; name one of them"):
        open_model(folder)


def test_a_value_is_cut_along_any_dim(tmp_path):
    source = open_model(DATA / COLA)
    for value in source.values.values():
        whole = value.whole()
        assert whole.is_contiguous()
        for dim, size in enumerate(whole.shape):
            assert torch.equal(value.share(dim, 1, size - 1), whole.narrow(dim, 1, size - 2))
            assert value.share(dim, size, size).shape[dim] == 0


def test_the_dynamic_rotary_form_looks_at_the_model_s_context(tmp_path):
    """As ``transformers`` does, which leaves a training's context in ``rope_scaling`` aside."""
    folder = shutil.copytree(DATA / DENSE, tmp_path / "in")
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}
    _with_config(rope_scaling=scaling, max_position_embeddings=16)(folder)
    found = open_model(folder).config.rope_scaling
    assert found is not None
    assert found.original_max_position_embeddings == 16


def test_a_tied_head_may_be_written_or_not(tmp_path):
    written = write_model(tmp_path / "own", small_config(tie_word_embeddings=True))
    first = open_model(written)
    _with_tensors(written, lambda found: found.update({"lm_head.weight": found["model.embed_tokens.weight"].clone()}))
    assert open_model(written).values.keys() == first.values.keys()
    assert "lm_head.weight" not in first.values


# ---- pickles


class _Marker:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


class _Config:
    def __init__(self, stated):
        self.stated = stated

    def to_dict(self):
        return self.stated


class _Pickled(torch.nn.Module):
    """A model as SVD-LLM's files hold one."""

    def __init__(self, folder):
        super().__init__()
        self.config = _Config(json.loads((folder / "config.json").read_text()))
        for key, tensor in load_file(folder / "model.safetensors").items():
            *owners, leaf = key.split(".")
            module = self
            for owner in owners:
                if owner not in module._modules:
                    module.add_module(owner, torch.nn.Module())
                module = module.get_submodule(owner)
            module.register_parameter(leaf, torch.nn.Parameter(tensor))


@pytest.mark.parametrize("wrapped", [False, True])
def test_plain_tensors_of_torch_s_files_are_read(tmp_path, wrapped):
    folder = shutil.copytree(DATA / COLA, tmp_path / "in", ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(DATA / COLA / "model.safetensors")
    torch.save({"state_dict": tensors, "step": 3} if wrapped else tensors, folder / "pytorch_model.bin")
    found, _ = expected(COLA)
    assert (_logits(folder, found) - found["logits"]).abs().max() < 1e-5


def test_files_that_run_code_are_refused_unless_trusted(tmp_path, capsys):
    """known_failures A02."""
    marker, file = tmp_path / "marker", tmp_path / "model.pt"
    torch.save({"model": _Pickled(DATA / "svd_llm_uneven"), "tokenizer": _Marker(marker)}, file)
    with pytest.raises(ValueError, match="reading it would run code from it"):
        LowRankLanguageModel(checkpoint=str(file))
    for options, code in (((), 2), (("--trust-pickle",), 0)):
        with pytest.raises(SystemExit) as exit_info:
            main(["convert", str(file), str(tmp_path / "out"), *options])
        assert exit_info.value.code == code
        error = capsys.readouterr().err
        assert marker.exists() == (tmp_path / "out").exists() == bool(options)
        if options:
            assert f"trusted: {file}, SHA-256 {hashlib.sha256(file.read_bytes()).hexdigest()}" in error
        else:
            assert "--trust-pickle" in error
    found, _ = expected("svd_llm_uneven")
    assert (_logits(tmp_path / "out", found) - found["logits"]).abs().max() < 1e-5


def test_a_damaged_pickle_is_told(tmp_path):
    file = tmp_path / "model.pt"
    file.write_bytes(b"PK\x03\x04 and nothing else")
    with pytest.raises(ValueError, match=r"model.pt is damaged or no file of torch's"):
        open_model(file)


# ---- as a LightningModule


def test_a_module_takes_its_configuration_from_the_checkpoint():
    module = LowRankLanguageModel(checkpoint=str(DATA / COLA))
    assert module.config.hidden_size == 64
    assert module.hparams["config"]["low_rank"]["bottleneck_size"] == 20
    module.configure_model()
    found, _ = expected(COLA)
    assert (module(found["input_ids"]) - found["logits"]).abs().max() < 1e-5


def test_options_of_training_may_be_given_beside_it_and_the_same_sizes_too():
    found = open_model(DATA / COLA).config
    for config in (LlamaConfig(hidden_dropout=0.1), LlamaConfig(**{**vars(found), "hidden_dropout": 0.1})):
        module = LowRankLanguageModel(config, checkpoint=str(DATA / COLA))
        assert (module.config.hidden_size, module.config.hidden_dropout) == (64, 0.1)


def test_a_vocabulary_that_is_not_the_checkpoint_s_is_told():
    module = LowRankLanguageModel(checkpoint=str(DATA / DENSE))
    with pytest.raises(ValueError, match=r"vocab_size \(128\) must be .* give the tokenizer that belongs to them"):
        module.check_vocabulary(SimpleNamespace(vocab_size=257))


def test_another_configuration_is_refused():
    with pytest.raises(ValueError, match=r"hidden_size is 64 there and 128 in config.*Leave model.config out"):
        LowRankLanguageModel(LlamaConfig(vocab_size=128, hidden_size=128), checkpoint=str(DATA / COLA))


def test_lightning_s_file_of_it_loads_without_the_checkpoint(tmp_path):
    folder = shutil.copytree(DATA / COLA, tmp_path / "in")
    module = LowRankLanguageModel(checkpoint=str(folder))
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, max_steps=1)
    trainer.strategy.connect(module)
    module.configure_model()
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    shutil.rmtree(folder)
    again = LowRankLanguageModel.load_from_checkpoint(tmp_path / "a.ckpt")
    found, _ = expected(COLA)
    assert (again(found["input_ids"]) - found["logits"]).abs().max() < 1e-5
