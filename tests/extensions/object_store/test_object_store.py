"""Checkpoints in object stores, on fsspec's `memory://` and on an S3 server: saved, replaced, killed, damaged, fetched."""

import contextlib
import errno
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from accelerate import Accelerator
from accelerate.checkpoint import dcp
from accelerate.checkpoint.manifest import (
    NAME,
    DamagedCheckpoint,
    FileEntry,
    Manifest,
    files_below,
    part_file,
    problems,
    save_name,
    write_part,
)
from accelerate.checkpoint.storage import prune, storage_of
from accelerate.checkpoint.verify import CheckpointFolder
from accelerate.extensions.object_store import object_store
from accelerate.extensions.object_store.object_store import ObjectStore
from accelerate.runtime import durable

core = pytest.importorskip("fsspec.core")

CONTENT = {
    "model.safetensors": b"weights" * 100,
    "optimizer.bin": b"moments" * 200,
    "pytorch_model_fsdp_0/__0_0.distcp": b"shard",
    "empty.bin": b"",
}
FORMER = "g-20200101T000000Z-0123456789abcdef"
URL = "memory://run/checkpoint_0"


class Killed(BaseException):
    """Ends a save as the death of its process would."""


def write(folder, content=CONTENT, **facts):
    entries = {}
    for name, data in content.items():
        path = Path(folder, name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        entries[name] = FileEntry(*durable.of_file(path))
    Manifest(entries, **facts).write(folder)


def save(url, content=CONTENT, **facts):
    storage = storage_of(url)
    write(storage.stage(), content, **facts)
    storage.publish()
    storage.discard()
    return storage


def read(folder):
    files = [path for path in Path(folder).rglob("*") if path.is_file() and path.name != NAME]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def put(url, data=b"something"):
    system, path = core.url_to_fs(url)
    system.pipe_file(path, data)


def stored(storage):
    system, root = core.url_to_fs(storage.location)
    system.invalidate_cache()
    return {path[len(root) + 1 :]: system.cat_file(path) for path in system.find(root)}


def objects(storage):
    return sorted("/".join(part for part in path.split("/") if not part.startswith("g-")) for path in stored(storage))


def url_of(storage, file):
    (path,) = [path for path in stored(storage) if path.endswith(file)]
    return f"{storage.location}/{path}"


def meddle(patch, system, method, meanwhile, on=""):
    """Call a function before each call of a file system's method for paths with a text in them; return those calls."""
    right, calls = getattr(system, method), []

    def wrong(self, *arguments, **options):
        if any(on in argument for argument in arguments if isinstance(argument, str)):
            calls.append(arguments)
            meanwhile()
        return right(self, *arguments, **options)

    patch.setattr(system, method, wrong)
    return calls


@contextlib.contextmanager
def failing(monkeypatch, system, method, error, on=""):
    """Let a file system's method raise for paths with a text in them."""

    def fail():
        raise error

    with monkeypatch.context() as patch:
        meddle(patch, system, method, fail, on)
        yield


def test_life(base):
    storage = storage_of(f"{base}/checkpoint_3")
    assert (storage.state().kind, storage.shared) == ("absent", False)
    with pytest.raises(FileNotFoundError, match="There is no checkpoint at"):
        storage.fetch()
    save(storage.location, step=1)
    state = storage.state()
    assert (state.kind, state.manifest.step) == ("complete", 1)
    assert objects(storage) == sorted([NAME, *CONTENT])
    assert storage.stored().size > sum(map(len, CONTENT.values()))
    assert set(storage.files()) == {NAME, "model.safetensors", "optimizer.bin", "empty.bin"}
    assert storage.files()["model.safetensors"].size == 700
    assert (storage.files()["model.safetensors"].modified is not None) == base.startswith("s3")
    (inner,) = storage.entries()
    assert (inner.name, set(inner.files())) == ("pytorch_model_fsdp_0", {"__0_0.distcp"})
    folder = storage.fetch()
    assert (read(folder), Manifest.read(folder)) == (CONTENT, state.manifest)

    put(f"{base}/checkpoint_3/notes.txt")
    save(storage.location, {"model.safetensors": b"later"}, step=2)
    assert storage.state().manifest.step == 2
    assert objects(storage) == [NAME, "model.safetensors", "notes.txt"]
    assert read(storage.fetch()) == {"model.safetensors": b"later"}

    assert [(number, found.location) for number, found in storage_of(base).checkpoints()] == [(3, storage.location)]
    for _ in range(2):
        storage.remove()
        assert (storage.state().kind, storage_of(base).entries()) == ("absent", [])
    put(storage.location)
    assert (storage.state().kind, storage.entries(), storage.files()) == ("absent", [], {})


def test_names_that_look_like_patterns(base):
    other = save(f"{base}/run1")
    storage = save(f"{base}/run[1]*", {"model[0].bin": b"1", "model?.bin": b"2"})
    save(storage.location, {"model[0].bin": b"3"})
    assert objects(storage) == [NAME, "model[0].bin"]
    assert read(storage.fetch()) == {"model[0].bin": b"3"}
    storage.remove()
    assert (objects(storage), other.state().kind) == ([], "complete")


@pytest.mark.parametrize(
    ("method", "on", "counts"), [("put_file", "model.safetensors", 1), ("pipe_file", NAME, 1), ("rm_file", "model", 2)]
)
def test_a_killed_save_leaves_the_old_checkpoint_or_the_new_one(memory, monkeypatch, method, on, counts):
    storage, folder = save(URL, step=1), storage_of("memory://run")
    with failing(monkeypatch, memory, method, Killed(), on), pytest.raises(Killed):
        save(URL, step=2)
    assert (storage.state().kind, storage.state().manifest.step) == ("complete", counts)
    assert read(storage.fetch()) == CONTENT
    # Files are uploaded in any order, several at once, so those of a killed save are any of them: the empty one alone, or none.
    left = sum(stat.size for stat in storage.leftovers().values())
    of_the_checkpoint = sum(stat.size for stat in storage.files().values()) + len(b"shard")
    assert left == sum(map(len, stored(storage).values())) - of_the_checkpoint
    assert folder.leftovers() == storage.leftovers()
    save(URL, step=3) if counts == 1 else folder.sweep()
    assert folder.leftovers() == {} and objects(storage) == sorted([NAME, *CONTENT])


def test_a_first_save_that_is_killed_is_incomplete_until_it_is_swept(memory, monkeypatch):
    with failing(monkeypatch, memory, "pipe_file", Killed()), pytest.raises(Killed):
        save(URL)
    storage, folder = storage_of(URL), storage_of("memory://run")
    assert (storage.state().kind, storage.state().reason) == ("incomplete", "its saving did not come to its end")
    folder.sweep(older_than_s=0)
    assert (storage.state().kind, folder.entries()) == ("absent", [])


@pytest.mark.parametrize("replaces", [False, True])
def test_a_run_removes_nothing_that_another_one_is_saving_beside_it(memory, replaces):
    """Both save under one URL, and prune there: the one that publishes first took the files of the other for those of a killed run."""
    other, folder = save(URL, step=1) if replaces else storage_of(URL), storage_of("memory://run")
    staged = other.stage()
    write(staged, step=2)
    with other.create(staged, "streamed.bin") as file:
        file.write(b"bytes")
    put(f"{URL}/{FORMER}/model.safetensors")  # of a run that was killed years ago
    save("memory://run/checkpoint_1")
    prune(folder, 2, [])
    assert "streamed.bin" in objects(other) and not any(FORMER in path for path in stored(other))
    other.publish()
    other.discard()
    assert (other.state().kind, other.state().manifest.step) == ("complete", 2)


@pytest.mark.parametrize(
    ("method", "on", "error", "message"),
    [
        ("put_file", "optim", PermissionError("no"), f"{URL}/.*/optimizer.bin could not be uploaded: no. Check the cred"),
        ("put_file", "optim", ConnectionResetError("reset"), "optimizer.bin could not be uploaded: ConnectionResetError"),
        ("pipe_file", "", PermissionError("no"), f"{URL}/{NAME} could not be written: no. Check the credentials"),
        ("find", "", TimeoutError("late"), "could not be listed: TimeoutError: late"),
        ("get_file", "optim", OSError(errno.ENOSPC, "No space left"), "optimizer.bin could not be downloaded.*No space left"),
    ],
)  # fmt: skip
def test_a_store_that_refuses(memory, monkeypatch, method, on, error, message):
    storage = save(URL, step=1)
    staged = storage.stage()
    write(staged, step=2)
    with failing(monkeypatch, memory, method, error, on), pytest.raises(OSError, match=message):
        storage.fetch() if method == "get_file" else storage.publish()
    for _ in range(2):
        storage.discard()
    assert not os.path.exists(staged)
    assert (storage.state().manifest.step, objects(storage)) == (1, sorted([NAME, *CONTENT]))
    assert read(storage.fetch()) == CONTENT


def test_what_cannot_be_removed_is_no_reason_to_fail(memory, monkeypatch, caplog):
    save(URL, step=1)
    with failing(monkeypatch, memory, "rm_file", PermissionError("no")):
        assert save(URL, step=2).state().manifest.step == 2
    assert "could not be removed" in caplog.text


def test_a_node_whose_files_did_not_arrive(memory):
    nodes = [ObjectStore(URL) for _ in range(2)]
    folders = [node.stage() for node in nodes]
    for folder in folders:
        write(folder, {"model.safetensors": b"1", "rank_1.bin": b"1"})
    os.unlink(os.path.join(folders[0], "rank_1.bin"))
    nodes[1].sync(folders[1], ["model.safetensors", "rank_1.bin"])  # into its own generation
    with pytest.raises(DamagedCheckpoint, match=r"not published.*rank_1.bin is missing"):
        nodes[0].publish()
    assert nodes[0].state().kind == "incomplete"
    assert nodes[0].stage() != folders[0] and not os.path.exists(folders[0])
    with pytest.raises(FileNotFoundError, match=NAME):
        nodes[0].publish()


def test_a_damaged_object(memory):
    storage, expected = save(URL), "optimizer.bin has 1399 bytes, but 1400"
    put(url_of(storage, "optimizer.bin"), CONTENT["optimizer.bin"][:-1])
    assert storage.state().kind == "incomplete" and re.match(expected, storage.state().reason)
    with pytest.raises(DamagedCheckpoint, match=expected):
        storage.fetch()
    put(url_of(storage, "model.safetensors"), b"W" + CONTENT["model.safetensors"][1:])  # sizes alone are compared
    storage.release()
    folder = storage.fetch(lambda file: file == "model.safetensors")
    assert "model.safetensors has changed" in "".join(problems(folder, storage.state().manifest, deep=True))


HOSTILE = ["..", ".", "g-1/../..", "/etc", 7, None, ["g"], FORMER + "\n", FORMER.upper(), "g-" + "٠" * 8]


@pytest.mark.parametrize("generation", HOSTILE)
def test_a_hostile_generation(memory, generation):
    storage = save(URL)
    put(f"{URL}/{NAME}", json.dumps(json.loads(stored(storage)[NAME]) | {"generation": generation}).encode())
    put(f"{URL}/{FORMER}/model.safetensors")
    assert (storage.state().kind, list(storage.files())) == ("incomplete", [NAME])
    with pytest.raises(DamagedCheckpoint, match="names the generation"):
        storage.fetch()
    assert storage.leftovers() == {}  # it may be what was meant


def test_hostile_names_of_files(memory):
    storage = save(URL)
    listing = json.loads(stored(storage)[NAME])
    put(f"{URL}/{NAME}", json.dumps(listing | {"files": {"../../escaped": listing["files"]["empty.bin"]}}).encode())
    put("memory://run/foreign/..\\escaped")
    for hostile in (storage, storage_of("memory://run/foreign")):
        with pytest.raises(DamagedCheckpoint, match="leads out of the folder"):
            hostile.fetch()


def test_a_checkpoint_of_another_library(base):
    storage = storage_of(f"{base}/checkpoint_0")
    everything = {"model.safetensors": b"1", "pytorch_model_fsdp_0/__0_0.distcp": b"2", "notes.txt": b"3"}
    for name, data in {**everything, f"{FORMER}/model.safetensors": b"of a killed save"}.items():
        put(f"{storage.location}/{name}", data)
    assert storage.state().kind == "foreign"
    assert read(storage.fetch(lambda name: name == "notes.txt")) == {"notes.txt": b"3"}
    assert read(storage.fetch()) == everything
    storage.sweep()
    assert objects(storage) == sorted(everything)
    put(f"{storage.location}/model.safetensors", b"11")
    assert read(storage.fetch())["model.safetensors"] == b"11"
    assert save(storage.location, {"optimizer.bin": b"4"}).state().kind == "complete"
    assert objects(storage) == [NAME, "notes.txt", "optimizer.bin"]


def test_a_local_checkpoint_that_was_copied(base, tmp_path):
    write(tmp_path, {"model.safetensors": b"1", "pytorch_model_fsdp_0/__0_0.distcp": b"2"}, step=5)
    storage = storage_of(f"{base}/checkpoint_0")
    for name, data in {**read(tmp_path), NAME: (tmp_path / NAME).read_bytes()}.items():
        put(f"{storage.location}/{name}", data)
    assert (storage.state().kind, storage.state().manifest.step) == ("complete", 5)
    assert (read(storage.fetch()), storage.leftovers()) == (read(tmp_path), {})


@pytest.mark.parametrize("generation", [True, False])
def test_a_killed_removal_never_leaves_half_a_checkpoint(memory, monkeypatch, generation):
    if generation:
        save(URL)
    for name in ("model.safetensors", "optimizer.bin"):
        put(f"{URL}/{name}")
    storage = storage_of(URL)
    with failing(monkeypatch, memory, "rm_file", Killed(), f"{URL[8:]}/optimizer"), pytest.raises(Killed):
        storage.remove()
    assert storage.state().kind == "incomplete"
    storage.remove()
    assert storage.state().kind == "absent"


def test_what_was_fetched_is_not_fetched_again(memory, monkeypatch):
    storage = save(URL)
    calls = meddle(monkeypatch, memory, "get_file", lambda: None, on="/g-")
    folder = storage.fetch(lambda name: name.endswith(".bin"))
    assert set(read(folder)) == {"empty.bin", "optimizer.bin"}
    assert ObjectStore(URL).fetch() == folder
    assert len(calls) == len(CONTENT)
    save(URL, {"model.safetensors": b"2"})
    later = storage.fetch()
    assert read(later) == {"model.safetensors": b"2"}
    assert read(folder) == CONTENT  # another caller may be reading it
    storage.release()
    assert not os.path.exists(folder) and not os.path.exists(later)
    assert read(storage.fetch()) == {"model.safetensors": b"2"}


@pytest.mark.parametrize(("method", "on"), [("find", ""), ("get_file", "/g-")])
def test_a_checkpoint_that_is_replaced_while_it_is_read(memory, monkeypatch, method, on):
    storage, later = save(URL, step=1), {"model.safetensors": b"22", "optimizer.bin": b"22"}
    replacements = iter([lambda: save(URL, later, step=2)])
    meddle(monkeypatch, memory, method, lambda: next(replacements, lambda: None)(), on)
    if method == "find":
        assert (storage.state().kind, storage.state().manifest.step) == ("complete", 2)
    folder = storage.fetch()
    assert (read(folder), Manifest.read(folder).step) == (later, 2)


def test_urls(memory):
    storage = storage_of("memory://run/checkpoints/")
    assert storage == ObjectStore("memory://run/checkpoints")
    assert storage.child("checkpoint_1") == storage_of("memory://run/checkpoints/checkpoint_1")
    assert storage.child("checkpoint_1").parent() == storage
    root = storage.parent().parent()
    assert root.parent() == root == storage_of("memory://")
    save("memory://run")
    assert [found.location for found in root.entries()] == ["memory://run"]
    for url in ("simplecache::memory://run", "nonsense://run"):
        with pytest.raises(ValueError, match="memory://run|nonsense"):
            storage_of(url)


def test_packages_that_are_not_installed(monkeypatch):
    known = sys.modules["fsspec.registry"].known_implementations
    monkeypatch.setitem(known, "lost", {"class": "no_such_package.Lost", "err": "Install lost"})
    with pytest.raises(ImportError, match="'lost://run' needs another package: Install lost"):
        storage_of("lost://run")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ImportError, match=r"accelerate\[object-stores\]"):
        storage_of("s3://bucket/run")


