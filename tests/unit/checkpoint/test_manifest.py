"""How files are called, and the manifest that lists them: nothing it says is trusted, and its schema is published."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

import checkpoint_samples as samples
from accelerate import Accelerator
from accelerate.checkpoint import formats, manifest
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint, FileEntry, Manifest, TensorEntry
from accelerate.runtime import durable

DOCS = Path(__file__).parents[3] / "docs"
SCHEMA = json.loads((DOCS / "checkpoint-manifest.schema.json").read_text("utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
ENTRY = FileEntry(3, "0" * 32, 1, "", {"a.b": TensorEntry((2, 0), "F32")}, {"tied": "a.b"})
GONE = "omitted"


def test_which_files_belong_to_a_checkpoint():
    files = "model.safetensors model_1.safetensors pytorch_model_1.bin pytorch_model_fsdp_0 pytorch_model_fsdp.bin "
    files += "optimizer_1.bin optimizer_0 optimizer_0_rank1.bin scheduler_1.bin dl_state_dict.bin scaler.pt "
    files += "rank3_dl_state_dict_1.bin custom_checkpoint_0.pkl random_states_0.pkl generators_0.safetensors "
    files += "parameter_names.json accelerate_manifest_parts .incomplete .incomplete_3"
    others = "notes.txt mymodel.safetensors optimizer pytorch_model_fsdp model_a.bin model.safetensors~"
    for name in (*files.split(), *others.split()):
        assert manifest.is_checkpoint_file(name) is (name in files.split()), name
    assert all(map(manifest.is_shard_file, ("__0_0.distcp", "__12_3.distcp", ".metadata")))
    assert not any(map(manifest.is_shard_file, ("__0.distcp", "metadata", *files.split())))


def full() -> Manifest:
    files = {"m": ENTRY, "sub/x.bin": FileEntry(0, "f" * 32)}
    return Manifest(files, world_size=2, strategy="ddp", mesh={"dp": 2}, step=7, iteration=3)


def changed(path, value):
    values = inner = json.loads(full().to_json())
    *parents, last = path
    for key in parents:
        inner = inner[key]
    inner[last] = value
    if value is GONE:
        del inner[last]
    return values


LEADING_OUT = ("", "/a", "..", "../x", "a/../x", "a//x", "./x", "a\\x", "C:x", "a\0x", "a/", NAME)
STRANGE = ("", "/01.json", "/-1.json", "/x.json", "/1.json/x", "/1/0.json", "/1.jsonx")
DAMAGE = [
    (["format"], 3, "format 3 is newer than 2"),
    (["format"], "1", "format cannot be '1'"),
    (["checksum"], {"algorithm": "md5", "chunk": 1}, "its checksums are not"),
    (["checksum"], GONE, "there is no checksum"),
    (["world_size"], 0, "world_size is 0"),
    (["step"], -1, "step cannot be -1"),
    (["iteration"], 1.5, "iteration cannot be 1.5"),
    (["mesh"], {"dp": "2"}, "mesh cannot be {'dp': '2'}"),
    (["versions"], {"torch": 2}, "versions cannot be {'torch': 2}"),
    (["created"], 5, "created cannot be 5"),
    (["files"], [], "files cannot be []"),
    (["files", "m"], 3, "m: 3 is no mapping"),
    (["files", "m", "size"], -1, "m: size cannot be -1"),
    (["files", "m", "size"], None, "m: there is no size"),
    (["files", "m", "checksum"], 3, "m: checksum cannot be 3"),
    (["files", "m", "rank"], True, "m: rank cannot be True"),
    (["files", "m", "digests"], 3, "m: digests cannot be 3"),
    (["files", "m", "digests"], "0" * 31, "m: digests cannot be '000"),
    (["files", "m", "tensors"], [], "m: tensors cannot be []"),
    (["files", "m", "tensors", "a.b", "shape"], [-1], "m: a.b: shape cannot be [-1]"),
    (["files", "m", "tensors", "a.b", "dtype"], 1, "m: a.b: dtype cannot be 1"),
    (["files", "m", "aliases"], {"a": 1}, "m: aliases cannot be {'a': 1}"),
    *((["files", name], {"size": 1, "checksum": "0" * 32}, "leads out of the folder") for name in LEADING_OUT),
    *(
        (["files", f"{manifest.PARTS_FOLDER}{name}"], {"size": 1, "checksum": "0" * 32}, "is not that of the rank")
        for name in STRANGE
    ),
]


@pytest.mark.parametrize(("path", "value", "fragment"), DAMAGE, ids=lambda part: str(part)[:40])
def test_schema_and_reader_refuse_the_same(path, value, fragment):
    values = changed(path, value)
    assert not VALIDATOR.is_valid(values)
    with pytest.raises(DamagedCheckpoint) as refused:
        Manifest.from_json(json.dumps(values), "here")
    assert fragment in str(refused.value) and "here" in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", "[" * 100_000, '{"files": ' * 3000, b"\xff\xfe"])
def test_other_texts_are_refused(text):
    with pytest.raises(DamagedCheckpoint, match="here"):
        Manifest.from_json(text, "here")


def test_digests_are_proved_by_the_checksum(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "CHUNK", 4)
    (tmp_path / "f").write_bytes(b"0123456789")
    entry = formats.describe(tmp_path / "f", 3)
    assert len(entry.digests) == 3 * 32 and formats.write_bytes(tmp_path / "g", b"0123456789", 3) == entry
    assert formats.write_bytes(tmp_path / "h", b"0123").digests == ""
    values = {"format": 2, "checksum": manifest._CHECKSUM, "files": {"f": entry.to_json()}}
    assert Manifest.from_json(json.dumps(values), "here").files == {"f": entry}
    for digests in (entry.digests[32:] + entry.digests[:32], entry.digests + "0" * 32, "x" * 96):
        values["files"]["f"]["digests"] = digests
        with pytest.raises(DamagedCheckpoint, match="f: digests "):
            Manifest.from_json(json.dumps(values), "here")


def parted(folder):
    """Write a manifest with a part of rank 1, and return it with the full entries of the files."""
    entries = {"m": replace(ENTRY, rank=0), "sub/x.bin": ENTRY, "y": replace(ENTRY, tensors=None)}
    part = manifest.write_part(folder, 1, {name: entry for name, entry in entries.items() if entry.rank == 1})
    files = {"m": entries["m"], "sub/x.bin": ENTRY.brief(), "y": ENTRY.brief(), manifest.part_file(1): part}
    Manifest(files).write(folder)
    return Manifest.read(folder), {**entries, manifest.part_file(1): part}


def test_details_stand_in_the_part_of_the_rank_that_wrote_the_file(tmp_path):
    listing, entries = parted(tmp_path)
    VALIDATOR.validate(json.loads((tmp_path / NAME).read_text("utf-8")))
    assert listing.files["sub/x.bin"] == FileEntry(3, "0" * 32, 1) and listing.files["m"].tensors
    assert listing.detailed(tmp_path, listing.files) == entries
    assert listing.detailed(tmp_path, ["y"]) == {"y": entries["y"]}
    (tmp_path / manifest.part_file(1)).unlink()
    assert listing.detailed(tmp_path, ["m"]) == {"m": entries["m"]}  # no other part is read
    with pytest.raises(DamagedCheckpoint, match="could not be read"):
        listing.detailed(tmp_path, ["y"])


@pytest.mark.parametrize("shown", [True, False])
def test_the_leader_opens_the_parts_that_there_are(tmp_path, monkeypatch, shown):
    """It looked for a part of each of a thousand ranks; a network's file system may list fewer than other nodes have written."""
    for rank in (3, 7):
        manifest.write_part(tmp_path, rank, {f"custom_checkpoint_{rank}.pkl": replace(ENTRY, rank=rank)})
    walked, opened, real = os.walk, [], open
    monkeypatch.setattr("os.walk", lambda path: walked(path) if shown else ())
    monkeypatch.setattr("builtins.open", lambda path, *rest: (opened.append(path), real(path, *rest))[1])
    assert set(manifest.parts(tmp_path, range(1000), written=2)) == {3, 7}
    assert len(opened) == (2 if shown else 1000)
    assert manifest.parts(tmp_path / "none", range(1000)) == {}


