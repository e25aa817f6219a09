"""Weights are handed on whole, the same bytes whatever layout saved them."""

import json
import shutil

import pytest
import torch

from lightning_boost import BoostParallelStrategy, LowRankLanguageModel
from lightning_boost.checkpoint_tools.export import export_checkpoint
from lightning_boost.checkpoint_tools.run_model import exported_names
from lightning_boost.checkpoint_tools.stored import StoredCheckpoint
from lightning_boost.cli import main
from tests.models import masked_batch, small_config
from tests.processes import run_processes
from tests.users_module import UsersModule, loader, trainer_for

GIB = 2**30
LAYOUTS = {
    "one process": (1, 1, 1, "replicate"),
    "tensor 2, pipeline 2": (4, 2, 2, "replicate"),
    "tensor 2, data 2, sharded": (4, 1, 2, "shard"),
}
DTYPE_OF = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "BOOL": torch.bool}


def _rows(config):
    batch = masked_batch(config.vocab_size, rows=8)
    rows = [{name: tensor[row] for name, tensor in batch.items()} for row in range(8)]
    return torch.utils.data.DataLoader(rows, batch_size=4)


def _trainer(layout, **options):
    _, pipeline, tensor, data_axis = LAYOUTS[layout]
    strategy = BoostParallelStrategy(tensor, pipeline_parallel_size=pipeline, data_axis=data_axis)
    return trainer_for(strategy=strategy, **options)


def _train(path, options, precision="32-true"):
    config = small_config(num_hidden_layers=3, **options)
    module = LowRankLanguageModel(config, warmup_steps=0, max_steps=4)
    trainer = _trainer("one process", max_steps=2, precision=precision)
    trainer.fit(module, _rows(config))
    trainer.save_checkpoint(path)
    return {name: tensor.view(torch.uint8).numpy() for name, tensor in module.state_dict().items()}


def _save_again(path, again, layout, options):
    """Load on another layout, and save from it."""
    config = small_config(num_hidden_layers=3, **options)
    trainer = _trainer(layout)
    trainer.validate(LowRankLanguageModel(config), _rows(config), ckpt_path=path, verbose=False)
    trainer.save_checkpoint(again)


def _read(file):
    """Read a file as its format is described."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    assert start % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    tensors, end = {}, 0
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        assert first == end, "there must be no gaps"
        dtype, end = DTYPE_OF[entry["dtype"]], last
        values = torch.frombuffer(bytearray(content[start + first : start + last]), dtype=dtype)
        tensors[name] = values.view(entry["shape"])
    assert start + end == len(content)
    return tensors


@pytest.mark.parametrize("options", [{}, {"low_rank": {"kind": "svd"}, "attention_bias": True}])
def test_files_of_any_layout_are_bitwise_equal(tmp_path, options):
    """known_failures A67."""
    (weights,) = run_processes(_train, 1, tmp_path / "trained.ckpt", options)
    files = []
    for layout, (num_processes, *_) in LAYOUTS.items():
        saved, out = tmp_path / f"{layout}.ckpt", tmp_path / layout
        run_processes(_save_again, num_processes, tmp_path / "trained.ckpt", saved, layout, options)
        export_checkpoint(saved, out, max_shard_bytes=GIB)
        files.append((out / "model.safetensors").read_bytes())
    export_checkpoint(tmp_path / "trained.ckpt", tmp_path / "out", max_shard_bytes=GIB)
    assert set(files) == {(tmp_path / "out" / "model.safetensors").read_bytes()}
    found = _read(tmp_path / "out" / "model.safetensors")
    assert {f"model.{name}" for name in found} == weights.keys()
    assert "model.layers.0.self_attn.q_proj.factor_a.weight" in found
    for name, tensor in found.items():
        assert (tensor.view(torch.uint8).numpy() == weights[f"model.{name}"]).all()


def test_the_safetensors_library_reads_the_files(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    run_processes(_train, 1, tmp_path / "a.ckpt", {}, "bf16-true")
    export_checkpoint(tmp_path / "a.ckpt", tmp_path / "out", max_shard_bytes=GIB)
    found, expected = (
        library.load_file(tmp_path / "out" / "model.safetensors"),
        _read(tmp_path / "out" / "model.safetensors"),
    )
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name])


@pytest.mark.parametrize("layout", ["one process", "tensor 2, data 2, sharded"])
def test_tied_weights_are_written_once(tmp_path, layout):
    options = {"tie_word_embeddings": True}
    (weights,) = run_processes(_train, 1, tmp_path / "a.ckpt", options)
    run_processes(_save_again, LAYOUTS[layout][0], tmp_path / "a.ckpt", tmp_path / "b.ckpt", layout, options)
    written = export_checkpoint(tmp_path / "b.ckpt", tmp_path / "out", max_shard_bytes=GIB)
    assert written.left_out == ["model.lm_head.weight (is model.model.embed_tokens.weight)"]
    found = _read(tmp_path / "out" / "model.safetensors")
    assert {f"model.{name}" for name in found} == weights.keys() - {"model.lm_head.weight"}


def test_bf16_stays_bf16(tmp_path):
    (weights,) = run_processes(_train, 1, tmp_path / "a.ckpt", {}, "bf16-true")
    export_checkpoint(tmp_path / "a.ckpt", tmp_path / "out", max_shard_bytes=GIB)
    for name, tensor in _read(tmp_path / "out" / "model.safetensors").items():
        assert tensor.dtype == torch.bfloat16
        assert (tensor.view(torch.uint8).numpy() == weights[f"model.{name}"]).all()


class _Mixed(UsersModule):
    """Keeps what is no float beside its network, and something that is no tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(7))

    def get_extra_state(self):
        return {"note": "mine"}

    def set_extra_state(self, state):
        assert state == {"note": "mine"}


