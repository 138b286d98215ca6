"""A save that is killed, at whatever step, leaves the old state or the new one; and the next save goes on from there."""

import contextlib
import json
import os
import shutil
from functools import partial

import pytest
import torch
from torch import nn

from accelerate.checkpoint import disk, fsdp_io, fsdp_replace
from accelerate.checkpoint.manifest import Manifest, problems

STEPS = [(os, "replace"), (os, "rename"), (os, "unlink"), (os, "fsync"), (shutil, "rmtree"), (disk, "exchange")]


def model_of(value):
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, value)
    return model


def value_in(folder):
    model = model_of(-1)
    fsdp_io.load_model(model, folder)
    (value,) = set(model.weight.flatten().tolist())
    return value


def killed(work, before):
    """Do something in a process of its own that dies before the step of that number; say whether it came so far."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = [before]

    def counting(step):
        def run(*args, **options):
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)
            return step(*args, **options)

        return run

    with contextlib.suppress(BaseException):
        for module, name in STEPS:
            setattr(module, name, counting(getattr(module, name)))
        work()
        os._exit(0)
    os._exit(1)


@pytest.mark.parametrize("exchanging", [True, False])
@pytest.mark.parametrize("layout", ["sharded", "full", "local"])
def test_kills(tmp_path, layout, exchanging, monkeypatch):
    if not exchanging:
        monkeypatch.setattr(disk, "exchange", lambda *_: False)
    fsdp_io.save_model(model_of(0), tmp_path, layout=layout)
    clean = sorted(os.listdir(tmp_path))
    former, steps = 0.0, 0

    def save(value):
        fsdp_io.save_model(model_of(value), tmp_path, layout=layout)

    while killed(partial(save, former + 1), steps):
        found = value_in(tmp_path)
        assert found in (former, former + 1), steps
        # A second one that dies as early as it can makes nothing worse.
        assert killed(partial(save, former + 2), 0)
        assert value_in(tmp_path) == found
        former, steps = found, steps + 1
    assert steps > 3
    save(99)
    assert value_in(tmp_path) == 99
    assert sorted(os.listdir(tmp_path)) == clean


def test_a_folder_that_was_put_aside_is_found_and_put_back(tmp_path):
    fsdp_io.save_model(model_of(3), tmp_path)
    os.rename(tmp_path / "pytorch_model_fsdp_0", tmp_path / ".replaced_pytorch_model_fsdp_0")
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    (tmp_path / "pytorch_model_fsdp_0" / "__0_0.distcp").touch()
    assert value_in(tmp_path) == 3
    fsdp_io.save_model(model_of(4), tmp_path)
    assert value_in(tmp_path) == 4
    assert os.listdir(tmp_path) == ["pytorch_model_fsdp_0"]


def test_files_of_ranks_go_on(tmp_path):
    for rank in range(4):
        (tmp_path / f"stem_rank{rank}.bin").write_text("old")
    (tmp_path / "stem_rank0.bin").write_text("new")  # it had its place already
    (tmp_path / ".saving_stem_rank1.bin").write_text("new")
    (tmp_path / ".ranks_stem").write_text("2")
    fsdp_replace.finish(tmp_path, "stem")
    assert {file: (tmp_path / file).read_text() for file in os.listdir(tmp_path)} == {
        "stem_rank0.bin": "new",
        "stem_rank1.bin": "new",
    }
    (tmp_path / ".saving_stem_rank1.bin").write_text("half")
    (tmp_path / ".ranks_stem").write_text("")  # no file has moved
    fsdp_replace.finish(tmp_path, "stem")
    assert (tmp_path / "stem_rank1.bin").read_text() == "new"
    assert not (tmp_path / ".ranks_stem").exists()


def test_files_of_more_ranks_are_gone(tmp_path):
    fsdp_io.save_model(model_of(3), tmp_path, layout="local")
    for rank in (1, 2):
        shutil.copy(tmp_path / "pytorch_model_fsdp_0_rank0.bin", tmp_path / f"pytorch_model_fsdp_0_rank{rank}.bin")
    fsdp_io.save_model(model_of(4), tmp_path, layout="local")
    assert os.listdir(tmp_path) == ["pytorch_model_fsdp_0_rank0.bin"]
    assert value_in(tmp_path) == 4


@pytest.mark.parametrize("layout", ["sharded", "full", "local"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_manifest_stays_true(tmp_path, layout, alone):
    entries = fsdp_io.save_model(model_of(3), tmp_path, layout=layout)
    if not alone:
        optimizer = torch.optim.SGD(model_of(0).parameters())
        model = nn.Module()
        model.weight, model.bias = optimizer.param_groups[0]["params"]
        entries |= fsdp_io.save_optimizer(optimizer, model, tmp_path, layout=layout)
    Manifest(entries, step=7).write(tmp_path)
    fsdp_io.save_model(model_of(4), tmp_path, layout=layout)
    manifest = Manifest.read(tmp_path)
    assert manifest.files.keys() == entries.keys() and manifest.step == 7
    assert not problems(tmp_path, manifest, deep=True)
    assert value_in(tmp_path) == 4
    # What it does not list stays the user's own.
    fsdp_io.save_model(model_of(5), tmp_path, 1, layout)
    assert Manifest.read(tmp_path).files.keys() == entries.keys()


def test_the_manifest_of_shards_tells_the_tensors(tmp_path):
    entries = fsdp_io.save_model(model_of(3), tmp_path)
    told = json.loads(Manifest(entries).to_json())["files"]["pytorch_model_fsdp_0/.metadata"]["tensors"]
    assert told == {"weight": {"shape": [2, 2], "dtype": "F32"}, "bias": {"shape": [2], "dtype": "F32"}}