def test_remembered_listings_are_not_believed(s3):
    import s3fs

    storage, system = save("s3://bucket/stale/checkpoint_0"), s3fs.S3FileSystem()
    for file, expected in (("optimizer.bin", "optimizer.bin is missing"), (NAME, "did not come to its end")):
        key = url_of(storage, file).removeprefix("s3://bucket/")
        system.ls("bucket/stale/checkpoint_0")
        system.find("bucket/stale")
        assert system.dircache
        s3.delete_object(Bucket="bucket", Key=key)
        assert expected in storage.state().reason


def test_a_bucket_is_never_made_and_never_removed(s3):
    s3.create_bucket(Bucket="whole-bucket")
    storage = save("s3://whole-bucket")
    storage.remove()
    assert storage.state().kind == "absent"
    s3.head_bucket(Bucket="whole-bucket")
    assert storage_of("s3://no-such-bucket/checkpoint_0").state().kind == "absent"
    with pytest.raises(FileNotFoundError, match="s3://no-such-bucket/checkpoint_0/.* bucket does not exist"):
        save("s3://no-such-bucket/checkpoint_0")


def created(url, content, rank=0, **facts):
    """Save a checkpoint as the ranks of two nodes do: each creates its files, one publishes."""
    nodes = [storage_of(url) for _ in range(2)]
    name = save_name()
    folders = [node.stage(name) for node in nodes]
    entries = {}
    for number, (name, data) in enumerate(content.items()):
        with nodes[number % 2].create(folders[number % 2], name) as file:
            file.write(data)
        entries[name] = FileEntry.of(file)
    Manifest(entries, **facts).write(folders[0])
    return nodes, folders


