"""What files tell of themselves."""

import json

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

import checkpoint_samples as samples
from accelerate.checkpoint import structure
from accelerate.checkpoint.manifest import DamagedCheckpoint, TensorEntry


def test_header_agrees_with_the_library(tmp_path):
    from safetensors import safe_open

    folder = samples.write(tmp_path / "c")
    header = structure.header_of(str(folder / "model.safetensors"))
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
        header({"a": {"dtype": "F32", "shape": [1000, 1000], "data_offsets": [0, 8]}}, b"12345678"),
        header({"a": {"dtype": "F64", "shape": [2], "data_offsets": [0, 8]}}, b"12345678"),
        header({"a": {"dtype": "F4", "shape": [8], "data_offsets": [0, 8]}}, b"12345678"),
        header({"a": {"dtype": "U8", "shape": [0, 1 << 70], "data_offsets": [0, 0]}}),
    ],
    ids=range(16),
)
def test_damaged_headers(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpoint):
        structure.header_of(str(path))


def test_headers_of_small_and_unknown_elements(tmp_path):
    path = tmp_path / "x.safetensors"
    for dtype, size in (("F4", 4), ("F6_E2M3", 6), ("of_later", 5)):
        path.write_bytes(header({"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, size]}}, bytes(size)))
        assert structure.header_of(str(path))["a"].entry.shape == (8,)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../b"}}', '{"weight_map": {"a": 1}}']
)
def test_damaged_indexes(text):
    with pytest.raises(DamagedCheckpoint, match="no index"):
        structure.weight_map(text, "x")


@pytest.fixture
def shards(tmp_path):
    state = {"model": {"a": torch.arange(200.0), "b": torch.ones(3, 5), "extra": "text"}}
    save(state, storage_writer=FileSystemWriter(tmp_path / "shards"), no_dist=True)
    return tmp_path / "shards"


def test_every_flip_in_a_tensor_is_seen(shards):
    assert structure.problems_of_shards(str(shards)) == {}
    (path,) = shards.glob("*.distcp")
    data = path.read_bytes()
    starts = [data.index(torch.arange(200.0).numpy().tobytes()), data.index(torch.ones(15).numpy().tobytes())]
    for position in [start + step for start in starts for step in range(0, 60, 7)]:
        path.write_bytes(data)
        samples.flip(path, position)
        assert "has changed" in structure.problems_of_shards(str(shards))[path.name]
    path.write_bytes(b"X" + data[1:])
    assert path.name in structure.problems_of_shards(str(shards))
    path.write_bytes(data[:-1])
    assert structure.problems_of_shards(str(shards))[".metadata"].startswith("is damaged: ")


def test_tensors_of_shards(shards):
    found = structure.tensors_of_shards(str(shards))
    assert found == {"a": TensorEntry((200,), "F32"), "b": TensorEntry((3, 5), "F32")}
