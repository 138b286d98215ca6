"""What is written here reads elsewhere, has the checksum that is told, and is never there in part."""

import errno
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from accelerate.checkpoint import formats
from accelerate.checkpoint.manifest import TensorEntry
from accelerate.runtime import durable
from accelerate.utils.other import load

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


@pytest.mark.parametrize("kind", "?bBhHiIlLqQefdFD")
def test_numbers_of_numpy_in_files_of_others_are_read(tmp_path, kind):
    value = np.dtype(kind).type(1)
    torch.save({"lr": value}, tmp_path / "f")
    found = load(tmp_path / "f")["lr"]
    assert found == value and found.dtype == value.dtype


def test_an_older_file_is_replaced_by_a_disk_that_takes_a_little_at_a_time(tmp_path, monkeypatch):
    formats.write_bytes(tmp_path / "f", b"older and longer")
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:3]))
    entry = formats.write_bytes(tmp_path / "f", b"0123456789")
    assert (tmp_path / "f").read_bytes() == b"0123456789" and entry.size == 10
    assert formats.describe(tmp_path / "f").checksum == entry.checksum


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("write", [formats.write_torch, formats.write_safetensors])
def test_what_the_disk_refuses_is_told_with_the_files_name_and_changes_nothing(tmp_path, monkeypatch, call, write):
    def refuse(descriptor, *data):
        raise OSError(errno.ENOSPC, "No space left")

    (tmp_path / "x.bin").write_bytes(b"older")
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError, match="x.bin") as caught:
        write(tmp_path / "x.bin", {"a": torch.rand(3000), "b": torch.rand(3000)})
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == ["x.bin"] and (tmp_path / "x.bin").read_bytes() == b"older"