def test_ranks_create_their_files_in_the_store(base):
    nodes, folders = created(f"{base}/checkpoint_0", CONTENT, step=1)
    assert files_below(folders[1]) == set() and files_below(folders[0]) == {NAME}, "nothing is on a disk"
    Path(folders[1], "hook.json").write_text("of a hook, which writes by path")
    part = write_part(folders[1], 1, {})
    nodes[1].sync(folders[1], files_below(folders[1]))
    parts = nodes[0].parts(folders[0], range(3), 1)
    assert parts.keys() == {1} and len(parts[1]) == part.size
    listing = Manifest.read(folders[0])
    hook = FileEntry(31, listing.files["empty.bin"].checksum)
    Manifest({**listing.files, "hook.json": hook, part_file(1): part}, step=1).write(folders[0])
    nodes[0].publish()
    storage = storage_of(nodes[0].location)
    assert (storage.state().kind, storage.state().manifest.step) == ("complete", 1)
    assert read(storage.fetch()).keys() == {*CONTENT, "hook.json", part_file(1)}
    for node in nodes:
        node.discard()
    assert storage.state().kind == "complete" and not any(map(os.path.exists, folders))


class Broken(Exception):
    """Of the writer of a file."""


@pytest.mark.parametrize("error", [Broken("no"), ConnectionResetError("reset"), PermissionError("no")])
def test_a_file_that_cannot_be_created(memory, monkeypatch, error):
    storage = save(URL, step=1)
    folder = storage.stage()

    def fail():
        raise error

    if not isinstance(error, Broken):
        meddle(monkeypatch, memory, "open", fail, on="model.safetensors")
    expected = r"no" if isinstance(error, Broken) else f"{URL}/g-.*/model.safetensors could not be uploaded: .*{error}"
    with (
        pytest.raises(Broken if isinstance(error, Broken) else OSError, match=expected),
        storage.create(folder, "model.safetensors") as file,
    ):
        file.write(b"half")
        fail()
    storage.discard()
    assert (storage.state().manifest.step, objects(storage)) == (1, sorted([NAME, *CONTENT]))


