"""Checkpoints in object stores: on fsspec's `memory://`, and on an S3 server that runs here."""

import gc
import json
import os
import signal
import subprocess
import sys
import uuid

import pytest

from accelerate.checkpoint import formats, names, rotation, store, temporary
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint, Manifest, problems
from accelerate.checkpoint.places import place_of

pytest.importorskip("fsspec")

from accelerate.checkpoint.remote import RemotePlace

CONTENT = {
    "model.safetensors": b"weights" * 100,
    "optimizer.bin": b"moments" * 200,
    "pytorch_model_fsdp_0/__0_0.distcp": b"shard",
    "empty.bin": b"",
}
FORMER = "g-20200101T000000Z-0123456789abcdef"


class Killed(BaseException):
    """Ends a save as the death of its process would."""


@pytest.fixture(scope="module")
def s3_server():
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    server.stop()


@pytest.fixture
def s3(s3_server, monkeypatch):
    """A client of an S3 server with a bucket `bucket`, which s3fs finds by the environment."""
    import boto3
    import s3fs

    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    s3fs.S3FileSystem.clear_instance_cache()
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    yield client
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def memory():
    """The class of the file system behind `memory://`, empty."""
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield MemoryFileSystem
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["memory", "s3"])
def base(request):
    """A URL for the checkpoints of one test."""
    if request.param == "s3":
        request.getfixturevalue("s3")
        return f"s3://bucket/{uuid.uuid4().hex}"
    request.getfixturevalue("memory")
    return "memory://run"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(store, "PAUSE_S", 0.0)


def write(folder, content=CONTENT, **facts):
    """Write files and their manifest into a folder."""
    entries = {}
    for name, data in content.items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        entries[name] = formats.write_bytes(path, data)
    Manifest(entries, **facts).write(folder)


def save(place, content=CONTENT, **facts):
    write(place.stage(), content, **facts)
    place.publish()


def put(url, data=b"something"):
    """Write an object without this package."""
    from fsspec.core import url_to_fs

    system, path = url_to_fs(url)
    system.pipe_file(path, data)


def objects(place):
    """The objects at a place, with the name of the generation left out."""
    return sorted("/".join(p for p in name.split("/") if not p.startswith("g-")) for name in place._store.below())


def read(folder):
    found = {}
    for where, _, files in os.walk(folder):
        for file in files:
            path = os.path.join(where, file)
            with open(path, "rb") as opened:
                found[os.path.relpath(path, folder)] = opened.read()
    return found


def fails(monkeypatch, system, method, error, on="", times=None):
    """Let a method of a file system raise for paths with a text in them, always or so many times; return the calls."""
    right, calls = getattr(system, method), []

    def wrong(self, *arguments, **options):
        if any(on in argument for argument in arguments if isinstance(argument, str)):
            calls.append(arguments)
            if times is None or len(calls) <= times:
                raise error
        return right(self, *arguments, **options)

    monkeypatch.setattr(system, method, wrong)
    return calls


# -- the life of a checkpoint ------------------------------------------------------------------------------------------


def test_life(base):
    place = place_of(f"{base}/checkpoint_3")
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

    assert [(number, found.location) for number, found in place_of(base).checkpoints()] == [(3, place.location)]
    place.remove()
    assert place.state().kind == "absent"
    assert place_of(base).entries() == []
    place.remove()


def test_what_is_stored(base):
    place = place_of(f"{base}/checkpoint")
    save(place)
    (generation,) = {name.split("/")[0] for name in place._store.below() if name != NAME}
    told = json.loads(place._store.read(NAME))
    assert told.pop("generation") == generation
    assert set(told) == set(json.loads(place.state().manifest.to_json()))


