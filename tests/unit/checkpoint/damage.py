"""Ways to damage a checkpoint: by accident, and on purpose, by an attacker who corrects the manifest afterwards.

Each function of `KINDS` damages a `Site`. With it goes what must come of it, unless it returns something else: `REFUSED`,
`ACCEPTED` for what does no harm, or `EITHER`, where a checkpoint is refused or is loaded as it was saved.
"""

import functools
import io
import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from accelerate.checkpoint import formats
from accelerate.checkpoint.manifest import NAME

REFUSED, ACCEPTED, EITHER = "refused", "accepted", "either"
WEIGHTS, OPTIMIZER, RANDOM = "model.safetensors", "optimizer.bin", "random_states_0.pkl"
PICKLED = (OPTIMIZER, "scheduler.bin", RANDOM, "custom_checkpoint_0.pkl")
NASTY = (
    *(None, True, -1, 0, 1, 2**63, 2**70, 1.5, 1e308, "", "x", "../x", "F32", "\ud800", "\0", [], [[]], {}, {"": {}}),
    *([2**40, 2**40], [-1], "0" * 32, float("nan"), float("inf")),
)


@dataclass
class Site:
    draw: random.Random  # of every choice
    folder: Path
    other: Path  # a whole one of the same program at another step
    marker: Path  # a file that hostile files create when they are executed
    names: list[str] = field(default_factory=list)  # what was damaged; one of these is in the error's message

    def files(self) -> list[str]:
        return sorted(name for name in os.listdir(self.folder) if name != NAME)

    def pick(self, *among: str) -> Path:
        known = [name for name in among if (self.folder / name).exists()] if among else self.files()
        self.names.append(self.draw.choice(known))
        return self.folder / self.names[-1]

    def seal(self, manifest: float = 0.75) -> None:
        """Let the manifest have the sizes and checksums of what is there; in one of four cases there is none, as in older versions."""
        if self.draw.random() >= manifest:
            (self.folder / NAME).unlink()
            (self.folder / "parameter_names.json").unlink(missing_ok=True)
            return
        values = json.loads((self.folder / NAME).read_text())
        for name, entry in values["files"].items():
            seen = formats.describe(self.folder / name)
            entry["size"], entry["checksum"] = seen.size, seen.checksum
        (self.folder / NAME).write_text(json.dumps(values))


KINDS: list[tuple[Callable[[Site], str | None], str]] = []


def kind(outcome: str = REFUSED) -> Callable[[Any], Any]:
    return lambda function: KINDS.append((function, outcome)) or function


def _flip_some_bits(site: Site, path: Path) -> None:
    data = bytearray(path.read_bytes())
    for place in site.draw.sample(range(len(data)), site.draw.randint(1, 3)):
        data[place] ^= 1 << site.draw.randrange(8)
    path.write_bytes(data)


@kind()
def flipped(site: Site) -> None:
    _flip_some_bits(site, site.pick())


@kind()
def of_another_length(site: Site) -> None:
    path = site.pick()
    data = path.read_bytes()
    path.write_bytes(site.draw.choice([data[: site.draw.randrange(len(data))], data + b"more"]))


@kind()
def mixed(site: Site) -> None:
    """Files that are exchanged, or of another step; their sizes are the same, as a rule."""
    names = [name for name in site.files() if (site.folder / name).read_bytes() != (site.other / name).read_bytes()]
    first, second = (site.folder / name for name in site.draw.sample(names, 2))
    site.names += [first.name, second.name]
    if site.draw.random() < 0.5:
        shutil.copyfile(site.other / first.name, first)
    else:
        between = site.folder / "between"
        first.rename(between), second.rename(first), between.rename(second)


@kind()
def no_file(site: Site) -> None:
    """Nothing gets a file's name, or a folder, a pipe, or a link to nowhere, to itself, to endless or to other contents."""
    path, elsewhere = site.pick(*site.files(), NAME), site.folder.parent / "elsewhere"
    _flip_some_bits(site, path), path.rename(elsewhere)
    links = ["nowhere", path.name, *([elsewhere, "/dev/zero"] if path.name != NAME else [])]
    made = [functools.partial(path.symlink_to, target) for target in links]
    site.draw.choice([*made, path.mkdir, lambda: os.mkfifo(path), lambda: None])()


@kind()
def no_file_in_an_old_one(site: Site) -> None:
    """Without a manifest only the reader itself finds a folder, a pipe, or a link to nowhere, to itself or to endless contents."""
    site.seal(manifest=0)
    path = site.pick(WEIGHTS, *PICKLED)
    path.unlink()
    links = [functools.partial(path.symlink_to, target) for target in ("nowhere", path.name, "/dev/zero", "notes/x")]
    site.draw.choice([*links, path.mkdir, lambda: os.mkfifo(path)])()


@kind(ACCEPTED)
def more_than_needed(site: Site) -> None:
    extra = ["notes.txt", "logs/a.txt", ".hidden", "é.bin", "model.safetensors.index.json", "x.pkl"]
    for name in site.draw.choices(extra, k=site.draw.randint(1, 4)):
        (site.folder / name).parent.mkdir(exist_ok=True)
        (site.folder / name).write_bytes(site.draw.randbytes(20))


