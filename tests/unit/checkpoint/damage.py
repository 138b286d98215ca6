"""Ways to damage a checkpoint: by accident, and on purpose, by an attacker who corrects the manifest afterwards.

Each function of `KINDS` takes a `Site` and damages the checkpoint there, or builds a bad one. With it goes what must come of it, unless
it returns something else: `REFUSED`, `ACCEPTED` for what does no harm, or `EITHER`, where a checkpoint is refused or is loaded as it
was saved.
"""

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
from safetensors.torch import load_file, save_file

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
    """A checkpoint that is about to be damaged.

    Attributes:
        draw: every choice comes from here.
        folder: the checkpoint.
        other: a whole one of the same program at another step.
        marker: a file that hostile files create when they are executed.
        names: what was damaged; one of these is in the error's message.
    """

    draw: random.Random
    folder: Path
    other: Path
    marker: Path
    names: list[str] = field(default_factory=list)

    def files(self) -> list[str]:
        """Return the names of its files, without the manifest."""
        return sorted(name for name in os.listdir(self.folder) if name != NAME)

    def pick(self, *among: str) -> Path:
        """Choose a file to damage."""
        known = [name for name in among if (self.folder / name).exists()] if among else self.files()
        self.names.append(self.draw.choice(known))
        return self.folder / self.names[-1]

    def manifest(self) -> dict[str, Any]:
        """Return the values of the manifest."""
        return json.loads((self.folder / NAME).read_text())

    def write_manifest(self, values: Any) -> None:
        """Write a manifest, which is what was damaged."""
        self.names.append(NAME)
        (self.folder / NAME).write_text(values if isinstance(values, str) else json.dumps(values))

    def seal(self, manifest: float = 0.75) -> None:
        """Let the manifest have the sizes and checksums of what is there; in one of four cases there is none, as in older versions."""
        if self.draw.random() >= manifest:
            (self.folder / NAME).unlink()
            (self.folder / "generators_0.safetensors").unlink()
            return
        values = self.manifest()
        for name, entry in values["files"].items():
            seen = formats.describe(self.folder / name)
            entry["size"], entry["checksum"] = seen.size, seen.checksum
        (self.folder / NAME).write_text(json.dumps(values))


KINDS: list[tuple[Callable[[Site], str | None], str]] = []


def kind(outcome: str = REFUSED) -> Callable[[Any], Any]:
    """Add a way to damage a checkpoint, and what must come of it."""

    def add(function: Callable[[Site], str | None]) -> Callable[[Site], str | None]:
        KINDS.append((function, outcome))
        return function

    return add


# -- accidents ---------------------------------------------------------------------------------------------------------


@kind()
def truncated(site: Site) -> None:
    path = site.pick()
    os.truncate(path, site.draw.randrange(path.stat().st_size))


def _flip_some_bits(site: Site, path: Path) -> None:
    data = bytearray(path.read_bytes())
    for place in site.draw.sample(range(len(data)), site.draw.randint(1, 3)):
        data[place] ^= 1 << site.draw.randrange(8)
    path.write_bytes(data)


@kind()
def flipped(site: Site) -> None:
    _flip_some_bits(site, site.pick())


@kind()
def overwritten_in_the_middle(site: Site) -> None:
    path = site.pick()
    data = bytearray(path.read_bytes())
    start = site.draw.randrange(len(data) - 4)
    end = site.draw.randint(start + 4, len(data))
    filled = site.draw.choice([bytes(end - start), site.draw.randbytes(end - start)])
    data[start:end] = b"\xff" * (end - start) if data[start:end] == filled else filled
    path.write_bytes(data)


@kind()
def longer(site: Site) -> None:
    with open(site.pick(), "ab") as file:
        file.write(site.draw.randbytes(site.draw.randint(1, 100)))


@kind()
def missing(site: Site) -> None:
    site.pick().unlink()


@kind()
def exchanged(site: Site) -> None:
    site.names += site.draw.sample(site.files(), 2)
    first, second = (site.folder / name for name in site.names)
    first.rename(site.folder / "between"), second.rename(first), (site.folder / "between").rename(second)


@kind()
def of_another_step(site: Site) -> None:
    """The size is the same, as a rule."""
    path = site.pick(*(n for n in site.files() if (site.folder / n).read_bytes() != (site.other / n).read_bytes()))
    shutil.copyfile(site.other / path.name, path)