def test_rotation(base):
    folder = place_of(f"{base}/checkpoints")
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
    place = place_of(f"{base}/run[1]*")
    other = place_of(f"{base}/run1")
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
    place = RemotePlace("memory://run/checkpoint_0")
    save(place, step=1)
    with monkeypatch.context() as patch:
        fails(patch, memory, "put_file", Killed(), on="model.safetensors")
        with pytest.raises(Killed):
            save(RemotePlace("memory://run/checkpoint_0"), step=2)
    assert place.state().manifest.step == 1
    assert read(place.fetch())["optimizer.bin"] == CONTENT["optimizer.bin"]
    (left,) = place.leftovers().values()
    assert left.size > 0
    assert place_of("memory://run").leftovers() == place.leftovers()
    save(RemotePlace("memory://run/checkpoint_0"), step=3)
    assert place.state().manifest.step == 3
    assert objects(place) == sorted([NAME, *CONTENT])


def test_a_first_save_that_is_killed_is_incomplete_until_it_is_swept(memory, monkeypatch):
    place = RemotePlace("memory://run/checkpoint_0")
    fails(monkeypatch, memory, "pipe_file", Killed())
    with pytest.raises(Killed):
        save(place)
    state = place_of("memory://run/checkpoint_0").state()
    assert (state.kind, state.reason) == ("incomplete", "its saving did not come to its end")
    with pytest.raises(DamagedCheckpoint, match="did not come to its end"):
        place.fetch()
    assert len(place_of("memory://run").sweep()) == 1
    assert place.state().kind == "absent"
    assert place_of("memory://run").entries() == []


def test_killed_after_the_manifest_was_written(memory, monkeypatch):
    place = RemotePlace("memory://run/checkpoint_0")
    save(place, step=1)
    with monkeypatch.context() as patch:
        fails(patch, memory, "rm", Killed())
        with pytest.raises(Killed):
            save(place, {"model.safetensors": b"2"}, step=2)
    assert place.state().manifest.step == 2
    place_of("memory://run").sweep()
    assert objects(place) == [NAME, "model.safetensors"]


def test_what_cannot_be_removed_is_no_reason_to_fail(memory, monkeypatch, caplog):
    place = RemotePlace("memory://run/checkpoint_0")
    save(place, step=1)
    with monkeypatch.context() as patch:
        fails(patch, memory, "rm", PermissionError("no"))
        save(place, step=2)
    assert "could not be removed" in caplog.text
    assert place.state().manifest.step == 2
    assert place.generation is None


@pytest.mark.parametrize("method", ["put_file", "pipe_file"])
def test_a_store_that_refuses(memory, monkeypatch, method):
    place = RemotePlace("memory://run/checkpoint_0")
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
    place = RemotePlace("memory://run/checkpoint_0")
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
    place = RemotePlace("memory://run/checkpoint_0")
    save(place)
    assert len(calls) > 2
    assert "Trying again" in caplog.text
    assert place.state().kind == "complete"


def test_patience_ends(memory, monkeypatch):
    calls = fails(monkeypatch, memory, "put_file", ConnectionResetError("reset"), on="optimizer.bin")
    with pytest.raises(OSError, match=r"optimizer.bin could not be uploaded: ConnectionResetError: reset"):
        save(RemotePlace("memory://run/checkpoint_0"))
    assert len(calls) == store.TRIES
    monkeypatch.setattr(store, "PATIENCE_S", -1.0)
    calls = fails(monkeypatch, memory, "ls", TimeoutError("late"))
    with pytest.raises(OSError, match="could not be listed"):
        RemotePlace("memory://run/checkpoint_0").state()


def test_the_first_error_stops_what_has_not_begun():
    done = []

    def task(name):
        done.append(name)
        raise OSError(name)

    with pytest.raises(OSError, match="[0-9]+"):
        store.concurrently(task, {str(index): 0 if index != 1 else store.LARGE + 1 for index in range(100)})
    assert done[0] == "1"
    assert len(done) < 100


# -- several nodes -----------------------------------------------------------------------------------------------------