def test_format_1_has_all_details_in_the_manifest(tmp_path):
    values = {**json.loads(full().to_json()), "format": 1}
    assert Manifest.from_json(json.dumps(values), "here").detailed(tmp_path, ["m"]) == {"m": ENTRY}


PARTS = [
    (b"{", "is not the part"),
    (b"[]", "is no mapping"),
    ({}, "does not say of y"),
    ({"y": replace(ENTRY, tensors=None, size=4).to_json()}, "does not say of y"),
    ({"y": replace(ENTRY, tensors=None, rank=2).to_json()}, "'y' is of another rank"),
    ({"y": ENTRY.to_json(), "../x": ENTRY.to_json()}, "'../x' leads out of the folder"),
    ({"y": ENTRY.to_json(), f"{manifest.PARTS_FOLDER}/x": ENTRY.to_json()}, "is not that of the rank"),
    ({"y": {**ENTRY.to_json(), "digests": "0" * 32}}, "digests are not those of the checksum"),
]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(("content", "fragment"), PARTS)
def test_a_part_is_not_trusted(tmp_path, content, fragment, signed):
    """With the checksum in the manifest, as a user may write both, and without, as damage is found."""
    listing, _ = parted(tmp_path)
    data = content if isinstance(content, bytes) else json.dumps({"files": content}).encode()
    entry = formats.write_bytes(tmp_path / manifest.part_file(1), data, 1)
    if signed:
        listing.files[manifest.part_file(1)] = entry
    with pytest.raises(DamagedCheckpoint, match=re.escape(fragment if signed else "its checksum is ")):
        listing.detailed(tmp_path, ["y"])


def test_the_schema_knows_all_that_is_written(tmp_path):
    VALIDATOR.check_schema(SCHEMA)
    folder = samples.write(tmp_path / "c", aliases={"head.weight": "embed.weight"}, mesh={"dp": 2}, world_size=2)
    values = json.loads((folder / NAME).read_text("utf-8"))
    VALIDATOR.validate(values)
    assert set(values) == set(SCHEMA["properties"]) - {"generation"}
    assert set(values["files"]["model.safetensors"]) == set(SCHEMA["$defs"]["file"]["properties"]) - {"digests"}
    Accelerator(cpu=True).save_state(str(tmp_path / "run"))
    VALIDATOR.validate(json.loads((tmp_path / "run" / NAME).read_text("utf-8")))


def test_the_examples_of_the_page(tmp_path):
    text = (DOCS / "checkpoint-format.md").read_text("utf-8")
    example = re.search(r"```json\n(.*?)```", text, re.S)[1]
    VALIDATOR.validate(json.loads(example))
    assert Manifest.from_json(example, "the page").world_size == 2
    space = {}
    exec(re.search(r"```python\n(.*?)```", text, re.S)[1], space)
    for size in (0, 5, 16, 40):
        (tmp_path / "file").write_bytes(bytes(range(size)))
        assert space["checksum"](tmp_path / "file") == durable.of_file(tmp_path / "file")[1]
