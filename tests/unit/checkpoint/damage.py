"""Ways to damage a checkpoint: by accident, and by somebody who means it and corrects the manifest afterwards.

Each function of `KINDS` takes a `Site` and damages the checkpoint there, or builds a bad one. What it returns says what must come
of it: `REFUSED`, `ACCEPTED` for what does no harm, or `EITHER`, where a checkpoint is refused or is loaded as it was saved.
"""

import io
import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from accelerate.checkpoint import formats
from accelerate.checkpoint.manifest import NAME

REFUSED, ACCEPTED, EITHER = "refused", "accepted", "either"
PICKLED = ("optimizer.bin", "scheduler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl")
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
        """Return what the manifest says."""
        return json.loads((self.folder / NAME).read_text())

    def tell(self, told: Any) -> None:
        """Write a manifest."""
        self.names.append(NAME)
        (self.folder / NAME).write_text(told if isinstance(told, str) else json.dumps(told))

    def agree(self) -> None:
        """Let the manifest have the sizes and checksums of the files that are there."""
        told = self.manifest()
        for name, entry in told["files"].items():
            seen = formats.describe(self.folder / name)
            entry["size"], entry["checksum"] = seen.size, seen.checksum
        (self.folder / NAME).write_text(json.dumps(told))

    def forget(self) -> None:
        """Make it a checkpoint of an older version, which cannot be verified."""
        (self.folder / NAME).unlink()
        (self.folder / "generators_0.safetensors").unlink()


KINDS: list[Callable[[Site], str]] = []


def kind(function: Callable[[Site], str]) -> Callable[[Site], str]:
    """Add a way to damage a checkpoint."""
    KINDS.append(function)
    return function


# -- accidents ---------------------------------------------------------------------------------------------------------


@kind
def truncated(site: Site) -> str:
    path = site.pick()
    os.truncate(path, site.draw.randrange(path.stat().st_size))
    return REFUSED


@kind
def flipped(site: Site) -> str:
    path = site.pick()
    data = bytearray(path.read_bytes())
    for place in site.draw.sample(range(len(data)), site.draw.randint(1, 3)):
        data[place] ^= 1 << site.draw.randrange(8)
    path.write_bytes(data)
    return REFUSED


@kind
def overwritten_in_the_middle(site: Site) -> str:
    path = site.pick()
    data = bytearray(path.read_bytes())
    start = site.draw.randrange(len(data) - 4)
    end = site.draw.randint(start + 4, len(data))
    filled = site.draw.choice([bytes(end - start), site.draw.randbytes(end - start)])
    if data[start:end] == filled:
        filled = b"\xff" * (end - start)
    data[start:end] = filled
    path.write_bytes(data)
    return REFUSED


@kind
def longer(site: Site) -> str:
    with open(site.pick(), "ab") as file:
        file.write(site.draw.randbytes(site.draw.randint(1, 100)))
    return REFUSED


@kind
def missing(site: Site) -> str:
    site.pick().unlink()
    return REFUSED


@kind
def exchanged(site: Site) -> str:
    site.names += site.draw.sample(site.files(), 2)
    first, second = (site.folder / name for name in site.names)
    first.rename(site.folder / "between"), second.rename(first), (site.folder / "between").rename(second)
    return REFUSED


@kind
def of_another_step(site: Site) -> str:
    """The size is the same, as a rule."""
    name = site.draw.choice([name for name in site.files() if _differs(site, name)])
    site.names.append(name)
    shutil.copyfile(site.other / name, site.folder / name)
    return REFUSED


def _differs(site: Site, name: str) -> bool:
    return (site.folder / name).read_bytes() != (site.other / name).read_bytes()


@kind
def with_the_manifest_of_another_step(site: Site) -> str:
    shutil.copyfile(site.other / NAME, site.folder / NAME)
    return REFUSED


