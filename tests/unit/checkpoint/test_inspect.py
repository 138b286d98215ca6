"""What is said of checkpoints that nobody loads."""

import json
import os

import pytest

import checkpoint_samples as samples
from accelerate.checkpoint import inspect, names
from accelerate.checkpoint.manifest import NAME
from accelerate.checkpoint.storage import storage_of


def found(folder):
    return inspect.survey(storage_of(folder))


def verified(folder, **options):
    return inspect.verify(inspect.summarize(storage_of(folder)), **options)


# -- which there are ---------------------------------------------------------------------------------------------------


def test_a_project_folder(tmp_path):
    samples.write(tmp_path / "checkpoints" / "checkpoint_2", age=50, iteration=2)
    samples.write(tmp_path / "checkpoints" / "checkpoint_10", age=100, iteration=10)  # copied, say: its number counts
    samples.write(tmp_path / "best", age=70)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events.1").write_text("x")
    assert [one.name for one in found(tmp_path)] == ["checkpoints/checkpoint_2", "best", "checkpoints/checkpoint_10"]
    assert {one.state.kind for one in found(tmp_path)} == {"complete"}


def test_a_folder_of_checkpoints(tmp_path):
    samples.write(tmp_path / "checkpoint_0", age=9)
    samples.foreign(tmp_path / "epoch_3", age=5)
    (tmp_path / "checkpoint_1").mkdir()
    states = {one.name: one.state.kind for one in found(tmp_path)}
    assert states == {"checkpoint_0": "complete", "epoch_3": "foreign", "checkpoint_1": "incomplete"}


def test_one_checkpoint(tmp_path):
    folder = samples.write(tmp_path / "best", step=3, world_size=2, strategy="ddp")
    (one,) = found(folder)
    assert (one.name, one.number, one.state.kind) == ("best", None, "complete")
    assert one.size == sum(p.stat().st_size for p in folder.iterdir() if p.name != NAME)
    told = one.to_json()
    assert (told["step"], told["world_size"], told["strategy"], told["location"]) == (3, 2, "ddp", str(folder))
    assert json.loads(json.dumps(told)) == told


def test_one_foreign_checkpoint(tmp_path):
    (one,) = found(samples.foreign(tmp_path / "epoch_3", age=500))
    assert (one.name, one.state.kind) == ("epoch_3", "foreign")
    assert 499 < one.age() < 560
    assert one.to_json()["step"] is None


def test_weights_beside_checkpoints(tmp_path):
    samples.foreign(tmp_path, age=10)
    samples.write(tmp_path / "checkpoint_0")
    assert [one.name for one in found(tmp_path)] == [".", "checkpoint_0"]


def test_nothing(tmp_path):
    assert found(tmp_path) == found(tmp_path / "nowhere") == []


def test_a_manifest_with_a_strange_date(tmp_path):
    folder = samples.write(tmp_path / "checkpoint_0")
    told = json.loads((folder / NAME).read_text())
    (folder / NAME).write_text(json.dumps({**told, "created": "yesterday"}))
    samples.touch(folder, 100)
    assert 99 < found(folder)[0].age() < 160


# -- whether they are whole --------------------------------------------------------------------------------------------


def test_whole(tmp_path):
    folder = samples.write(tmp_path / "checkpoint_0")
    read = []
    assert verified(folder, progress=read.append) == []
    assert sum(read) == inspect.bytes_to_verify(inspect.summarize(storage_of(folder)))


def test_flipped_byte(tmp_path):
    folder = samples.write(tmp_path / "checkpoint_0")
    samples.flip(folder / "model.safetensors")
    (problem,) = verified(folder)
    assert "model.safetensors has changed" in problem


def test_every_problem_is_listed(tmp_path):
    folder = samples.write(tmp_path / "checkpoint_0")
    samples.flip(folder / "model.safetensors")
    (folder / "optimizer.bin").unlink()
    problems = verified(folder)
    assert len(problems) == 2
    assert any("optimizer.bin is missing" in problem for problem in problems)


@pytest.mark.parametrize("how", ["empty", "marked", "no manifest", "broken manifest"])
def test_incomplete(tmp_path, how):
    folder = tmp_path / "checkpoint_0"
    if how == "empty":
        folder.mkdir()
    else:
        samples.write(folder)
    if how == "marked":
        (folder / names.INCOMPLETE_MARKER).touch()
    elif how == "no manifest":
        (folder / NAME).unlink()
    elif how == "broken manifest":
        (folder / NAME).write_text("{")
    assert len(verified(folder)) == 1