def test_two_nodes(base):
    nodes = [RemotePlace(f"{base}/checkpoint_0") for _ in range(2)]
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
    nodes = [RemotePlace("memory://run/checkpoint_0") for _ in range(2)]
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
    place = RemotePlace("memory://run/checkpoint_0")
    for step in (place.staging, place.upload, place.publish, lambda: place.join(FORMER)):
        with pytest.raises(RuntimeError, match="Nothing is staged"):
            step()
    place.stage()
    with pytest.raises(FileNotFoundError, match=NAME):
        place.publish()
    first = place.staging()
    assert place.stage() != first
    assert not os.path.exists(first)


# -- what nobody should load -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_object(base, damage):
    place = place_of(f"{base}/checkpoint_0")
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
    place = RemotePlace("memory://run/checkpoint_0")
    save(place)
    (name,) = [name for name in place._store.below() if name.endswith("model.safetensors")]
    put(f"{place.location}/{name}", b"W" + CONTENT["model.safetensors"][1:])
    assert place.state().kind == "complete"
    folder = place.fetch()
    assert "model.safetensors has changed" in problems(folder, Manifest.read(folder), deep=True)[0]


def altered(place, **changes):
    told = json.loads(place._store.read(NAME)) | changes
    place._store.write(NAME, json.dumps(told).encode())


@pytest.mark.parametrize(
    "generation", ["..", ".", "", "g-1/../..", "/etc", 7, None, ["g"], FORMER + "\n", FORMER.upper(), "g-" + "٠" * 8]
)
def test_a_hostile_generation(memory, generation):
    place = RemotePlace("memory://run/checkpoint_0")
    save(place)
    altered(place, generation=generation)
    assert "names the generation" in place.state().reason
    assert place.state().kind == "incomplete"
    with pytest.raises(DamagedCheckpoint, match="names the generation"):
        place.fetch()
    assert len(place.files()) == 1
    assert place.leftovers() == {}  # who knows what it was meant to be


def test_a_hostile_name_of_a_file(memory, tmp_path):
    place = RemotePlace("memory://run/checkpoint_0")
    save(place)
    files = json.loads(place._store.read(NAME))["files"]
    altered(place, files={"../../escaped": files["empty.bin"]})
    assert "leads out of the folder" in place.state().reason
    with pytest.raises(DamagedCheckpoint, match="leads out"):
        place.fetch()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"generation": "g"}'])
def test_a_manifest_that_is_none(memory, text):
    place = RemotePlace("memory://run/checkpoint_0")
    put(f"{place.location}/{NAME}", text)
    assert place.state().kind == "incomplete"
    with pytest.raises(DamagedCheckpoint):
        place.fetch()
    save(place)
    assert place.state().kind == "complete"


def test_an_oversized_manifest_is_not_read(memory, monkeypatch):
    monkeypatch.setattr("accelerate.checkpoint.remote._LARGEST_MANIFEST", 10)
    place = RemotePlace("memory://run/checkpoint_0")
    save(place)
    calls = fails(monkeypatch, memory, "cat_file", AssertionError("read"))
    assert "which no manifest has" in place.state().reason
    assert calls == []


def test_an_object_in_the_place(base):
    put(f"{base}/checkpoint_0")
    place = place_of(f"{base}/checkpoint_0")
    assert place.state().kind == "absent"
    assert (place.entries(), place.files()) == ([], {})
    with pytest.raises(NotADirectoryError, match="is an object"):
        place.stage()


# -- what others saved -------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_library(base):
    place = place_of(f"{base}/checkpoint_0")
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
    place = RemotePlace("memory://run/checkpoint_0")
    put(f"{place.location}/model.safetensors")
    put(f"{place.location}/{file}")
    assert place.state().kind == "incomplete"
    with pytest.raises(DamagedCheckpoint):
        place.fetch()
    save(place, {"optimizer.bin": b"1"})
    assert objects(place) == [NAME, "optimizer.bin"]


def test_a_local_checkpoint_that_was_copied(base, tmp_path):
    write(tmp_path, step=5)
    place = place_of(f"{base}/checkpoint_0")
    for name, data in read(tmp_path).items():
        put(f"{place.location}/{name}", data)
    assert (place.state().kind, place.state().manifest.step) == ("complete", 5)
    assert read(place.fetch()) == read(tmp_path)
    put(f"{place.location}/.incomplete", b"")
    assert place.state().kind == "incomplete"
    save(place, {"optimizer.bin": b"1"})
    assert objects(place) == [NAME, "optimizer.bin"]