def test_an_error_of_the_store_is_told_and_not_that_of_the_writer(s3):
    """torch's writer reports something else when its file fails."""
    storage = storage_of("s3://no-such-bucket/checkpoint_0")
    with (
        pytest.raises(FileNotFoundError, match="model.bin could not be uploaded: .*bucket does not exist"),
        storage.create(storage.stage(), "model.bin") as file,
    ):
        torch.save(torch.zeros(20 << 20), file)


def test_publish_needs_stage_and_bring_needs_fetch():
    storage = storage_of("memory://run/nothing")
    with pytest.raises(RuntimeError, match="Nothing is staged for .*nothing.*: call stage first"):
        storage.publish()
    with pytest.raises(RuntimeError, match="Nothing of .*nothing.* has been fetched here: call fetch first"):
        storage.bring({"model.bin": 1})


def test_ranks_of_node_download_each_file_once(base, monkeypatch):
    content = {"model.bin": b"weights" * 3000, "other.bin": b"1" * 2000}
    url = f"{base}/checkpoint_0"
    created(url, content)[0][0].publish()
    first, second = storage_of(url), storage_of(url)
    folder = Path(first.fetch(lambda name: name == "other.bin"))
    assert files_below(folder) == {"other.bin", NAME}
    assert first.outline()[0] == str(folder) and (folder / "model.bin").read_bytes() == b""
    second.fetched = list(first.fetched)
    calls = meddle(monkeypatch, type(core.url_to_fs(url)[0]), "get_file", lambda: None)
    for storage in (first, second, first):
        storage.bring({name: len(data) for name, data in content.items()})
    assert read(folder) == content
    assert base.startswith("s3") or len(calls) == 1  # s3fs binds its methods when it connects
    assert storage_of(url).fetch() == str(folder)
    put(f"{url}/{first.fetched[1]}/short.bin", b"1")
    for _ in range(2):
        with pytest.raises(DamagedCheckpoint, match="short.bin has 1 bytes, but 2001 were written"):
            second.bring({"short.bin": 2001})
    with pytest.raises(DamagedCheckpoint, match="lost.bin is missing"):
        second.bring({"lost.bin": 1})


