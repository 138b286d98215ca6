"""Checkpoints in object stores, on fsspec's `memory://` and on an S3 server that runs here: saved, replaced, killed."""

import gc
import json
import os

import pytest

from accelerate.checkpoint import bucket, formats, names, rotation
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint, Manifest, problems
from accelerate.checkpoint.object_store import ObjectStore
from accelerate.checkpoint.storage import storage_of
from unit.checkpoint.remote_storages import CONTENT, FORMER, Killed, fails, objects, put, read, save, write

pytest.importorskip("fsspec")
pytestmark = pytest.mark.usefixtures("no_pauses")

# -- the life of a checkpoint ------------------------------------------------------------------------------------------


def test_life(base):
    place = storage_of(f"{base}/checkpoint_3")
    assert place.state().kind == "absent"
    assert not place.shared
    save(place, step=1)
    state = place.state()
    assert (state.kind, state.manifest.step) == ("complete", 1)
    assert objects(place) == sorted([NAME, *CONTENT])
    assert place.size() > sum(map(len, CONTENT.values()))
    assert set(place.files()) == {NAME, "model.safetensors", "optimizer.bin", "empty.bin"}
    assert place.files()["model.safetensors"].size == 700
    assert place.files()["model.safetensors"].modified is not None
    (inner,) = place.entries()
    assert inner.name == "pytorch_model_fsdp_0"
    assert set(inner.files()) == {"__0_0.distcp"}

    folder = place.fetch()
    assert {name: data for name, data in read(folder).items() if name != NAME} == CONTENT
    assert Manifest.read(folder) == state.manifest
    assert problems(folder, state.manifest, deep=True) == []

    put(f"{base}/checkpoint_3/notes.txt")
    save(place, {"model.safetensors": b"later"}, step=2)
    assert place.state().manifest.step == 2
    assert objects(place) == [NAME, "model.safetensors", "notes.txt"]
    assert read(place.fetch())["model.safetensors"] == b"later"

    assert [(number, found.location) for number, found in storage_of(base).checkpoints()] == [(3, place.location)]
    place.remove()
    assert place.state().kind == "absent"
    assert storage_of(base).entries() == []
    place.remove()


def test_what_is_stored(base):
    place = storage_of(f"{base}/checkpoint")
    save(place)
    (generation,) = {name.split("/")[0] for name in place._store.below() if name != NAME}
    told = json.loads(place._store.read(NAME))
    assert told.pop("generation") == generation
    assert set(told) == set(json.loads(place.state().manifest.to_json()))


def test_rotation(base):
    folder = storage_of(f"{base}/checkpoints")
    for number in (8, 9, 10):
        save(folder.child(names.numbered_folder(number)), {"model.safetensors": b"x"}, iteration=number)
    put(f"{base}/checkpoints/checkpoint_11/{FORMER}/model.safetensors")
    found, passed = rotation.newest_first(folder)
    assert [place.name for place in found] == ["checkpoint_10", "checkpoint_9", "checkpoint_8"]
    assert len(passed) == 1 and "checkpoint_11" in passed[0]
    assert list(folder.leftovers()) == [f"{base}/checkpoints/checkpoint_11/{FORMER}"]
    removed = rotation.prune(folder, 2, keep=[folder.child("checkpoint_10").location, None])
    assert [url.removeprefix(folder.location) for url in removed] == [f"/checkpoint_11/{FORMER}", "/checkpoint_8"]
    assert [number for number, _ in folder.checkpoints()] == [9, 10]
    assert folder.leftovers() == {}


def test_names_that_look_like_patterns(base):
    place = storage_of(f"{base}/run[1]*")
    other = storage_of(f"{base}/run1")
    save(other)
    save(place, {"model[0].bin": b"1", "model?.bin": b"2"})
    save(place, {"model[0].bin": b"3"})
    assert objects(place) == [NAME, "model[0].bin"]
    assert read(place.fetch())["model[0].bin"] == b"3"
    place.remove()
    assert objects(place) == []
    assert other.state().kind == "complete"


# -- saves that do not end ---------------------------------------------------------------------------------------------


def test_a_killed_upload_changes_nothing_and_is_removed_by_the_next_save(memory, monkeypatch):
    place = ObjectStore("memory://run/checkpoint_0")
    save(place, step=1)
    with monkeypatch.context() as patch:
        fails(patch, memory, "put_file", Killed(), on="model.safetensors")
        with pytest.raises(Killed):
            save(ObjectStore("memory://run/checkpoint_0"), step=2)
    assert place.state().manifest.step == 1
    assert read(place.fetch())["optimizer.bin"] == CONTENT["optimizer.bin"]
    (left,) = place.leftovers().values()
    assert left.size > 0
    assert storage_of("memory://run").leftovers() == place.leftovers()
    save(ObjectStore("memory://run/checkpoint_0"), step=3)
    assert place.state().manifest.step == 3
    assert objects(place) == sorted([NAME, *CONTENT])


def test_a_first_save_that_is_killed_is_incomplete_until_it_is_swept(memory, monkeypatch):
    place = ObjectStore("memory://run/checkpoint_0")
    fails(monkeypatch, memory, "pipe_file", Killed())
    with pytest.raises(Killed):
        save(place)
    state = storage_of("memory://run/checkpoint_0").state()
    assert (state.kind, state.reason) == ("incomplete", "its saving did not come to its end")
    with pytest.raises(DamagedCheckpoint, match="did not come to its end"):
        place.fetch()
    assert len(storage_of("memory://run").sweep()) == 1
    assert place.state().kind == "absent"
    assert storage_of("memory://run").entries() == []


