"""Files that are no configuration, or mean harm."""

import json
import os
import tracemalloc
from unittest.mock import Mock

import pytest

from accelerate.launch import config_text
from accelerate.launch.errors import LaunchError


@pytest.fixture
def load(place):
    def write_and_load(data, name="a.yaml"):
        (place / name).write_bytes(data if isinstance(data, bytes) else data.encode())
        return config_text.load(place / name)

    return write_and_load


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.yaml", "", "a.yaml is empty. Write it with `accelerate config --config_file "),
        ("a.yaml", "# nothing\n", "a.yaml is empty"),
        ("a.yaml", "- 1", "holds a list"),
        ("a.yaml", "hello", "holds a text"),
        ("a.json", "3", "holds a number"),
        ("a.json", "null", "holds NoneType"),
        ("a.yaml", "a: [", "cannot be read: line 1"),
        ("a.yaml", "a: 1\n b: 2", "cannot be read: line 2, column 3"),
        ("a.yaml", "a:\tb:\t- c", "cannot be read: line 1"),
        ("a.json", "a: 1", "cannot be read"),
        ("a.yaml", b"\x00\x01\x02", "cannot be read"),
        ("a.yaml", b"\x89PNG\r\n\x1a\n", "is no text: byte 0 is not UTF-8"),
        ("a.yaml", "a: 1\n---\nb: 2", "line 2, column 1: expected a single document in the stream"),
        ("a.yaml", "a: *nobody", "cannot be read"),
        ("a.yaml", "? [1, 2]\n: 3", None),
        ("a.yaml", "{[]: 1}", None),
        ("a.yaml", "? {a: 1}\n: 3", "cannot be read"),
        ("a.yaml", "a: " + "9" * 100_000, "cannot be read"),
        ("a.json", '{"a": ' + "9" * 100_000 + "}", "cannot be read"),
        ("a.yaml", "a: !!timestamp 2001-99-99", "cannot be read"),
    ],
)
def test_one_line_of_error(load, name, data, message):
    try:
        load(data, name)
    except LaunchError as error:
        assert message is None or message in str(error)
        assert "\n" not in str(error)
        assert len(str(error)) < 600
    else:
        assert message is None


@pytest.mark.parametrize(
    "tag", ["object/apply:os.system", "object/new:os.system", "name:os.system", "module:antigravity"]
)
def test_nothing_is_built_or_run(load, place, tag):
    with pytest.raises(LaunchError, match="cannot be read: line 1, .*could not determine a constructor"):
        load(f"a: !!python/{tag} ['touch owned']")
    assert not (place / "owned").exists()


def bomb(value):
    levels = [f"a{n}: &a{n} {value.format(', '.join([f'*a{n - 1}'] * 10))}" for n in range(1, 12)]
    return "\n".join(["a0: &a0 {a: 1, b: 2}", *levels])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (bomb("[{}]"), "aliases that stand for so many"),
        (bomb("{{<<: [{}]}}"), "aliases that stand for so many"),
        ("[" * 100_000, "nested more than 20 levels"),
        ("{a: " * 50_000, "nested more than 20 levels"),
        ('{"a": ' * 40_000, "nested more than 20 levels"),
        ("- " * 1000 + "x", "in line 1, it is nested more than 20 levels"),
        ("a: " + "[" * 20 + "1" + "]" * 20, "nested more than 20 levels"),
        ("a: &a [*a]", "a contains itself"),
        ("a: &a\n  b: *a", "in line 2, a contains itself"),
        ("a: [" + "1," * 20_000 + "1]", "more than 10000 values"),
        (json.dumps(dict.fromkeys(map(str, range(8_000)))), "more than 10000 values"),
        ("x: y\n" * 60_000, "more than 256 KiB"),
    ],
    ids=lambda text: text[:20],
)
def test_bounded_in_memory(load, text, message):
    tracemalloc.start()
    try:
        with pytest.raises(LaunchError, match=message):
            load(text, "a.json" if text.startswith('{"') else "a.yaml")
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


def test_what_is_meant_well(load):
    assert load("a: &a {b: 1}\nc: *a\nd: {<<: *a, e: 2}").content["d"] == {"b": 1, "e": 2}
    assert load("a: " + "[" * 19 + "1" + "]" * 19)
    strange = {"a\x7f": "\u2028\ufeff"}  # YAML does not have all of that
    assert load(json.dumps(strange, ensure_ascii=False, indent="\t"), "a.json").content == strange


def test_what_windows_writes(load):
    assert load("a: b\r\n".encode("utf-8-sig")).content == {"a": "b"}
    assert load("a: b\r\n".encode("utf-16")).content == {"a": "b"}
    assert load(b"\xef\xbb\xbf" + json.dumps({"a": 1}).encode(), "a.json").content == {"a": 1}
    with pytest.raises(LaunchError, match="is no text"):
        load(b"\xff\xfea")


@pytest.mark.parametrize("name", ["a.json", "a.yaml"])
def test_lines(load, name):
    text = load('{\n "a": 1,\n "s": {\n  "b": 2},\n "a": 3}', name)
    assert text.content == {"a": 3, "s": {"b": 2}}
    assert text.lines == {("a",): [2, 5], ("s",): [3], ("s", "b"): [4]}


def test_what_is_no_file(place):
    (place / "folder").mkdir()
    with pytest.raises(LaunchError, match="is a folder; name the file in it"):
        config_text.load(place / "folder")
    (place / "folder" / "default_config.yaml").touch()
    with pytest.raises(LaunchError, match="is a folder; did you mean .*folder.default_config.yaml"):
        config_text.load(place / "folder")
    with pytest.raises(LaunchError, match="cannot be opened: No such file"):
        config_text.load(place / "nowhere")
    if hasattr(os, "mkfifo"):
        os.mkfifo(place / "pipe")
        with pytest.raises(LaunchError, match="is a pipe or a device"):
            config_text.load(place / "pipe")


def test_a_file_that_may_not_be_read(place, monkeypatch):
    (place / "a.yaml").write_text("a: 1")
    monkeypatch.setattr("builtins.open", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(LaunchError, match=r"a.yaml cannot be opened: Permission denied\."):
        config_text.load(place / "a.yaml")
