"""Resharding without a process group: what comes out loads, says what went in, and the rest of the checkpoint is there."""

import dataclasses
import os

import pytest
import torch
from safetensors.torch import load_file

import checkpoint_samples as samples
import sharded_io
from accelerate import Accelerator
from accelerate.checkpoint import formats, optimizers
from accelerate.checkpoint import manifest as manifest_module
from accelerate.checkpoint.manifest import DamagedCheckpoint, Manifest, problems
from accelerate.checkpoint.model_io import names_file
from accelerate.checkpoint.save import unlisted
from accelerate.extensions.convert.convert import export, merge_fsdp_weights, reshard
from sharded_io import same
from unit.checkpoint.tied_net import job


@pytest.fixture
def trained():
    return job()


@pytest.fixture
def full(tmp_path, trained):
    """A checkpoint with whole files, as strategies write it that keep the model whole, and other things in it."""
    folder = tmp_path / "full"
    folder.mkdir()
    model, optimizer = trained
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    known = names_file([optimizer], [model])
    aliases = {"head.weight": "embedding.weight"}
    entries = {
        "model.safetensors": formats.write_safetensors(folder / "model.safetensors", state, aliases=aliases),
        "optimizer.bin": formats.write_torch(folder / "optimizer.bin", optimizer.state_dict()),
        "scheduler.bin": formats.write_torch(folder / "scheduler.bin", {"last_epoch": 3}),
        "random_states_1.pkl": formats.write_torch(folder / "random_states_1.pkl", {"step": 2}, rank=1),
        "parameter_names.json": formats.write_bytes(folder / "parameter_names.json", known),
    }
    Manifest(entries, world_size=2, strategy="ddp", step=5, iteration=7).write(folder)
    (folder / "notes.txt").write_text("of the user")
    return folder


def foreign(folder):
    """Take away what only `save_state` writes."""
    for name in ("accelerate_manifest.json", "parameter_names.json"):
        (folder / name).unlink()


def whole(folder):
    manifest = Manifest.read(folder)
    assert not problems(folder, manifest, deep=True)
    assert manifest_module.files_below(folder) == {*manifest.files, "accelerate_manifest.json"}
    return manifest


def loads(folder, model, optimizer, index=0):
    other, its_optimizer = job(seed=2)
    sharded_io.load_model(other, folder, index)
    sharded_io.load_optimizer(its_optimizer, other, folder, index)
    states = dict(model.state_dict()), dict(other.state_dict())
    return same(*states) and same(optimizer.state_dict(), its_optimizer.state_dict())


def test_to_shards_and_back_to_whole_files(tmp_path, full, trained):
    sharded = tmp_path / "sharded"
    reshard(str(full), str(sharded), "sharded", 3)
    assert loads(sharded, *trained)
    manifest, before = whole(sharded), Manifest.read(full)
    assert (manifest.world_size, manifest.strategy, manifest.step, manifest.iteration) == (2, "ddp", 5, 7)
    expected = {"pytorch_model_fsdp_0", "optimizer_0", "scheduler.bin", "random_states_1.pkl"}
    assert {name.split("/")[0] for name in manifest.files} == expected
    for name in ("scheduler.bin", "random_states_1.pkl"):
        assert manifest.files[name] == before.files[name]
    assert sum(name.startswith("pytorch_model_fsdp_0/__") for name in manifest.files) == 3
    model, optimizer = trained
    back = tmp_path / "back"
    reshard(str(sharded), str(back), "full")
    whole(back)
    assert same(load_file(back / "model.safetensors"), dict(model.state_dict()))
    # As torch numbers it: any optimizer of the same groups takes it.
    assert same(torch.load(back / "optimizer.bin"), optimizer.state_dict())
    assert loads(back, *trained)
    assert optimizers.read_names(back) == [["layer.bias", "scale"], ["layer.weight", "embedding.weight"]]


def test_ties_stay_ties_also_in_place(full, trained):
    reshard(str(full), str(full), "full")
    assert Manifest.read(full).files["model.safetensors"].aliases == {"head.weight": "embedding.weight"}
    assert "head.weight" not in load_file(full / "model.safetensors")
    assert loads(full, *trained)
    reshard(str(full), str(full), "sharded", 2)
    assert loads(full, *trained)
    assert not (full / "model.safetensors").exists() and (full / "notes.txt").read_text() == "of the user"


def test_several_models_and_an_optimizer_that_has_not_stepped(tmp_path):
    folder, made = tmp_path / "saved", tmp_path / "whole"
    jobs = [job(0, steps=0), job(1)]
    for index, (model, optimizer) in enumerate(jobs):
        sharded_io.save_model(model, folder, index, "full")
        sharded_io.save_optimizer(optimizer, model, folder, index, "full")
    reshard(str(folder), str(tmp_path / "shards"), "sharded", 2)
    reshard(str(tmp_path / "shards"), str(made), "full")
    assert {"model.safetensors", "model_1.safetensors", "optimizer.bin", "optimizer_1.bin"} <= set(whole(made).files)
    assert all(loads(made, model, optimizer, index) for index, (model, optimizer) in enumerate(jobs))


def test_names_that_torch_keeps_and_its_format_in_several_files(tmp_path):
    model, _ = job()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    model(torch.arange(7)).sum().backward()
    optimizer.step()
    folder, made = tmp_path / "saved", tmp_path / "shards"
    Accelerator(cpu=True).save_model(model, folder, max_shard_size=100, safe_serialization=False)
    assert len(list(folder.glob("pytorch_model-*.bin"))) > 1
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    reshard(str(folder), str(made), "sharded", shards=2)
    assert not list(made.glob("pytorch_model*.bin*")), "all of it is in the shards"
    other, _ = job(1)
    its_optimizer = torch.optim.SGD(other.parameters(), lr=0.2, momentum=0.9)
    sharded_io.load_model(other, made)
    sharded_io.load_optimizer(its_optimizer, other, made)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert "param_names" not in its_optimizer.param_groups[0]
    assert same(its_optimizer.state_dict()["state"], optimizer.state_dict()["state"])