def test_killed_after_the_manifest_was_written(memory, monkeypatch):
    place = ObjectStore("memory://run/checkpoint_0")
    save(place, step=1)
    with monkeypatch.context() as patch:
        fails(patch, memory, "rm", Killed())
        with pytest.raises(Killed):
            save(place, {"model.safetensors": b"2"}, step=2)
    assert place.state().manifest.step == 2
    storage_of("memory://run").sweep()
    assert objects(place) == [NAME, "model.safetensors"]


def test_what_cannot_be_removed_is_no_reason_to_fail(memory, monkeypatch, caplog):
    place = ObjectStore("memory://run/checkpoint_0")
    save(place, step=1)
    with monkeypatch.context() as patch:
        fails(patch, memory, "rm", PermissionError("no"))
        save(place, step=2)
    assert "could not be removed" in caplog.text
    assert place.state().manifest.step == 2
    assert place.generation is None


@pytest.mark.parametrize("method", ["put_file", "pipe_file"])
def test_a_store_that_refuses(memory, monkeypatch, method):
    place = ObjectStore("memory://run/checkpoint_0")
    save(place, step=1)
    with monkeypatch.context() as patch:
        calls = fails(patch, memory, method, PermissionError("no"), on="optimizer.bin" if method == "put_file" else "")
        with pytest.raises(
            PermissionError, match=r"memory://run/checkpoint_0/\S+ could not be \w+: no. Check the cred"
        ):
            save(place, step=2)
        assert len(calls) == 1
    staged = place.staging()
    place.abandon()
    assert not os.path.exists(staged)
    assert place.state().manifest.step == 1
    assert objects(place) == sorted([NAME, *CONTENT])
    place.abandon()


def test_an_error_after_the_manifest_was_written_does_not_undo_it(memory, monkeypatch):
    place = ObjectStore("memory://run/checkpoint_0")
    right = memory.pipe_file

    def wrong(self, path, value, **options):
        right(self, path, value, **options)
        raise PermissionError("after all")

    with monkeypatch.context() as patch:
        patch.setattr(memory, "pipe_file", wrong)
        with pytest.raises(PermissionError):
            save(place)
    place.abandon()
    assert place.state().kind == "complete"


@pytest.mark.parametrize(("method", "on"), [("put_file", "optimizer"), ("pipe_file", NAME), ("ls", ""), ("find", "")])
def test_transient_errors_of_a_save_are_met_with_patience(memory, monkeypatch, method, on, caplog):
    calls = fails(monkeypatch, memory, method, ConnectionResetError("reset"), on=on, times=2)
    place = ObjectStore("memory://run/checkpoint_0")
    save(place)
    assert len(calls) > 2
    assert "Trying again" in caplog.text
    assert place.state().kind == "complete"


def test_patience_ends(memory, monkeypatch):
    calls = fails(monkeypatch, memory, "put_file", ConnectionResetError("reset"), on="optimizer.bin")
    with pytest.raises(OSError, match=r"optimizer.bin could not be uploaded: ConnectionResetError: reset"):
        save(ObjectStore("memory://run/checkpoint_0"))
    assert len(calls) == bucket.TRIES
    monkeypatch.setattr(bucket, "PATIENCE_S", -1.0)
    calls = fails(monkeypatch, memory, "ls", TimeoutError("late"))
    with pytest.raises(OSError, match="could not be listed"):
        ObjectStore("memory://run/checkpoint_0").state()


def test_the_first_error_stops_what_has_not_begun():
    done = []

    def task(name):
        done.append(name)
        raise OSError(name)

    with pytest.raises(OSError, match="[0-9]+"):
        bucket.concurrently(task, {str(index): 0 if index != 1 else bucket.LARGE + 1 for index in range(100)})
    assert done[0] == "1"
    assert len(done) < 100


# -- several nodes -----------------------------------------------------------------------------------------------------


def test_two_nodes(base):
    nodes = [ObjectStore(f"{base}/checkpoint_0") for _ in range(2)]
    folders = [node.stage() for node in nodes]
    assert folders[0] != folders[1]
    entries = {}
    for rank, (node, folder) in enumerate(zip(nodes, folders, strict=True)):
        node.join(nodes[0].generation)
        entries[f"rank_{rank}.bin"] = formats.write_bytes(os.path.join(folder, f"rank_{rank}.bin"), b"%d" % rank, rank)
    for node, folder in zip(nodes, folders, strict=True):
        node.upload(folder)
    Manifest(entries, world_size=2).write(folders[0])
    nodes[0].publish()
    found = read(nodes[1].fetch())
    assert (found["rank_0.bin"], found["rank_1.bin"]) == (b"0", b"1")
    assert not os.path.exists(folders[0])
    nodes.clear()
    del node
    gc.collect()
    assert not os.path.exists(folders[1])


def test_a_node_whose_files_did_not_arrive(memory):
    nodes = [ObjectStore("memory://run/checkpoint_0") for _ in range(2)]
    for node in nodes:
        write(node.stage(), {"model.safetensors": b"1", "rank_1.bin": b"1"})
    os.unlink(os.path.join(nodes[0].staging(), "rank_1.bin"))
    nodes[1].upload()  # into its own generation
    with pytest.raises(DamagedCheckpoint, match="not published.*rank_1.bin is missing"):
        nodes[0].publish()
    assert nodes[0].state().kind == "incomplete"
    with pytest.raises(ValueError, match="no name of a save"):
        nodes[1].join("../elsewhere")


def test_steps_out_of_order(memory):
    place = ObjectStore("memory://run/checkpoint_0")
    for step in (place.staging, place.upload, place.publish, lambda: place.join(FORMER)):
        with pytest.raises(RuntimeError, match="Nothing is staged"):
            step()
    place.stage()
    with pytest.raises(FileNotFoundError, match=NAME):
        place.publish()
    first = place.staging()
    assert place.stage() != first
    assert not os.path.exists(first)
