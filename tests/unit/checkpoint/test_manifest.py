"""The manifest says what belongs to a checkpoint, and nothing it says is trusted."""

import json
import os

import pytest

from accelerate.checkpoint import manifest
from accelerate.checkpoint.formats import write_bytes
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint, FileEntry, Manifest, TensorEntry

ENTRY = FileEntry(3, "0" * 32, 1, {"a.b": TensorEntry((2, 0), "F32")}, {"tied": "a.b"})


def full() -> Manifest:
    return Manifest({"m.safetensors": ENTRY, "sub/x.bin": FileEntry(0, "f" * 32)}, 2, "ddp", {"dp": 2}, 7, 3)


def changed(**changes):
    """The JSON of a manifest with changes; a change of None removes the key."""
    told = {**json.loads(full().to_json()), **changes}
    return json.dumps({key: value for key, value in told.items() if value is not None or key == "mesh"})


def test_there_and_back(tmp_path):
    written = full()
    written.write(tmp_path)
    assert Manifest.read(tmp_path) == written
    assert os.listdir(tmp_path) == [NAME]
    assert full().size == 3
    assert {"accelerate", "torch", "numpy", "python"} == set(full().versions)


def entry(**changes):
    return {"files": {"m": {**ENTRY.to_json(), **changes}}}


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"format": 2}, "format 2 is newer than 1"),
        ({"format": "1"}, "format '1' is no number"),
        ({"format": None}, "format None is no number"),
        ({"checksum": {"algorithm": "md5", "chunk": 1}}, "md5"),
        ({"files": {}}, "lists no files"),
        ({"files": []}, "files [] is no mapping"),
        ({"world_size": 0}, "world_size is 0"),
        ({"world_size": True}, "world_size True"),
        ({"step": -1}, "step -1"),
        ({"mesh": [1]}, "mesh [1]"),
        ({"versions": {"torch": 2}}, "versions"),
        (entry(size=-1), "size -1"),
        (entry(size=1.5), "size 1.5"),
        (entry(checksum="0"), "32 hexadecimal"),
        (entry(checksum=7), "32 hexadecimal"),
        (entry(rank="0"), "rank '0'"),
        (entry(tensors=[]), "tensors [] is no mapping"),
        (entry(tensors={"a": {"shape": [-1], "dtype": "F32"}}), "shape [-1]"),
        (entry(tensors={"a": {"shape": [1], "dtype": 1}}), "dtype 1"),
        (entry(aliases={"a": 1}), "aliases"),
        ({"files": {"m": 3}}, "m: 3 is no mapping"),
        *[
            ({"files": {name: ENTRY.to_json()}}, "leads out of the folder")
            for name in ("", "/etc/passwd", "../x", "a/../x", "a//x", "./x", "a\\x", "C:x", "a\0x", NAME)
        ],
    ],
)
def test_what_is_no_manifest_is_refused(changes, fragment):
    with pytest.raises(DamagedCheckpoint) as told:
        Manifest.from_json(changed(**changes), "here")
    assert fragment in str(told.value) and "here" in str(told.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", "[" * 100_000, '{"files": ' * 3000, b"\xff\xfe"])
def test_other_texts_are_refused(text):
    with pytest.raises(DamagedCheckpoint, match="here"):
        Manifest.from_json(text, "here")


def test_a_file_that_is_too_large_or_no_file_is_not_parsed(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError):
        Manifest.read(tmp_path)
    full().write(tmp_path)
    monkeypatch.setattr(manifest, "_LARGEST", 100)
    with pytest.raises(DamagedCheckpoint, match="more than 100 bytes"):
        Manifest.read(tmp_path)
    (tmp_path / "d" / NAME).mkdir(parents=True)
    with pytest.raises(DamagedCheckpoint):
        Manifest.read(tmp_path / "d")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(DamagedCheckpoint, match="is no file"):
        Manifest.read(tmp_path)


def test_problems_name_file_expectation_and_finding(tmp_path):
    files = {name: write_bytes(tmp_path / name, b"content") for name in ("a", "b", "c", "d")}
    told = Manifest(files)
    assert manifest.problems(tmp_path, told, deep=True) == []
    (tmp_path / "a").unlink()
    (tmp_path / "b").write_bytes(b"cont")
    (tmp_path / "c").write_bytes(b"cOntent")
    (tmp_path / "d").unlink()
    (tmp_path / "d").mkdir()
    assert [line.split(":")[0] for line in manifest.problems(tmp_path, told)] == [
        "a is missing (7 bytes were written)",
        "b has 4 bytes, but 7 were written",
        "d is missing (7 bytes were written)",
    ]
    hashed = []
    deep = manifest.problems(tmp_path, told, deep=True, only="bc".__contains__, progress=hashed.append)
    assert len(deep) == 2 and deep[1].startswith("c has changed: its checksum is") and sum(hashed) == 7
    error = str(manifest.damaged(tmp_path, [f"line {number}" for number in range(12)]))
    assert "line 9" in error and "line 10" not in error and "and 2 more" in error and str(tmp_path) in error
