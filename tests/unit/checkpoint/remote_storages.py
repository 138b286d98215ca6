"""Checkpoints in object stores, for tests: how they are written, looked at, and spoiled."""

import json
import os

from accelerate.checkpoint import formats
from accelerate.checkpoint.manifest import NAME, Manifest

CONTENT = {
    "model.safetensors": b"weights" * 100,
    "optimizer.bin": b"moments" * 200,
    "pytorch_model_fsdp_0/__0_0.distcp": b"shard",
    "empty.bin": b"",
}

FORMER = "g-20200101T000000Z-0123456789abcdef"


class Killed(BaseException):
    """Ends a save as the death of its process would."""


def write(folder, content=CONTENT, **facts):
    """Write files and their manifest into a folder."""
    entries = {}
    for name, data in content.items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        entries[name] = formats.write_bytes(path, data)
    Manifest(entries, **facts).write(folder)


def save(place, content=CONTENT, **facts):
    """Save a checkpoint as one node does."""
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
    """Return the files of a local folder."""
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


def altered(place, **changes):
    """Change entries of a published manifest."""
    told = json.loads(place._store.read(NAME)) | changes
    place._store.write(NAME, json.dumps(told).encode())