def refused(source, target, kind, match, layout="sharded", **options):
    before = sorted(os.listdir(target.parent))
    with pytest.raises(kind, match=match):
        reshard(str(source), str(target), layout, **options)
    assert sorted(os.listdir(target.parent)) == before


def test_two_layouts_at_once_and_files_of_single_ranks(tmp_path, full, trained):
    """As in a folder that two programs have saved to; `export` refuses in the same words."""
    foreign(full)
    sharded_io.save_model(job(1)[0], full, layout="sharded")
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "pytorch_model_fsdp_0_rank0.bin").touch()
    twice = "model 0 more than once: pytorch_model_fsdp_0 and model.safetensors"
    for folder, match in ((full, twice), (tmp_path / "local", "what each rank had")):
        refused(folder, tmp_path / "new", ValueError, match)
        with pytest.raises(ValueError, match=match):
            export(folder, tmp_path / "exported")
    # One save may write both: its manifest lists them.
    Manifest(unlisted(str(full), (), 0)).write(full)
    export(full, tmp_path / "exported")
    assert same(load_file(tmp_path / "exported" / "model.safetensors"), load_file(full / "model.safetensors"))


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("name", ["scheduler.bin", "model.safetensors", "folder/notes.txt"])
def test_what_links_lead_to_outside_is_not_copied(tmp_path, full, name, listed):
    """A user who gets a checkpoint must not get what a link in it finds on the machine that converts it."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if name == "folder/notes.txt":
        (elsewhere / "notes.txt").write_text("secret")
        (full / "folder").symlink_to(elsewhere)
        if listed:  # a manifest may say anything
            listing = Manifest.read(full)
            files = {**listing.files, name: formats.describe(full / name)}
            dataclasses.replace(listing, files=files).write(full)
    else:
        (full / name).rename(elsewhere / name)
        (full / name).symlink_to(elsewhere / name)
    if not listed:
        foreign(full)
    if name == "folder/notes.txt" and not listed:  # what a linked folder has is no part of a checkpoint
        reshard(str(full), str(tmp_path / "new"), "full")
        assert not (tmp_path / "new" / "folder").exists()
    else:
        refused(full, tmp_path / "new", ValueError, f"{name}' is a link to .*elsewhere.*Put the file itself there")
    if name == "model.safetensors":
        with pytest.raises(ValueError, match="is a link to"):
            export(full, tmp_path / "exported")
        assert not (tmp_path / "exported").exists()


def test_links_within_a_checkpoint_are_files_of_it(tmp_path, full):
    (full / "latest").symlink_to("notes.txt")
    foreign(full)
    (full / "scheduler.bin").rename(full / "real.bin")
    (full / "scheduler.bin").symlink_to("real.bin")
    reshard(str(full), str(tmp_path / "new"), "full")
    copied = tmp_path / "new" / "scheduler.bin"
    assert torch.load(copied) == {"last_epoch": 3} and not copied.is_symlink()


def test_shards_that_lie_elsewhere_are_neither_converted_nor_merged(tmp_path, full):
    reshard(str(full), str(tmp_path / "sharded"), "sharded", 2)
    shard = next((tmp_path / "sharded" / "pytorch_model_fsdp_0").glob("*.distcp"))
    shard.rename(tmp_path / "secret")
    shard.symlink_to(tmp_path / "secret")
    for run in (
        lambda: reshard(str(tmp_path / "sharded"), str(tmp_path / "new"), "full"),
        lambda: export(tmp_path / "sharded", tmp_path / "new"),
        lambda: merge_fsdp_weights(str(shard.parent), str(tmp_path / "new")),
    ):
        with pytest.raises(ValueError, match="is a link to .*secret"):
            run()
    assert not (tmp_path / "new").exists()


def test_numbers_without_names(tmp_path, full):
    listing = Manifest.read(full)
    for text in (b"", b"[]", b'{"0": 3}', b'{"0": [[1]]}'):
        written = formats.write_bytes(full / "parameter_names.json", text)
        Manifest({**listing.files, "parameter_names.json": written}).write(full)
        refused(full, tmp_path / "new", DamagedCheckpoint, "does not hold names")
    foreign(full)
    refused(full, tmp_path / "new", ValueError, "numbers its parameters")
    reshard(str(full), str(tmp_path / "new"), "full")
    assert not (tmp_path / "new" / "parameter_names.json").exists()


def test_damage(tmp_path, full):
    samples.flip(full / "model.safetensors")
    refused(full, tmp_path / "new", DamagedCheckpoint, "model.safetensors has changed")
    (full / "model.safetensors").write_bytes(b"")
    refused(full, tmp_path / "new", DamagedCheckpoint, "not complete.*model.safetensors")


def test_arguments_and_nothing_there(tmp_path, full):
    refused(full, tmp_path / "new", ValueError, "shards is 0", shards=0)
    refused(full, tmp_path / "new", ValueError, "shards is 2", layout="full", shards=2)
    refused(tmp_path / "none", tmp_path / "new", FileNotFoundError, "no checkpoint at")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    refused(tmp_path / "other", tmp_path / "new", FileNotFoundError, "no model")


def test_a_write_that_fails_leaves_nothing(tmp_path, full, monkeypatch):
    monkeypatch.setattr(Manifest, "write", lambda *_: 1 / 0)
    refused(full, tmp_path / "new", ZeroDivisionError, "zero")
