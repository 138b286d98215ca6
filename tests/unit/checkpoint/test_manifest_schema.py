"""The published schema of the manifest, against manifests and against what their reader refuses."""

import copy
import json
import re
from pathlib import Path

import pytest

import checkpoint_samples as samples
from accelerate.checkpoint.manifest import FORMAT, NAME, DamagedCheckpoint, Manifest
from accelerate.runtime import durable

DOCS = Path(__file__).parents[3] / "docs"
SCHEMA = json.loads((DOCS / "checkpoint-manifest.schema.json").read_text("utf-8"))
KINDS = {"object": dict, "array": list, "string": str, "integer": int, "null": type(None)}


def is_kind(value, kind):
    return isinstance(value, KINDS[kind]) and not isinstance(value, bool)


def violations(value, schema=SCHEMA, where="$"):
    """The part of JSON Schema that the schema uses."""
    known = {"$schema", "title", "description", "$defs", "$ref", "type", "const", "minimum", "pattern", "not", "items"}
    assert set(schema) <= known | {"required", "properties", "additionalProperties", "propertyNames", "minProperties"}
    found = []
    if "$ref" in schema:
        found += violations(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], where)
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(is_kind(value, kind) for kind in kinds):
        return [f"{where} is no {kinds}"]
    if "const" in schema and (value != schema["const"] or type(value) is not type(schema["const"])):
        found.append(f"{where} is not {schema['const']}")
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{where} is below {schema['minimum']}")
    if "pattern" in schema and not re.search(schema["pattern"], value):
        found.append(f"{where} does not match {schema['pattern']}")
    if "not" in schema and not violations(value, schema["not"], where):
        found.append(f"{where} is what it must not be")
    if isinstance(value, list):
        found += [
            v for index, one in enumerate(value) for v in violations(one, schema.get("items", {}), f"{where}[{index}]")
        ]
    if isinstance(value, dict):
        found += [f"{where} lacks {key}" for key in schema.get("required", []) if key not in value]
        found += [f"{where} is empty"] * (len(value) < schema.get("minProperties", 0))
        for key, one in value.items():
            inner = schema.get("properties", {}).get(key, schema.get("additionalProperties", {}))
            found += violations(one, inner, f"{where}.{key}")
            found += violations(key, schema.get("propertyNames", {}), f"{where}: the name {key!r}")
    return found


@pytest.fixture
def told(tmp_path):
    folder = samples.write(
        tmp_path / "c", aliases={"head.weight": "embed.weight"}, mesh={"dp": 2}, world_size=2, strategy="ddp"
    )
    return json.loads((folder / NAME).read_text("utf-8"))


def test_a_real_manifest(told):
    assert violations(told) == []
    assert set(told) == set(SCHEMA["properties"]) - {"generation"}
    (tensors,) = [entry for entry in told["files"].values() if "aliases" in entry]
    assert set(tensors) == set(SCHEMA["$defs"]["file"]["properties"])


def test_a_manifest_of_a_run(tmp_path):
    from accelerate import Accelerator

    Accelerator(cpu=True).save_state(str(tmp_path / "c"))
    assert violations(json.loads((tmp_path / "c" / NAME).read_text("utf-8"))) == []


def test_constants():
    properties = SCHEMA["properties"]
    assert properties["format"]["const"] == FORMAT
    method = properties["checksum"]["properties"]
    assert (method["algorithm"]["const"], method["chunk"]["const"]) == (durable.ALGORITHM, durable.CHUNK)


def test_the_example_of_the_page():
    text = (DOCS / "checkpoint-format.md").read_text("utf-8")
    example = re.search(r"```json\n(.*?)```", text, re.S)[1]
    assert violations(json.loads(example)) == []
    assert Manifest.from_json(example, "the page").world_size == 2


def test_the_checksum_of_the_page(tmp_path):
    text = (DOCS / "checkpoint-format.md").read_text("utf-8")
    example = re.search(r"```python\n(.*?)```", text, re.S)[1]
    space = {}
    exec(example, space)
    for size in (0, 5, 16, 40):
        (tmp_path / "file").write_bytes(bytes(range(size)))
        assert space["checksum"](tmp_path / "file") == durable.of_file(tmp_path / "file")[1]


def set_at(told, path, value):
    *parents, last = path
    for key in parents:
        told = told[key]
    told[last] = value


DAMAGE = [
    (["format"], 2),
    (["format"], True),
    (["world_size"], 0),
    (["world_size"], "2"),
    (["step"], -1),
    (["iteration"], None),
    (["mesh"], [2]),
    (["mesh"], {"dp": "2"}),
    (["versions"], {"torch": 2}),
    (["checksum"], {"algorithm": "md5", "chunk": 16777216}),
    (["checksum"], None),
    (["files"], {}),
    (["files"], []),
    *(
        (["files", name], {"size": 1, "checksum": "0" * 32})
        for name in ("/a", "a/../b", "..", "a//b", "a\\b", "C:a", "a/")
    ),
    (["files", NAME], {"size": 1, "checksum": "0" * 32}),
    (["files", "optimizer.bin", "size"], -1),
    (["files", "optimizer.bin", "size"], 1.5),
    (["files", "optimizer.bin", "checksum"], "z" * 32),
    (["files", "optimizer.bin", "rank"], None),
    (["files", "model.safetensors", "tensors"], []),
    (["files", "model.safetensors", "tensors", "steps", "shape"], [-1]),
    (["files", "model.safetensors", "tensors", "steps", "dtype"], None),
    (["files", "model.safetensors", "aliases"], {"a": 1}),
]


@pytest.mark.parametrize(("path", "value"), DAMAGE, ids=lambda part: json.dumps(part)[:40])
def test_schema_and_reader_refuse_the_same(told, path, value):
    damaged = copy.deepcopy(told)
    set_at(damaged, path, value)
    assert violations(damaged)
    with pytest.raises(DamagedCheckpoint):
        Manifest.from_json(json.dumps(damaged), "x")


@pytest.mark.parametrize("name", ["a", "a/b.c", ".hidden/..x/y..", "ü/…", "a b"])
def test_schema_and_reader_accept_the_same_names(told, name):
    told["files"][name] = {"size": 1, "checksum": "0" * 32}
    assert violations(told) == []
    assert name in Manifest.from_json(json.dumps(told), "x").files


def test_with_the_usual_validator(told):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    validator.validate(told)
    for path, value in DAMAGE:
        damaged = copy.deepcopy(told)
        set_at(damaged, path, value)
        # JSON Schema takes 1.0 for a whole number, and true for another thing than 1.
        assert not validator.is_valid(damaged), (path, value)