def test_shards_are_read_from_files_that_come_when_they_are_asked_for(base, tmp_path):
    """Until then they are empty, and what comes takes their place."""
    state = {"model": {"weight": torch.arange(6.0), "other": torch.ones(2, 3)}, "epoch": 3}
    dcp.save(state, tmp_path, files=2)
    url = f"{base}/checkpoint_0"
    save(url, {f"shards/{file.name}": file.read_bytes() for file in tmp_path.iterdir()})
    storage = storage_of(url)
    folder, listing = storage.outline()
    assert {os.path.getsize(os.path.join(folder, name)) for name in listing.files} == {0}
    reader = dcp.ShardedFolder(os.path.join(folder, "shards"), CheckpointFolder(folder, listing, bring=storage.bring))
    assert reader.state["epoch"] == 3
    assert all(torch.equal(reader.read(reader.state["model"][name]), value) for name, value in state["model"].items())


def test_removing_takes_few_requests_and_is_told_where_it_is_refused(memory, monkeypatch, caplog):
    storage = save(URL, {f"file_{number}.bin": b"1" for number in range(50)})
    with monkeypatch.context() as patch:
        calls = meddle(patch, memory, "rm", lambda: None)
        storage.remove()
    assert storage.state().kind == "absent" and len(calls) < 5
    # A store that removes many objects in one request omits those that it refuses to remove.
    storage = save(URL)
    monkeypatch.setattr(memory, "rm", lambda self, path, **options: None)
    with failing(monkeypatch, memory, "rm_file", PermissionError("locked"), "/model"):
        with pytest.raises(PermissionError, match="model.safetensors could not be removed: locked"):
            storage.remove()