def test_removing_what_has_no_generation_never_leaves_half_a_checkpoint(memory, monkeypatch):
    place = RemotePlace("memory://run/checkpoint_0")
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
    place = RemotePlace("memory://run/checkpoint_0")
    save(place)
    calls = fails(monkeypatch, memory, "get_file", None, times=0)
    folder = place.fetch(lambda name: name.endswith(".bin"))
    assert sorted(read(folder)) == [NAME, "empty.bin", "optimizer.bin"]
    assert RemotePlace(place.location).fetch() == folder
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
    place = RemotePlace("memory://run/checkpoint_0")
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

    place = RemotePlace("memory://run/checkpoint_0")
    save(place)
    calls = fails(monkeypatch, memory, "get_file", OSError(errno.ENOSPC, "No space left"), on="optimizer")
    with pytest.raises(OSError, match="optimizer.bin could not be downloaded.*No space left"):
        place.fetch()
    assert len(calls) == 1
    assert not any(name.endswith(".part") for name in read(place.fetch(lambda name: name == "empty.bin")))


def test_a_checkpoint_that_is_replaced_while_it_is_fetched(memory, monkeypatch):
    place = RemotePlace("memory://run/checkpoint_0")
    save(place, {"model.safetensors": b"1", "optimizer.bin": b"1"}, step=1)
    right, done = memory.get_file, []

    def replacing(self, source, target, **options):
        if not done:
            done.append(source)
            save(RemotePlace(place.location), {"model.safetensors": b"22", "optimizer.bin": b"22"}, step=2)
        return right(self, source, target, **options)

    monkeypatch.setattr(memory, "get_file", replacing)
    found = read(place.fetch())
    assert (found["model.safetensors"], found["optimizer.bin"]) == (b"22", b"22")
    assert json.loads(found[NAME])["step"] == 2


def test_a_checkpoint_that_is_replaced_while_it_is_looked_at(memory, monkeypatch):
    place = RemotePlace("memory://run/checkpoint_0")
    save(place, step=1)
    right, done = memory.find, []

    def replacing(self, path, **options):
        if not done:
            done.append(path)
            save(RemotePlace(place.location), step=2)
        return right(self, path, **options)

    monkeypatch.setattr(memory, "find", replacing)
    assert (place.state().kind, place.state().manifest.step) == ("complete", 2)


def test_nothing_to_fetch(memory):
    with pytest.raises(FileNotFoundError, match="There is no checkpoint at 'memory://nowhere'"):
        RemotePlace("memory://nowhere").fetch()


# -- locations ---------------------------------------------------------------------------------------------------------


def test_locations(memory):
    place = place_of("memory://run/checkpoints/")
    assert place == RemotePlace("memory://run/checkpoints")
    assert place.child("checkpoint_1").location == "memory://run/checkpoints/checkpoint_1"
    assert place.child("checkpoint_1").parent() == place
    root = place.parent().parent()
    assert root.location == "memory://"
    assert root.parent() == root == place_of("memory://")
    assert root.child("run").location == "memory://run"
    save(root.child("run"))
    assert [found.name for found in root.entries()] == ["run"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("simplecache::memory://run", "chained"),
        ("memory://run/../other", "'..'"),
        ("memory://run/./other", "'.'"),
        ("nonsense://run", "nonsense"),
    ],
)
def test_urls_that_hold_no_checkpoints(url, message):
    with pytest.raises(ValueError, match=message):
        place_of(url)


def test_without_fsspec(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ImportError, match=r"accelerate\[object-stores\]"):
        place_of("s3://bucket/run")


def test_without_the_package_of_the_store(monkeypatch):
    known = sys.modules["fsspec.registry"].known_implementations
    monkeypatch.setitem(known, "lost", {"class": "no_such_package.Lost", "err": "Install lost"})
    with pytest.raises(ImportError, match="'lost://run' needs another package: Install lost"):
        place_of("lost://run")


