"""What is written here reads elsewhere, has the checksum that is told, and is never there in part."""

import os

import torch
from safetensors.torch import load_file

from accelerate.checkpoint import formats
from accelerate.checkpoint.manifest import TensorEntry
from accelerate.runtime import durable

TENSORS = {
    "matrix": torch.randn(3, 5),
    "transposed": torch.randn(2, 3).t(),
    "every other": torch.randn(8)[::2],
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "nothing": torch.zeros(0, 3),
    "flag": torch.tensor([True, False]),
    "half": torch.randn(3).half(),
    "brain": torch.randn(3).bfloat16(),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "complex": torch.randn(2, dtype=torch.complex64).conj(),
    "eight bits": torch.randn(4).to(torch.float8_e4m3fn),
    "größe": torch.ones(1, requires_grad=True),
}


def test_safetensors(tmp_path):
    entry = formats.write_safetensors(tmp_path / "f", TENSORS, {"format": "pt"}, rank=3, aliases={"x": "matrix"})
    found = load_file(tmp_path / "f")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert formats.bytes_of(found[name]) == formats.bytes_of(tensor), name
    assert (entry.size, entry.checksum) == durable.of_file(tmp_path / "f")
    assert entry.rank == 3 and entry.aliases == {"x": "matrix"}
    assert entry.tensors["brain"] == TensorEntry((3,), "BF16")
    formats.write_safetensors(tmp_path / "f", {})
    assert load_file(tmp_path / "f") == {}


def test_an_older_file_is_replaced_by_a_disk_that_takes_a_little_at_a_time(tmp_path, monkeypatch):
    formats.write_bytes(tmp_path / "f", b"older and longer")
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:3]))
    entry = formats.write_bytes(tmp_path / "f", b"0123456789")
    assert (tmp_path / "f").read_bytes() == b"0123456789" and entry.size == 10
    assert formats.describe(tmp_path / "f").checksum == entry.checksum