def _save_users(path, make_module=_Mixed):
    torch.manual_seed(0)
    trainer = trainer_for(max_steps=1, max_epochs=-1)
    trainer.fit(make_module(), loader())
    trainer.save_checkpoint(path)


def test_large_weights_are_cut_into_files_with_an_index(tmp_path):
    run_processes(_save_users, 1, tmp_path / "a.ckpt", UsersModule)
    whole = export_checkpoint(tmp_path / "a.ckpt", tmp_path / "whole", max_shard_bytes=GIB)
    limit = 12_000
    written = export_checkpoint(tmp_path / "a.ckpt", tmp_path / "cut", max_shard_bytes=limit)
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert [*files, "model.safetensors.index.json"] == written.files
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert index["metadata"]["total_size"] == written.num_bytes == whole.num_bytes
    found = {}
    for file in files:
        tensors = _read(tmp_path / "cut" / file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= limit
        assert {index["weight_map"][name] for name in tensors} == {file}
        found |= tensors
    expected = _read(tmp_path / "whole" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_other_types_and_names_stay_as_they_are(tmp_path):
    run_processes(_save_users, 1, tmp_path / "a.ckpt")
    written = export_checkpoint(tmp_path / "a.ckpt", tmp_path / "out", max_shard_bytes=GIB)
    found = _read(tmp_path / "out" / "model.safetensors")
    assert found.keys() == _Mixed().state_dict().keys() - {"_extra_state"}
    assert found["flags"].tolist() == [True, False, True]
    assert found["count"].item() == 7
    assert len(written.left_out) == 1
    assert written.left_out[0].startswith("_extra_state")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.lm_head.weight", "model.model.embed_tokens.weight"], ["lm_head.weight", "model.embed_tokens.weight"]),
        (["net.lm_head.weight", "net.model.embed_tokens.weight"], ["lm_head.weight", "model.embed_tokens.weight"]),
        (["lm_head.weight", "model.embed_tokens.weight"], None),
        # something beside the model would lose its place
        (["net.lm_head.weight", "net.model.embed_tokens.weight", "other.weight"], None),
        (["model.head.weight", "model.model.embed_tokens.weight"], None),
    ],
)
def test_an_attribute_in_front_is_left_out_for_hugging_faces_names(names, expected):
    assert list(exported_names(names).values()) == (expected or names)


# ---- what is in the way


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "a.ckpt"
    run_processes(_save_users, 1, path, UsersModule)
    return path


def _export(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_info:
        main(["checkpoint", "export", *map(str, arguments)])
    printed = capsys.readouterr()
    return exit_info.value.code, printed.out, printed.err


def test_the_command_says_what_it_wrote_and_replaces_nothing_unasked(original, tmp_path, capsys):
    out = tmp_path / "new" / "out"
    code, output, _ = _export(capsys, original, out)
    assert code == 0
    assert "in model.safetensors" in output
    content = (out / "model.safetensors").read_bytes()
    code, _, error = _export(capsys, original, out, "--max_shard_gib", "1e-5")
    assert code == 2
    assert "out exists already. Choose another name, or set overwrite to replace it." in error
    assert (out / "model.safetensors").read_bytes() == content
    code, output, _ = _export(capsys, original, out, "--max_shard_gib", "1e-5", "--overwrite", "--json")
    assert code == 0
    written = json.loads(output.splitlines()[-1])["files"]
    assert sorted(file.name for file in out.iterdir()) == written
    assert [entry.name for entry in out.parent.iterdir()] == ["out"]


def test_what_is_no_export_is_not_replaced(original, tmp_path, capsys):
    (tmp_path / "thesis.tex").touch()
    code, _, error = _export(capsys, original, tmp_path, "--overwrite")
    assert code == 2
    assert "is not replaced: it is no earlier export alone (thesis.tex)" in error
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_damaged_value_is_not_handed_on(original, tmp_path, capsys):
    saved = shutil.copytree(original, tmp_path / "a.ckpt")
    stored = StoredCheckpoint(saved)
    content = stored.read_tensor(stored.model_tensors["net.lm_head.weight"]).numpy().tobytes()
    shard = saved / "__0_0.distcp"
    before = shard.read_bytes()
    assert before.count(content[:64]) == 1
    shard.write_bytes(before.replace(content[:64], bytes(64)))
    code, _, error = _export(capsys, saved, tmp_path / "out")
    assert code == 2
    assert "net.lm_head.weight: is damaged: the checksum of" in error
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_full_disk_is_told_before_anything_is_written(original, tmp_path, capsys, monkeypatch):
    """known_failures A65."""
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("lightning_boost.checkpoint_tools.output.shutil.disk_usage", lambda path: usage)
    code, _, error = _export(capsys, original, tmp_path / "out")
    assert code == 2
    assert "bytes, and 1,000 are free at" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", ["0", "-1"])
def test_a_size_must_be_above_0(original, tmp_path, capsys, size):
    assert (
        f"max_shard_gib ({float(size)}) must be above 0"
        in _export(capsys, original, tmp_path / "out", f"--max_shard_gib={size}")[2]
    )