# -- S3 ----------------------------------------------------------------------------------------------------------------


def test_remembered_listings_are_not_believed(s3):
    import s3fs

    place = place_of("s3://bucket/stale/checkpoint_0")
    save(place)
    system = s3fs.S3FileSystem()
    folder = place_of("s3://bucket/stale")
    for path in ("bucket/stale", "bucket/stale/checkpoint_0"):
        system.ls(path)
    assert system.dircache
    (name,) = [name for name in place._store.below() if name.endswith("optimizer.bin")]
    system.find("bucket/stale")
    s3.delete_object(Bucket="bucket", Key=f"stale/checkpoint_0/{name}")
    assert "optimizer.bin is missing" in place.state().reason
    system.ls("bucket/stale")
    s3.put_object(Bucket="bucket", Key="stale/checkpoint_1/model.safetensors", Body=b"")
    assert [number for number, _ in folder.checkpoints()] == [0, 1]
    system.ls("bucket/stale/checkpoint_0")
    s3.delete_object(Bucket="bucket", Key=f"stale/checkpoint_0/{NAME}")
    assert place.state().kind == "incomplete"


def test_a_bucket_is_never_removed(s3):
    s3.create_bucket(Bucket="whole-bucket")
    place = place_of("s3://whole-bucket")
    save(place)
    assert place.state().kind == "complete"
    place.remove()
    assert place.state().kind == "absent"
    s3.head_bucket(Bucket="whole-bucket")


def test_a_bucket_that_is_missing(s3):
    place = place_of("s3://no-such-bucket/checkpoint_0")
    assert place.state().kind == "absent"
    with pytest.raises(FileNotFoundError, match="s3://no-such-bucket/checkpoint_0/.* bucket does not exist"):
        save(place)


def test_objects_that_stand_for_folders(s3):
    save(place_of("s3://bucket/console/checkpoint_0"))
    for key in ("console/", "console/checkpoint_0/", "console/checkpoint_0/empty/"):
        s3.put_object(Bucket="bucket", Key=key, Body=b"")
    place = place_of("s3://bucket/console").child("checkpoint_0")
    assert [number for number, _ in place.parent().checkpoints()] == [0]
    assert place.state().kind == "complete"
    place.fetch()
    s3.put_object(Bucket="bucket", Key="hollow/", Body=b"")
    assert place_of("s3://bucket/hollow").state().kind == "absent"


@pytest.mark.slow
def test_a_file_in_parts(s3):
    place = place_of("s3://bucket/large")
    content = {"model.safetensors": os.urandom(1 << 20) * 120}
    save(place, content)
    folder = place.fetch()
    assert problems(folder, place.state().manifest, deep=True) == []


# -- temporary folders -------------------------------------------------------------------------------------------------


def in_another_process(code, tmp_path):
    return subprocess.Popen(
        [sys.executable, "-c", f"import os, sys\nfrom accelerate.checkpoint import temporary\n{code}"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


def test_temporary_folders_of_killed_processes_go(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with in_another_process("print(temporary.make(), flush=True); sys.stdin.read()", tmp_path) as process:
        folder = process.stdout.readline().strip()
        mine = temporary.make()
        assert os.path.isdir(folder)
        process.send_signal(signal.SIGKILL)
        process.wait()
    again = temporary.make()
    assert not os.path.exists(folder)
    assert os.path.isdir(mine)
    temporary.discard(mine)
    temporary.discard(again)
    temporary.discard(again)
    assert os.listdir(tmp_path) == []


def test_a_fork_leaves_temporary_folders_alone(tmp_path):
    code = (
        "folder = temporary.make()\n"
        "if os.fork() == 0: sys.exit()\n"
        "os.wait()\n"
        "assert os.path.isdir(folder)\n"
        "print('there')"
    )
    with in_another_process(code, tmp_path) as process:
        assert process.communicate()[0] == "there\n"
    assert os.listdir(tmp_path) == []