@kind()
def with_the_manifest_of_another_step(site: Site) -> None:
    shutil.copyfile(site.other / NAME, site.folder / NAME)


def _put_no_file(site: Site, path: Path, *more: Callable[[], object]) -> None:
    """A folder, a link to nowhere or to itself, or a pipe gets a file's name."""
    path.unlink()
    made = [
        path.mkdir,
        lambda: path.symlink_to("nowhere"),
        lambda: path.symlink_to(path.name),
        lambda: os.mkfifo(path),
    ]
    site.draw.choice([*made, *more])()


@kind()
def no_file(site: Site) -> None:
    """Its name may also be that of a link to other contents, or to endless ones."""
    path, elsewhere = site.pick(), site.folder.parent / "elsewhere"
    content = path.read_bytes()
    elsewhere.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    _put_no_file(site, path, lambda: path.symlink_to(elsewhere), lambda: path.symlink_to("/dev/zero"))


@kind()
def no_manifest(site: Site) -> None:
    path = site.folder / NAME
    _put_no_file(site, path, path.touch, lambda: None)


@kind()
def nothing(site: Site) -> None:
    folder = site.folder
    shutil.rmtree(folder)
    site.draw.choice([folder.mkdir, folder.touch, lambda: (folder / ".saving_x").mkdir(parents=True), lambda: None])()


@kind()
def marked_as_incomplete(site: Site) -> None:
    (site.folder / site.draw.choice([".incomplete", ".incomplete_1"])).touch()


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


# -- manifests ---------------------------------------------------------------------------------------------------------


@kind()
def manifest_cut_short(site: Site) -> None:
    text = (site.folder / NAME).read_text()
    site.write_manifest(text[: site.draw.randrange(len(text) - 2)])


@kind(EITHER)
def manifest_flipped(site: Site) -> None:
    _flip_some_bits(site, site.folder / NAME)
    site.names += [NAME, *site.files()]


@kind(EITHER)
def manifest_values(site: Site) -> None:
    """Some values are others, are missing, or have another name."""
    values = site.manifest()
    for _ in range(site.draw.randint(1, 3)):
        places = list(_places(values))
        if not places:
            break
        holder, key = site.draw.choice(places)
        choice = site.draw.random()
        if choice < 0.2:
            del holder[key]
        elif choice < 0.4 and isinstance(holder, dict):
            holder[str(site.draw.choice(NASTY))] = holder.pop(key)
        else:
            holder[key] = site.draw.choice(NASTY)
    site.write_manifest(values)
    site.names += site.files()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield value, key
        yield from _places(inner)


@kind()
def manifest_that_leads_out(site: Site) -> None:
    values = site.manifest()
    name = site.draw.choice(list(values["files"]))
    outside = site.folder.parent / "outside"
    shutil.copyfile(site.folder / name, outside)
    bad = [
        "../outside",
        str(outside),
        "x/../../outside",
        "..\\outside",
        "C:outside",
        "~/../../x/..",
        "\\\\server\\share",
    ]
    bad += ["./" + name, "a//b", "", "..", "a\0b", NAME, "sub/", "/"]
    values["files"][site.draw.choice(bad)] = values["files"].pop(name)
    site.write_manifest(values)


@kind()
def manifest_of_no_sense(site: Site) -> None:
    entry, good = {"size": 1, "checksum": "0" * 32}, site.manifest()
    texts = ["[" * 100_000, '{"files":' * 50_000, "1" * 10_000, "nothing", "[]", "{}", "null", "\ufeff{}"]
    changes = [
        *({"format": 2}, {"format": "1"}, {"checksum": {"algorithm": "none", "chunk": 0}}, {"world_size": 0}),
        *({"files": {}}, {"files": {f"{number}": entry for number in range(3000)}}, {"files": {"n" * 5000: entry}}),
        {"files": {**good["files"], "\ud800": entry}},
    ]
    site.write_manifest(site.draw.choice([*texts, *({**good, **change} for change in changes)]))
    site.names.append(str(site.folder))


# -- files made by an attacker, with a manifest that agrees --------------------------------------------------------------


class Hostile:
    """Runs a command when it is unpickled by a reader that trusts it."""

    def __init__(self, marker: Path, draw: random.Random) -> None:
        code = f"open({str(marker)!r}, 'w')"
        calls = [(os.system, (f"touch {marker}",)), (eval, (code,)), (exec, (code,)), (os.mkdir, (str(marker),))]
        calls += [(Path.touch, (marker,)), (getattr, (marker, "touch")), (torch.hub.load, (str(marker.parent), "x"))]
        self.call = draw.choice(calls)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@kind()
