"""Checkpoints in object stores: what is refused, what others saved, what is fetched."""

import json
import os

import pytest

from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint, Manifest, problems
from accelerate.checkpoint.object_store import ObjectStore
from accelerate.checkpoint.storage import storage_of
from unit.checkpoint.remote_storages import CONTENT, FORMER, Killed, altered, fails, objects, put, read, save, write

pytest.importorskip("fsspec")
pytestmark = pytest.mark.usefixtures("no_pauses")

# -- what nobody should load -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_object(base, damage):
    place = storage_of(f"{base}/checkpoint_0")
    save(place)
    (name,) = [name for name in place._store.below() if name.endswith("optimizer.bin")]
    if damage == "missing":
        place._store.remove([name])
    else:
        put(f"{base}/checkpoint_0/{name}", CONTENT["optimizer.bin"][:-1])
    state = place.state()
    assert state.kind == "incomplete"
    expected = (
        "optimizer.bin is missing (1400 bytes" if damage == "missing" else "optimizer.bin has 1399 bytes, but 1400"
    )
    assert expected in state.reason
    with pytest.raises(DamagedCheckpoint) as caught:
        place.fetch()
    assert expected in str(caught.value)
    found = read(place.fetch(lambda file: file == "model.safetensors"))
    assert found["model.safetensors"] == CONTENT["model.safetensors"]
    assert "optimizer.bin" not in found


def test_a_flipped_bit(memory):
    place = ObjectStore("memory://run/checkpoint_0")
    save(place)
    (name,) = [name for name in place._store.below() if name.endswith("model.safetensors")]
    put(f"{place.location}/{name}", b"W" + CONTENT["model.safetensors"][1:])
    assert place.state().kind == "complete"
    folder = place.fetch()
    assert "model.safetensors has changed" in problems(folder, Manifest.read(folder), deep=True)[0]


@pytest.mark.parametrize(
    "generation", ["..", ".", "", "g-1/../..", "/etc", 7, None, ["g"], FORMER + "\n", FORMER.upper(), "g-" + "٠" * 8]
)
def test_a_hostile_generation(memory, generation):
    place = ObjectStore("memory://run/checkpoint_0")
    save(place)
    altered(place, generation=generation)
    assert "names the generation" in place.state().reason
    assert place.state().kind == "incomplete"
    with pytest.raises(DamagedCheckpoint, match="names the generation"):
        place.fetch()
    assert len(place.files()) == 1
    assert place.leftovers() == {}  # who knows what it was meant to be


def test_a_hostile_name_of_a_file(memory, tmp_path):
    place = ObjectStore("memory://run/checkpoint_0")
    save(place)
    files = json.loads(place._store.read(NAME))["files"]
    altered(place, files={"../../escaped": files["empty.bin"]})
    assert "leads out of the folder" in place.state().reason
    with pytest.raises(DamagedCheckpoint, match="leads out"):
        place.fetch()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"generation": "g"}'])
def test_a_manifest_that_is_none(memory, text):
    place = ObjectStore("memory://run/checkpoint_0")
    put(f"{place.location}/{NAME}", text)
    assert place.state().kind == "incomplete"
    with pytest.raises(DamagedCheckpoint):
        place.fetch()
    save(place)
    assert place.state().kind == "complete"


def test_an_oversized_manifest_is_not_read(memory, monkeypatch):
    monkeypatch.setattr("accelerate.checkpoint.object_store._LARGEST_MANIFEST", 10)
    place = ObjectStore("memory://run/checkpoint_0")
    save(place)
    calls = fails(monkeypatch, memory, "cat_file", AssertionError("read"))
    assert "which no manifest has" in place.state().reason
    assert calls == []


def test_an_object_in_the_place(base):
    put(f"{base}/checkpoint_0")
    place = storage_of(f"{base}/checkpoint_0")
    assert place.state().kind == "absent"
    assert (place.entries(), place.files()) == ([], {})
    with pytest.raises(NotADirectoryError, match="is an object"):
        place.stage()


# -- what others saved -------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_library(base):
    place = storage_of(f"{base}/checkpoint_0")
    put(f"{place.location}/model.safetensors", b"1")
    put(f"{place.location}/pytorch_model_fsdp_0/__0_0.distcp", b"2")
    put(f"{place.location}/notes.txt", b"3")
    put(f"{place.location}/{FORMER}/model.safetensors", b"of a killed save")
    assert place.state().kind == "foreign"
    everything = {"model.safetensors": b"1", "pytorch_model_fsdp_0/__0_0.distcp": b"2", "notes.txt": b"3"}
    assert read(place.fetch(lambda name: name == "notes.txt")) == {"notes.txt": b"3"}
    assert read(place.fetch()) == everything
    place.sweep()
    assert objects(place) == sorted(everything)
    put(f"{place.location}/model.safetensors", b"11")
    assert read(place.fetch())["model.safetensors"] == b"11"
    save(place, {"optimizer.bin": b"4"})
    assert place.state().kind == "complete"
    assert objects(place) == [NAME, "notes.txt", "optimizer.bin"]


