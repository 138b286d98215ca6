"""What is said of checkpoints that nobody loads."""

import json
import os

import pytest

import checkpoint_samples as samples
from accelerate.checkpoint import inspect, names
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint
from accelerate.checkpoint.places import place_of


def found(folder):
    return inspect.survey(place_of(folder))


def verified(folder, **options):
    return inspect.verify(inspect.summarize(place_of(folder)), **options)


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


def test_surplus(tmp_path):
    for number in range(4):
        samples.write(tmp_path / f"checkpoint_{number}", age=100 - number)
    samples.write(tmp_path / "best", age=500)
    (tmp_path / "checkpoint_9").mkdir()

    def old(*arguments):
        return [one.name for one in inspect.surplus(found(tmp_path), *arguments)]

    assert old(1) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert old(3) == ["checkpoint_0"]
    assert old(4) == old(9) == []
    with pytest.raises(ValueError, match="keep=0"):
        old(0)


def test_surplus_and_foreign_ones(tmp_path):
    samples.write(tmp_path / "checkpoint_0", age=100)
    samples.foreign(tmp_path / "checkpoint_1", age=50)
    samples.foreign(tmp_path / "checkpoint_2", age=20)
    assert inspect.surplus(found(tmp_path), 1) == []
    # The newest one that can be verified stays, whatever is newer.
    assert [one.name for one in inspect.surplus(found(tmp_path), 1, foreign=True)] == ["checkpoint_1"]


# -- whether they are whole --------------------------------------------------------------------------------------------


def test_whole(tmp_path):
    folder = samples.write(tmp_path / "checkpoint_0")
    read = []
    assert verified(folder, progress=read.append) == []
    assert sum(read) == inspect.bytes_to_verify(inspect.summarize(place_of(folder)))


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
    found = inspect.details(place_of(folder))
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
    found = inspect.details(place_of(folder))
    assert found.parameters == 66
    assert found.files["sub/part.safetensors"] == 13
    assert found.ranks == found.aliases == {}


def test_details_of_no_checkpoint(tmp_path):
    samples.write(tmp_path / "checkpoint_0")
    with pytest.raises(FileNotFoundError, match="checkpoint_0: name one"):
        inspect.details(place_of(tmp_path))
    with pytest.raises(FileNotFoundError, match="no such folder"):
        inspect.details(place_of(tmp_path / "nowhere"))


def test_header_agrees_with_the_library(tmp_path):
    from safetensors import safe_open

    folder = samples.write(tmp_path / "c")
    header = inspect.header_of(str(folder / "model.safetensors"))
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(header) == set(file.keys())
        for name, span in header.items():
            assert tuple(file.get_slice(name).get_shape()) == span.entry.shape
            assert file.get_slice(name).get_dtype() == span.entry.dtype


def header(told, data=b""):
    text = told if isinstance(told, bytes) else json.dumps(told).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\0\0",
        (1 << 60).to_bytes(8, "little") + b"{}",
        header(b"{nonsense"),
        header(b"[" * 100_000),
        header([]),
        header({"a": None}),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, -4]}}),
        header({"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}, b"1234"),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"123"),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12345678"),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12345"),
    ],
    ids=range(12),
)
def test_damaged_headers(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpoint):
        inspect.header_of(str(path))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../b"}}', '{"weight_map": {"a": 1}}']
)
def test_damaged_indexes(text):
    with pytest.raises(DamagedCheckpoint, match="no index"):
        inspect.weight_map(text, "x")