@kind
def no_file(site: Site) -> str:
    """A folder, a link to elsewhere, to nowhere or to itself, or a pipe has its name."""
    path = site.pick()
    choice = site.draw.randrange(6)
    content = path.read_bytes()
    path.unlink()
    if choice == 0:
        path.mkdir()
    elif choice == 1:
        elsewhere = site.folder.parent / "elsewhere"
        elsewhere.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        path.symlink_to(elsewhere)
    elif choice == 2:
        path.symlink_to(site.folder / "nowhere")
    elif choice == 3:
        path.symlink_to(path.name)
    elif choice == 4:
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)
    return REFUSED


@kind
def no_manifest(site: Site) -> str:
    path = site.folder / NAME
    path.unlink()
    choice = site.draw.randrange(6)
    if choice == 0:
        path.mkdir()
    elif choice == 1:
        path.symlink_to("nowhere")
    elif choice == 2:
        path.symlink_to(NAME)
    elif choice == 3:
        os.mkfifo(path)
    elif choice == 4:
        path.touch()
    return REFUSED


@kind
def nothing(site: Site) -> str:
    shutil.rmtree(site.folder)
    choice = site.draw.randrange(4)
    if choice == 0:
        site.folder.mkdir()
    elif choice == 1:
        site.folder.touch()
    elif choice == 2:
        site.folder.mkdir()
        (site.folder / ".saving_x").mkdir()
    return REFUSED


@kind
def marked_as_incomplete(site: Site) -> str:
    (site.folder / site.draw.choice([".incomplete", ".incomplete_1"])).touch()
    return REFUSED


@kind
def more_than_needed(site: Site) -> str:
    for _ in range(site.draw.randint(1, 4)):
        name = site.draw.choice(
            ["notes.txt", "logs/a.txt", ".hidden", "é.bin", "model.safetensors.index.json", "x.pkl"]
        )
        (site.folder / name).parent.mkdir(exist_ok=True)
        (site.folder / name).write_bytes(site.draw.randbytes(20))
    return ACCEPTED


@kind
def old_and_broken(site: Site) -> str:
    """What cannot be verified is read by its library, whose error must tell the file."""
    site.forget()
    path = site.pick("model.safetensors", *PICKLED)
    if site.draw.random() < 0.2:
        path.unlink()
        site.names.append(str(site.folder))
        # A run of fewer processes lacks it.
        return EITHER if path.name == "random_states_0.pkl" else REFUSED
    os.truncate(path, site.draw.randrange(path.stat().st_size))
    return REFUSED


# -- manifests ---------------------------------------------------------------------------------------------------------


@kind
def manifest_bytes(site: Site) -> str:
    path = site.folder / NAME
    data = bytearray(path.read_bytes())
    site.names.append(NAME)
    if site.draw.random() < 0.5:
        del data[site.draw.randrange(len(data) - 2) :]
        path.write_bytes(data)
        return REFUSED
    for place in site.draw.sample(range(len(data)), site.draw.randint(1, 3)):
        data[place] ^= 1 << site.draw.randrange(8)
    path.write_bytes(data)
    site.names += site.files()
    return EITHER


@kind
def manifest_values(site: Site) -> str:
    """Some values are others, are missing, or have another name."""
    told = site.manifest()
    for _ in range(site.draw.randint(1, 3)):
        places = list(_places(told))
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
    site.tell(told)
    site.names += site.files()
    return EITHER


def _places(told: Any) -> Any:
    entries = told.items() if isinstance(told, dict) else enumerate(told) if isinstance(told, list) else ()
    for key, value in entries:
        yield told, key
        yield from _places(value)