def test_absent(tmp_path):
    assert verified(tmp_path / "nowhere") == ["there is no such folder"]


def test_foreign_ones_by_their_structure(tmp_path):
    folder = samples.foreign(tmp_path / "epoch_0")
    assert verified(folder) == []
    samples.flip(folder / "optimizer.bin", 70)
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(os.path.getsize(folder / "model.safetensors") - 1)
    problems = verified(folder)
    assert [problem.split()[0] for problem in problems] == ["model.safetensors", "optimizer.bin"]
    (folder / "optimizer.bin").write_bytes((folder / "optimizer.bin").read_bytes()[:-30])
    assert "optimizer.bin is damaged" in verified(folder)[1]


# -- what is in them ---------------------------------------------------------------------------------------------------


def test_details(tmp_path):
    folder = samples.write(
        tmp_path / "best", aliases={"head.weight": "embed.weight"}, mesh={"dp": 2}, versions={"torch": "9"}
    )
    found = inspect.details(storage_of(folder))
    assert (found.tensor_count, found.parameters) == (5, 35 + 25 + 5 + 1)
    assert found.dtypes == {"F32": 40, "BF16": 25, "I64": 1}
    assert found.aliases == {"model.safetensors": {"head.weight": "embed.weight"}}
    assert set(found.files) == {"model.safetensors", "optimizer.bin", "generators_0.safetensors"}
    told = found.to_json()
    assert (told["mesh"], told["versions"]) == ({"dp": 2}, {"torch": "9"})
    assert "list" not in told["tensors"]
    listed = found.to_json(tensors=True)["tensors"]["list"]["model.safetensors"]
    assert listed["embed.weight"] == {"shape": [7, 5], "dtype": "F32"}


def test_details_of_a_foreign_one(tmp_path):
    folder = samples.foreign(tmp_path / "epoch_0")
    (folder / "sub").mkdir()
    (folder / "sub" / "part.safetensors").write_bytes(b"no such thing")
    found = inspect.details(storage_of(folder))
    assert found.parameters == 66
    assert found.files["sub/part.safetensors"] == 13
    assert found.ranks == found.aliases == {}


def test_details_of_no_checkpoint(tmp_path):
    samples.write(tmp_path / "checkpoint_0")
    with pytest.raises(FileNotFoundError, match="checkpoint_0: name one"):
        inspect.details(storage_of(tmp_path))
    with pytest.raises(FileNotFoundError, match="no such folder"):
        inspect.details(storage_of(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("files", "name", "layout"),
    [
        (["model.safetensors", "pytorch_model.bin", "optimizer.bin"], "model.safetensors", "full"),
        (["model.safetensors.index.json", "model-00001-of-00001.safetensors"], "model.safetensors.index.json", "full"),
        (["pytorch_model.bin.index.json"], "pytorch_model.bin.index.json", "full"),
        (["pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin"], "pytorch_model_fsdp.bin", "full"),
        (["pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp"], "pytorch_model_fsdp_0", "sharded"),
        (["model.safetensors", "pytorch_model_fsdp_0/__0_0.distcp"], "model.safetensors", "full"),
    ],
)
def test_where_a_model_is(files, name, layout):
    assert inspect.part_of(files, "model", 0, "here") == inspect.Part(name, layout)


def test_where_others_are():
    assert (
        inspect.part_of(["model_1.safetensors.index.json"], "model", 1, "here").name
        == "model_1.safetensors.index.json"
    )
    assert (
        inspect.part_of(["optimizer_1.bin", "optimizer_0/.metadata"], "optimizer", 1, "here").name == "optimizer_1.bin"
    )
    assert inspect.part_of(["optimizer_1.bin", "optimizer_0/.metadata"], "optimizer", 0, "here").layout == "sharded"
    assert inspect.part_of(["optimizer.bin"], "model", 0, "here") is None


@pytest.mark.parametrize(
    "files",
    [
        ["model.safetensors", "pytorch_model_fsdp_0/.metadata"],
        ["pytorch_model_fsdp.bin", "pytorch_model_fsdp_0/.metadata"],
        ["pytorch_model_fsdp.bin", "model.safetensors"],
        ["model.safetensors", "model.safetensors.index.json"],
    ],
)
def test_what_is_there_twice(files):
    with pytest.raises(ValueError, match="'here' has model 0 more than once: .* and ") as caught:
        inspect.part_of(files, "model", 0, "here")
    assert all(name.split("/")[0] in str(caught.value) for name in files)