def hostile_pickle(site: Site) -> None:
    """Where a checkpoint has pickles, and of all the forms that torch reads."""
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
    """Leave a file in torch's format whole, but for its pickle."""
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
def another_optimizer(site: Site) -> None:
    path = site.pick(OPTIMIZER)
    state = torch.load(path)
    group = state["param_groups"][0]
    if site.draw.random() < 0.5:
        state["param_groups"].append({**group, "params": []})
    else:
        group["params"] = group["params"][:-1]
    torch.save(state, path)
    site.seal()


@kind()
def another_model(site: Site) -> None:
    """A tensor has another shape, another name, or is missing."""
    path = site.pick(WEIGHTS)
    state = load_file(path)
    name = site.draw.choice(list(state))
    value = state.pop(name)
    changes = [{name: torch.zeros(*value.shape, 2)}, {name: torch.zeros(0)}, {f"{name}x": value}, {}]
    save_file({**state, **site.draw.choice(changes)}, path, {"format": "pt"})
    site.seal()


def _parsed(data: bytes) -> tuple[dict[str, Any], list[str], bytes]:
    """The header of a safetensors file, the names of its tensors that have bytes, and what follows the header."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    return header, [name for name, entry in header.items() if entry.get("data_offsets", (0, 0))[1]], data[end:]


def _with_header(text: bytes, body: bytes) -> bytes:
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


@kind()
def bad_length_of_header(site: Site) -> None:
    """The header of a safetensors file lies about its own length, or is cut."""
    path = site.pick(WEIGHTS, "generators_0.safetensors")
    data = path.read_bytes()
    lengths = [0, 1, len(data), 2**31, 2**60, 2**63, 2**64 - 1]
    lying = [length.to_bytes(8, "little") + data[8:] for length in lengths]
    path.write_bytes(site.draw.choice([*lying, *(data[:end] for end in (0, 1, 7, 8, 9, 100))]))
    site.seal(0.75 if path.name == WEIGHTS else 1)


@kind()
def bad_header(site: Site) -> None:
    """The header of a safetensors file lies about where tensors are and what they are, or is none."""
    path = site.pick(WEIGHTS, "generators_0.safetensors")
    header, tensors, body = _parsed(path.read_bytes())
    name = site.draw.choice(tensors)
    entry = header[name]
    (start, end), shape = entry["data_offsets"], entry["shape"]
    offsets = [
        [start, end + 4],
        [end, start],
        [-4, end],
        [2**63, 2**63 + end - start],
        [start + 4, end + 4],
        [start],
        "x",
    ]
    offsets += [[0.5, end], [None, None], [len(body), len(body) + end - start], [2**64, 2**64 + 8]]
    shapes = [[2**40, 2**40], [-1], [2**64], ["2"], 3, None, [1, *shape, 2], [2**32, 2**32, 0], [1.5]]
    values = {"data_offsets": offsets, "shape": shapes, "dtype": ["F128", "", None, 3, "f32", "F64" * 100, ["F32"]]}
    key = site.draw.choice([*values, None])
    others = [[], None, {}, {**header, "more": {}}, {name: None}, {**header, name: shape}, "x"]
    wrong = (
        site.draw.choice(others) if key is None else {**header, name: {**entry, key: site.draw.choice(values[key])}}
    )
    text = b"[" * 100_000 if site.draw.random() < 0.1 else json.dumps(wrong).encode()
    path.write_bytes(_with_header(text, body))
    site.seal(0.75 if path.name == WEIGHTS else 1)


@kind()
def overlapping_tensors(site: Site) -> None:
    """Two tensors of the same bytes, and bytes that belong to none."""
    path = site.pick(WEIGHTS)
    header, tensors, body = _parsed(path.read_bytes())
    first, second = (header[name] for name in site.draw.sample(tensors, 2))
    start, end = second["data_offsets"]
    begin = site.draw.choice([0, first["data_offsets"][0]])
    begin += 8 if begin == start else 0
    second["data_offsets"] = [begin, begin + end - start]
    path.write_bytes(_with_header(json.dumps(header).encode(), body))
    site.seal()
