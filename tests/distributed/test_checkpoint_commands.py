"""A checkpoint is looked at, and proved whole, by one process that has no model."""

import dataclasses
import io
import json
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from lightning_boost import BoostParallelStrategy
from lightning_boost.checkpoint_reader import PlainReader
from lightning_boost.checkpoint_tools.stored import StoredCheckpoint, StoredTensor, uncovered
from lightning_boost.checkpoint_tools.summary import group_by_layer
from lightning_boost.checkpoint_tools.verification import verify_checkpoint
from lightning_boost.cli import main
from tests.models import meta_model, small_config
from tests.processes import run_processes
from tests.users_module import UsersModule, loader, trainer_for


def _save(path):
    torch.manual_seed(0)
    trainer = trainer_for(max_steps=2, max_epochs=-1, strategy=BoostParallelStrategy(2))
    trainer.fit(UsersModule(), loader())
    trainer.save_checkpoint(path)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Saved by four processes, in two replicas."""
    path = tmp_path_factory.mktemp("saved") / "a.ckpt"
    run_processes(_save, 4, path)
    return path


@pytest.fixture
def saved(original, tmp_path):
    """One to damage."""
    return shutil.copytree(original, tmp_path / "a.ckpt")


def _command(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_info:
        main(["checkpoint", *map(str, arguments)])
    printed = capsys.readouterr()
    return exit_info.value.code, printed.out, printed.err


# ---- inspect


def test_what_a_checkpoint_holds_is_shown_without_its_layout(original, capsys):
    code, output, _ = _command(capsys, "inspect", original, "--json")
    found = json.loads(output.splitlines()[-1])
    expected = UsersModule().state_dict()
    assert code == 0
    assert found["num_tensors"] == len(expected)
    assert found["num_values"] == sum(tensor.numel() for tensor in expected.values())
    assert found["num_bytes"] == 4 * found["num_values"]
    assert (found["global_step"], found["num_replicas"], found["num_files"]) == (2, 2, 4)
    assert found["positions"] == [{"epoch": 0, "num_batches": 2, "batch_size": 3}]
    assert found["optimizers"][0]["states"] == dict.fromkeys(("exp_avg", "exp_avg_sq", "step"), len(expected))
    kinds = {kind["name"]: kind for kind in found["kinds"]}
    name = "net.model.layers.{}.mlp.up_proj.factor_a.weight"
    assert kinds[name.format("*")]["layers"] == [0, 1]
    assert kinds[name.format("*")]["shape"] == list(expected[name.format(0)].shape)


def test_the_table_has_a_row_for_each_kind_of_tensor_or_for_all(original, capsys):
    _, table, _ = _command(capsys, "inspect", original)
    _, whole, _ = _command(capsys, "inspect", original, "--all")
    assert "net.model.layers.*.mlp.up_proj.factor_a.weight │ 2 (0–1) │ 9 × 32 │ float32 │" in " ".join(table.split())
    assert "progress:    2 optimizer steps" in table
    assert "data:        epoch 0, behind 2 batches of 3 on each replica" in table
    for name in UsersModule().state_dict():
        assert f" {name} " in whole
        assert ".layers." not in name or f" {name} " not in table


def test_inspecting_reads_no_tensor(saved, capsys):
    for shard in saved.glob("*.distcp"):
        shard.write_bytes(bytes(shard.stat().st_size))
    assert _command(capsys, "inspect", saved)[0] == 0


def test_many_layers_fit_a_screen():
    tensors = [
        StoredTensor(f"state_dict.{name}", tuple(tensor.shape), tensor.dtype, ())
        for name, tensor in meta_model(small_config(num_hidden_layers=48)).state_dict().items()
    ]
    kinds = group_by_layer(tensors)
    assert len(tensors) > 700
    assert len(kinds) < 24
    assert {kind.layers for kind in kinds} == {(), tuple(range(48))}


@pytest.mark.parametrize("action", ["inspect", "verify"])
def test_what_is_no_checkpoint_is_told_in_one_sentence(tmp_path, capsys, action):
    code, _, error = _command(capsys, action, tmp_path / "nothing.ckpt")
    assert code == 2
    assert "nothing.ckpt does not exist; strategy 'boost' loads the directories that it saves" in error


def test_an_unknown_action_is_told(capsys):
    assert "checkpoint must be followed by one of inspect, verify" in _command(capsys, "inspekt", "x")[2]


# ---- verify


def _faults(path):
    return {fault.where: fault.what for fault in verify_checkpoint(path).faults}


def test_a_whole_checkpoint_is_verified(original, capsys):
    code, output, _ = _command(capsys, "verify", original)
    assert code == 0
    assert output.startswith("CHECKPOINT IS WHOLE: ")
    code, output, _ = _command(capsys, "verify", original, "--json")
    found = json.loads(output.splitlines()[-1])
    assert code == 0
    assert found["passed"] is True
    assert found["num_tensors"] == 4 * len(UsersModule().state_dict())


def _cut(file):
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("__1_0.distcp", lambda file: file.unlink(), "is missing"),
        ("__1_0.distcp", _cut, "bytes and must have"),
        (".metadata", lambda file: file.unlink(), "cannot be read"),
        (".metadata", _cut, "cannot be read"),
        ("meta.pt", lambda file: file.unlink(), "is missing"),
        ("meta.pt", _cut, "is damaged"),
    ],
)
def test_a_damaged_file_is_named(saved, capsys, name, damage, message):
    """known_failures A63."""
    damage(saved / name)
    assert list(_faults(saved)) == [name]
    code, output, _ = _command(capsys, "verify", saved)
    assert code == 1
    assert f"{name}: " in output
    assert message in output
    assert output.splitlines()[-1] == "CHECKPOINT IS DAMAGED"


def _tensors(path):
    stored = StoredCheckpoint(path)
    return {key: stored.read_tensor(tensor).numpy().tobytes() for key, tensor in stored.tensors.items()}


def test_a_changed_bit_is_found_wherever_it_changes_a_value(saved, original):
    expected, chosen, num_found = _tensors(original), random.Random(0), 0
    for _ in range(12):
        shard = chosen.choice(sorted(saved.glob("*.distcp")))
        content = bytearray(shard.read_bytes())
        content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
        before = shard.read_bytes()
        shard.write_bytes(content)
        if _faults(saved):
            num_found += 1
        else:
            assert _tensors(saved) == expected
        shard.write_bytes(before)
    assert num_found > 2


class _SavesWhatIsNotFinite(UsersModule):
    def on_train_end(self):
        with torch.no_grad():
            self.net.model.norm.weight[:2] = torch.tensor([float("nan"), float("inf")])


def _save_what_is_not_finite(path):
    trainer = trainer_for(max_steps=1, max_epochs=-1)
    trainer.fit(_SavesWhatIsNotFinite(), loader())
    trainer.save_checkpoint(path)


def test_a_tensor_that_is_not_finite_is_named(tmp_path):
    run_processes(_save_what_is_not_finite, 1, tmp_path / "a.ckpt")
    assert _faults(tmp_path / "a.ckpt") == {"net.model.norm.weight": "1 NaN and 1 infinite of 32 values"}


def test_a_tensor_without_one_of_its_chunks_is_named(saved):
    metadata = PlainReader(saved).read_description()
    key = "state_dict.net.model.layers.0.mlp.up_proj.factor_b.weight"
    chunks = metadata.state_dict_metadata[key].chunks
    chunks.remove(next(chunk for chunk in chunks if chunk.offsets == (25, 0)))
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    assert _faults(saved) == {key.removeprefix("state_dict."): "no chunk holds its values from (25, 0)"}


@pytest.mark.parametrize(
    ("chunks", "fault"),
    [
        ([((0, 0), (4, 6))], None),
        ([((0, 0), (3, 6)), ((3, 0), (1, 4)), ((3, 4), (1, 2))], None),
        ([((0, 0), (3, 6)), ((3, 0), (1, 4))], "no chunk holds its values from (3, 4)"),
        ([((0, 0), (3, 6)), ((2, 0), (2, 6))], "several chunks hold its values from (2, 0)"),
        # as many values as there should be
        ([((0, 0), (2, 6)), ((1, 0), (2, 6))], "no chunk holds its values from (3, 0)"),
        ([((0, 0), (4, 6)), ((4, 0), (1, 6))], "a chunk at (4, 0) of (1, 6) lies outside of (4, 6)"),
        ([], "no chunk holds its values from (0, 0)"),
    ],
)
def test_chunks_must_give_each_value_once(chunks, fault):
    described = tuple(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks)
    assert uncovered(StoredTensor("state_dict.x", (4, 6), torch.float32, described)) == fault


class _Runs:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def test_a_value_that_would_run_code_is_named_and_not_run(saved, tmp_path):
    """known_failures A02."""
    metadata, marker = PlainReader(saved).read_description(), tmp_path / "ran"
    index, place = next(item for item in metadata.storage_data.items() if item[0].fqn.endswith(".lr"))
    content = io.BytesIO()
    torch.save(_Runs(marker), content)
    moved = dataclasses.replace(place, offset=(saved / place.relative_path).stat().st_size, length=content.tell())
    metadata.storage_data[index] = moved
    with (saved / place.relative_path).open("ab") as shard:
        shard.write(content.getvalue())
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    faults = _faults(saved)
    assert list(faults) == [index.fqn]
    assert "cannot be read: Unsupported global: GLOBAL" in faults[index.fqn]
    assert not marker.exists()


# ---- all of them

ACTIONS = ("inspect", "verify", "export")


def _read(capsys, action, path):
    """Return the exit code and all that is said, by a command that reads the trainer's state."""
    code, output, error = _command(capsys, action, path, *[path.parent / "out"] * (action == "export"))
    return code, output + error