@kind
def manifest_that_leads_out(site: Site) -> str:
    told = site.manifest()
    name = site.draw.choice(list(told["files"]))
    outside = site.folder.parent / "outside"
    shutil.copyfile(site.folder / name, outside)
    bad = [
        "../outside",
        str(outside),
        f"x/../../{outside.name}",
        "..\\outside",
        "C:outside",
        "./" + name,
        "a//b",
        "",
        "..",
    ]
    told["files"][site.draw.choice([*bad, "a\0b", NAME, "\\\\server\\share", "sub/", "/", "~/../../x/.."])] = told[
        "files"
    ].pop(name)
    site.tell(told)
    return REFUSED


@kind
def manifest_of_no_sense(site: Site) -> str:
    entry = {"size": 1, "checksum": "0" * 32}
    good = site.manifest()
    site.tell(
        site.draw.choice(
            [
                "[" * 100_000,
                '{"files":' * 50_000,
                "1" * 10_000,
                "nothing",
                "[]",
                "{}",
                "null",
                "\ufeff{}",
                {**good, "files": {}},
                {**good, "format": 2},
                {**good, "format": "1"},
                {**good, "checksum": {"algorithm": "none", "chunk": 0}},
                {**good, "files": {f"{number}": entry for number in range(3000)}},
                {**good, "files": {"n" * 5000: entry}},
                {**good, "files": {**good["files"], "\ud800": entry}},
                {**good, "world_size": 0},
            ]
        )
    )
    site.names.append(str(site.folder))
    return REFUSED


# -- files that somebody made, with a manifest that agrees ---------------------------------------------------------------