def test_a_file_in_parts(s3, monkeypatch):
    part = 5 << 20  # the least that S3 takes
    monkeypatch.setattr("s3fs.core.calculate_chunksize", lambda *_, **options: part)
    monkeypatch.setattr("s3fs.S3FileSystem.default_block_size", part)
    monkeypatch.setattr(object_store, "_LARGE", 2 * part)
    data = os.urandom(1 << 20) * 15
    for nodes, _ in (created("s3://bucket/large", {"model.safetensors": data}),):
        nodes[0].publish()
    storage = storage_of("s3://bucket/large")
    assert problems(storage.fetch(), storage.state().manifest, deep=True) == []
    url = url_of(storage, "model.safetensors").removeprefix("s3://bucket/")
    assert s3.head_object(Bucket="bucket", Key=url)["ETag"].strip('"').endswith("-3"), "three parts"
    with pytest.raises(Broken), storage.create(storage.stage(), "model.safetensors") as file:
        file.write(data)
        raise Broken
    assert s3.list_multipart_uploads(Bucket="bucket").get("Uploads", []) == []
    storage.discard()
    assert objects(storage) == [NAME, "model.safetensors"]


def test_a_copy_that_cannot_be_made_is_an_error_with_its_cause(monkeypatch):
    accelerator = Accelerator(cpu=True)
    accelerator.save_state(URL)
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(ObjectStore, "outline", lambda store: raise_error(full))
        accelerator.load_state(URL)
    assert accelerator.load_state(URL) == URL


def raise_error(error):
    raise error