@kind()
def old_and_broken(site: Site) -> str | None:
    """What cannot be verified is read by its library, whose error must name the file."""
    site.seal(manifest=0)
    path = site.pick(WEIGHTS, *PICKLED)
    if site.draw.random() >= 0.2:
        os.truncate(path, site.draw.randrange(path.stat().st_size))
        return None
    path.unlink()
    site.names.append(str(site.folder))
    return EITHER if path.name == RANDOM else None  # a run of fewer processes lacks it


@kind(EITHER)
def manifest_flipped(site: Site) -> None:
    _flip_some_bits(site, site.folder / NAME)
    site.names += [NAME, *site.files()]


@kind(EITHER)
def manifest_values(site: Site) -> None:
    """Some values are others, are missing, or have another name."""
    values = json.loads((site.folder / NAME).read_text())
    for _ in range(site.draw.randint(1, 3)):
        holder, key = site.draw.choice([*_places(values), (values, "format")])
        choice = site.draw.random()
        if choice < 0.2:
            holder.pop(key, None) if isinstance(holder, dict) else holder.pop(key)
        elif choice < 0.4 and isinstance(holder, dict):
            holder[str(site.draw.choice(NASTY))] = holder.pop(key, None)
        else:
            holder[key] = site.draw.choice(NASTY)
    (site.folder / NAME).write_text(json.dumps(values))
    site.names += [NAME, *site.files()]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield value, key
        yield from _places(inner)


class Hostile:
    """Runs a command when it is unpickled by a reader that trusts it."""

    def __init__(self, marker: Path, draw: random.Random) -> None:
        calls = [(os.system, f"touch {marker}"), (eval, f"open({str(marker)!r}, 'w')"), (Path.touch, marker)]
        self.call = draw.choice([*calls, (os.mkdir, str(marker)), (torch.hub.load, str(marker.parent), "x")])

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call[0], self.call[1:]


@kind()
def hostile_pickle(site: Site) -> None:
    path = site.pick(*PICKLED, "pytorch_model.bin")
    evil: Any = Hostile(site.marker, site.draw)
    state = torch.load(path, weights_only=False)
    if isinstance(state, dict) and site.draw.random() < 0.5:
        evil = {**state, site.draw.choice([*state, "more"]): evil}
    forms = [
        lambda: path.write_bytes(pickle.dumps(evil, protocol=site.draw.randint(0, 5))),
        lambda: torch.save(evil, path),
        lambda: torch.save(evil, path, _use_new_zipfile_serialization=False),
        lambda: _replace_structure(path, pickle.dumps(evil, 2)),
    ]
    site.draw.choice(forms)()
    site.seal()


def _replace_structure(path: Path, text: bytes) -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as new:
        for record in old.infolist():
            new.writestr(record.filename, text if record.filename.endswith("data.pkl") else old.read(record))
    path.write_bytes(made.getvalue())


@kind()
def nonsense_in_torch_format(site: Site) -> str | None:
    """It reads well, and is no state of anything."""
    path = site.pick(OPTIMIZER, "custom_checkpoint_0.pkl", RANDOM)
    if site.draw.random() < 0.2:  # lists in lists, deeper than any reader that calls itself gets
        depth = site.draw.choice([900, 5000, 200_000])
        _replace_structure(path, b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".")
    else:
        torch.save(site.draw.choice([3, "x", [], {"x": 1}, (), torch.zeros(2), [{"a": [torch.ones(1)]}]]), path)
    site.seal()
    # What a rank has for itself is restored piece by piece, and each piece that is missing is warned about.
    return EITHER if path.name == RANDOM else None


@kind()
def bad_length_of_header(site: Site) -> None:
    """The header of a safetensors file lies about its own length, or is cut."""
    path = site.pick(WEIGHTS)
    data = path.read_bytes()
    lengths = [0, 1, len(data), 2**31, 2**60, 2**63, 2**64 - 1]
    lying = [length.to_bytes(8, "little") + data[8:] for length in lengths]
    path.write_bytes(site.draw.choice([*lying, *(data[:end] for end in (0, 1, 7, 8, 9, 100))]))
    site.seal()


@kind()
def bad_header(site: Site) -> None:
    """The header of a safetensors file lies about where tensors are and what they are, lets them overlap, or is none."""
    path = site.pick(WEIGHTS)
    data = path.read_bytes()
    body = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:body])
    name = site.draw.choice([name for name, entry in header.items() if entry.get("data_offsets", (0, 0))[1]])
    entry = header[name]
    (start, end), shape = entry["data_offsets"], entry["shape"]
    offsets = [[start, end + 4], [end, start], [-4, end], [2**63, 2**63 + end - start], [start + 4, end + 4], [start]]
    offsets += ["x", [0.5, end], [None, None], [len(data), len(data) + end - start], [2**64, 2**64 + 8]]
    shapes = [[2**40, 2**40], [-1], [2**64], ["2"], 3, None, [1, *shape, 2], [2**32, 2**32, 0], [1.5]]
    values = {"data_offsets": offsets, "shape": shapes, "dtype": ["F128", "", None, 3, "f32", "F64" * 100, ["F32"]]}
    wrong = [{**header, name: {**entry, key: site.draw.choice(values[key])}} for key in values]
    wrong += [[], None, {}, {**header, "more": {}}, {name: None}, {**header, name: shape}, "x"]
    text = b"[" * 100_000 if site.draw.random() < 0.1 else json.dumps(site.draw.choice(wrong)).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[body:])
    site.seal()