class Hostile:
    """Runs a command when it is unpickled by a reader that trusts it."""

    def __init__(self, marker: Path, draw: random.Random) -> None:
        code = f"open({str(marker)!r}, 'w')"
        self.call = draw.choice(
            [
                (os.system, (f"touch {marker}",)),
                (eval, (code,)),
                (exec, (code,)),
                (os.mkdir, (str(marker),)),
                (Path.touch, (marker,)),
                (getattr, (marker, "touch")),
                (torch.hub.load, (str(marker.parent), "x")),
            ]
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@kind
def hostile_pickle(site: Site) -> str:
    """Where a checkpoint has pickles, and of all the forms that torch reads."""
    path = site.pick(*PICKLED, "pytorch_model.bin")
    evil: Any = Hostile(site.marker, site.draw)
    state = torch.load(path, weights_only=False)
    if isinstance(state, dict) and site.draw.random() < 0.5:
        evil = {**state, site.draw.choice([*state, "more"]): evil}
    form = site.draw.randrange(4)
    if form == 0:
        path.write_bytes(pickle.dumps(evil, protocol=site.draw.randint(0, 5)))
    elif form == 1:
        torch.save(evil, path)
    elif form == 2:
        torch.save(evil, path, _use_new_zipfile_serialization=False)
    else:
        _replace_structure(path, pickle.dumps(evil, 2))
    _seal(site)
    return REFUSED


def _replace_structure(path: Path, text: bytes) -> None:
    """Leave a file in torch's format whole, but for its pickle."""
    made = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as new:
        for record in old.infolist():
            new.writestr(record.filename, text if record.filename.endswith("data.pkl") else old.read(record))
    path.write_bytes(made.getvalue())


def _seal(site: Site) -> None:
    """The manifest agrees, or there is none, as in older checkpoints."""
    if site.draw.random() < 0.25:
        site.forget()
    else:
        site.agree()


@kind
def nonsense_in_torch_format(site: Site) -> str:
    """It reads well, and is no state of anything."""
    path = site.pick("optimizer.bin", "custom_checkpoint_0.pkl", "random_states_0.pkl")
    if site.draw.random() < 0.2:  # lists in lists, deeper than any reader that calls itself gets
        depth = site.draw.choice([900, 5000, 200_000])
        _replace_structure(path, b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".")
    else:
        torch.save(site.draw.choice([3, "x", [], {"x": 1}, (), torch.zeros(2), [{"a": [torch.ones(1)]}]]), path)
    _seal(site)
    # What a rank has for itself is restored piece by piece, and each piece that is missing is warned about.
    return EITHER if path.name == "random_states_0.pkl" else REFUSED


@kind
def another_optimizer(site: Site) -> str:
    path = site.folder / "optimizer.bin"
    site.names.append(path.name)
    state = torch.load(path)
    group = state["param_groups"][0]
    if site.draw.random() < 0.5:
        state["param_groups"].append({**group, "params": []})
    else:
        group["params"] = group["params"][:-1]
    torch.save(state, path)
    _seal(site)
    return REFUSED


@kind
def another_model(site: Site) -> str:
    path = site.folder / "model.safetensors"
    site.names.append(path.name)
    state = load_file(path)
    name = site.draw.choice(list(state))
    value = state.pop(name)
    choice = site.draw.randrange(4)
    if choice == 0:
        state[name] = torch.zeros(*value.shape, 2)
    elif choice == 1:
        state[name] = torch.zeros(0)
    elif choice == 2:
        state[name + "x"] = value
    save_file(state, path, {"format": "pt"})
    _seal(site)
    return REFUSED


@kind
def bad_header(site: Site) -> str:
    """Headers of safetensors that lie about where tensors are, or about their own length."""
    path = site.pick("model.safetensors", "generators_0.safetensors")
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    tensors = [name for name in header if name != "__metadata__" and header[name]["data_offsets"][1]]
    name = site.draw.choice(tensors)
    start, end = header[name]["data_offsets"]
    choice = site.draw.randrange(6)
    if choice == 0:  # the header's length
        length = site.draw.choice([0, 1, len(data), 2**31, 2**60, 2**63, 2**64 - 1])
        path.write_bytes(length.to_bytes(8, "little") + data[8:])
    elif choice == 1:
        path.write_bytes(data[: site.draw.choice([0, 1, 7, 8, 9, 8 + length // 2])])
    else:
        if choice == 2:
            beyond = [[start, end + 4], [end, start], [-4, end], [2**63, 2**63 + end - start], [start + 4, end + 4]]
            beyond += [
                [start],
                "x",
                [0.5, end],
                [None, None],
                [len(body), len(body) + end - start],
                [2**64, 2**64 + 8],
            ]
            header[name]["data_offsets"] = site.draw.choice(beyond)
        elif choice == 3:
            shapes = [
                [2**40, 2**40],
                [-1],
                [2**64],
                ["2"],
                3,
                None,
                [1, *header[name]["shape"], 2],
                [2**32, 2**32, 0],
                [1.5],
            ]
            header[name]["shape"] = site.draw.choice(shapes)
        elif choice == 4:
            header[name]["dtype"] = site.draw.choice(["F128", "", None, 3, "f32", "F64" * 100, ["F32"]])
        else:
            header = site.draw.choice(
                [[], None, {}, {**header, "more": {}}, {name: None}, {**header, name: header[name]["shape"]}, "x"]
            )
        text = json.dumps(header).encode()
        if site.draw.random() < 0.1:
            text = b"[" * 100_000
        text += b" " * (-len(text) % 8)
        path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    _seal_weights(site, path)
    return REFUSED


@kind
def overlapping_tensors(site: Site) -> str:
    """Two tensors of the same bytes, and bytes that belong to none."""
    path = site.folder / "model.safetensors"
    site.names.append(path.name)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    first, second = site.draw.sample([name for name in tensors if tensors[name]["data_offsets"][1]], 2)
    size = tensors[second]["data_offsets"][1] - tensors[second]["data_offsets"][0]
    begin = site.draw.choice([0, tensors[first]["data_offsets"][0]])
    if [begin, begin + size] == tensors[second]["data_offsets"]:
        begin += 8
    header[second]["data_offsets"] = [begin, begin + size]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    _seal_weights(site, path)
    return REFUSED


def _seal_weights(site: Site, path: Path) -> None:
    if path.name == "model.safetensors":
        _seal(site)
    else:
        site.agree()