@pytest.mark.parametrize("file", [".incomplete", ".incomplete_3", "generators_0.safetensors"])
def test_files_that_tell_an_unfinished_checkpoint(memory, file):
    place = ObjectStore("memory://run/checkpoint_0")
    put(f"{place.location}/model.safetensors")
    put(f"{place.location}/{file}")
    assert place.state().kind == "incomplete"
    with pytest.raises(DamagedCheckpoint):
        place.fetch()
    save(place, {"optimizer.bin": b"1"})
    assert objects(place) == [NAME, "optimizer.bin"]


def test_a_local_checkpoint_that_was_copied(base, tmp_path):
    write(tmp_path, step=5)
    place = storage_of(f"{base}/checkpoint_0")
    for name, data in read(tmp_path).items():
        put(f"{place.location}/{name}", data)
    assert (place.state().kind, place.state().manifest.step) == ("complete", 5)
    assert read(place.fetch()) == read(tmp_path)
    put(f"{place.location}/.incomplete", b"")
    assert place.state().kind == "incomplete"
    save(place, {"optimizer.bin": b"1"})
    assert objects(place) == [NAME, "optimizer.bin"]


def test_removing_what_has_no_generation_never_leaves_half_a_checkpoint(memory, monkeypatch):
    place = ObjectStore("memory://run/checkpoint_0")
    put(f"{place.location}/model.safetensors")
    put(f"{place.location}/optimizer.bin")
    with monkeypatch.context() as patch:
        fails(patch, memory, "rm_file", Killed(), on="optimizer")
        with pytest.raises(Killed):
            place.remove()
    assert place.state().kind == "incomplete"
    place.remove()
    assert place.state().kind == "absent"


# -- fetching ----------------------------------------------------------------------------------------------------------


def test_what_was_fetched_is_not_fetched_again(memory, monkeypatch):
    place = ObjectStore("memory://run/checkpoint_0")
    save(place)
    calls = fails(monkeypatch, memory, "get_file", None, times=0)
    folder = place.fetch(lambda name: name.endswith(".bin"))
    assert sorted(read(folder)) == [NAME, "empty.bin", "optimizer.bin"]
    assert ObjectStore(place.location).fetch() == folder
    assert len(calls) == len(CONTENT)
    save(place, {"model.safetensors": b"2"})
    later = place.fetch()
    assert later != folder
    assert sorted(read(later)) == [NAME, "model.safetensors"]
    assert len(read(folder)) == len(CONTENT) + 1  # somebody may be reading it
    place.release()
    assert not os.path.exists(folder) and not os.path.exists(later)
    assert sorted(read(place.fetch())) == [NAME, "model.safetensors"]


def test_transient_errors_of_a_download(memory, monkeypatch):
    place = ObjectStore("memory://run/checkpoint_0")
    save(place)
    right, calls = memory.get_file, []

    def cut(self, source, target, **options):
        right(self, source, target, **options)
        calls.append(source)
        if calls.count(source) == 1:
            os.truncate(target, os.path.getsize(target) // 2)
        if calls.count(source) == 2:
            raise TimeoutError("late")

    monkeypatch.setattr(memory, "get_file", cut)
    found = read(place.fetch())
    assert {name: data for name, data in found.items() if name != NAME} == CONTENT


def test_a_full_disk_is_not_met_with_patience(memory, monkeypatch):
    import errno

    place = ObjectStore("memory://run/checkpoint_0")
    save(place)
    calls = fails(monkeypatch, memory, "get_file", OSError(errno.ENOSPC, "No space left"), on="optimizer")
    with pytest.raises(OSError, match="optimizer.bin could not be downloaded.*No space left"):
        place.fetch()
    assert len(calls) == 1
    assert not any(name.endswith(".part") for name in read(place.fetch(lambda name: name == "empty.bin")))


def test_a_checkpoint_that_is_replaced_while_it_is_fetched(memory, monkeypatch):
    place = ObjectStore("memory://run/checkpoint_0")
    save(place, {"model.safetensors": b"1", "optimizer.bin": b"1"}, step=1)
    right, done = memory.get_file, []

    def replacing(self, source, target, **options):
        if not done:
            done.append(source)
            save(ObjectStore(place.location), {"model.safetensors": b"22", "optimizer.bin": b"22"}, step=2)
        return right(self, source, target, **options)

    monkeypatch.setattr(memory, "get_file", replacing)
    found = read(place.fetch())
    assert (found["model.safetensors"], found["optimizer.bin"]) == (b"22", b"22")
    assert json.loads(found[NAME])["step"] == 2


def test_a_checkpoint_that_is_replaced_while_it_is_looked_at(memory, monkeypatch):
    place = ObjectStore("memory://run/checkpoint_0")
    save(place, step=1)
    right, done = memory.find, []

    def replacing(self, path, **options):
        if not done:
            done.append(path)
            save(ObjectStore(place.location), step=2)
        return right(self, path, **options)

    monkeypatch.setattr(memory, "find", replacing)
    assert (place.state().kind, place.state().manifest.step) == ("complete", 2)


def test_nothing_to_fetch(memory):
    with pytest.raises(FileNotFoundError, match="There is no checkpoint at 'memory://nowhere'"):
        ObjectStore("memory://nowhere").fetch()