class _Runs:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value, 2))])
@pytest.mark.parametrize("action", ACTIONS)
def test_no_command_runs_what_a_trainers_state_names(saved, tmp_path, capsys, action, write):
    """known_failures A02; nor advises to."""
    write(_Runs(tmp_path / "ran"), saved / "meta.pt")
    code, said = _read(capsys, action, saved)
    assert code == (1 if action == "verify" else 2)
    assert "meta.pt" in said
    assert "safe_globals" not in said
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("action", ACTIONS)
def test_a_cut_trainers_state_is_named(saved, capsys, action):
    (saved / "meta.pt").write_bytes((saved / "meta.pt").read_bytes()[:-100])
    assert str(saved / "meta.pt") in _read(capsys, action, saved)[1]


@pytest.mark.parametrize("action", ACTIONS)
def test_a_directory_of_checkpoints_is_none_and_what_is_in_it_is_named(saved, capsys, action):
    code, said = _read(capsys, action, saved.parent)
    assert code == 2
    assert "has no meta.pt" in said
    assert "Those in it: a.ckpt." in said


def test_a_checkpoint_may_be_the_present_directory(saved, capsys, monkeypatch):
    monkeypatch.chdir(saved)
    assert _command(capsys, "verify", ".")[0] == 0


@pytest.mark.parametrize("name", [".metadata", "meta.pt", "__0_0.distcp"])
def test_what_may_not_be_read_is_not_called_damaged(saved, capsys, monkeypatch, name):
    def opened(path, *arguments, **options):
        # root may read everything
        if path == saved / name:
            raise PermissionError(13, "Permission denied", str(path))
        return open(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", opened)
    code, output, error = _command(capsys, "verify", saved)
    assert code == 2
    assert f"Permission denied: '{saved / name}'" in error
    assert "DAMAGED" not in output


def test_one_is_not_written_into_another(saved, capsys):
    code, _, error = _command(capsys, "export", saved, saved / "weights")
    assert code == 2
    assert "and would be removed with it" in error
    assert not (saved / "weights").exists()
