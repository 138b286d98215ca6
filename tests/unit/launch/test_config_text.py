"""Files that are no configuration, or mean harm."""

import json
import os
import tracemalloc

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
        ("a.yaml", "", "a.yaml is empty"),
        ("a.json", "", "a.json is empty"),
        ("a.yaml", " \n\n", "a.yaml is empty"),
        ("a.yaml", "# nothing\n", "is empty: it holds nothing but comments"),
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
        ("a.yaml", "a: 1\n---\nb: 2", "several documents"),
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
    "text",
    [
        "a: !!python/object/apply:os.system ['touch owned']",
        "!!python/object/new:os.system ['touch owned']",
        "a: !!python/name:os.system",
        "a: !!python/module:antigravity",
    ],
)
def test_nothing_is_built_or_run(load, place, text):
    with pytest.raises(LaunchError, match="cannot be read"):
        load(text)
    assert not (place / "owned").exists()


def bomb(levels, of="[{}]"):
    lines = ["a0: &a0 x"]
    lines += [f"a{n}: &a{n} {of.format(', '.join([f'*a{n - 1}'] * 10))}" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        bomb(12),
        "m0: &m0 {a: 1, b: 2}\n" + "\n".join(f"m{n}: &m{n}\n  <<: [{', '.join([f'*m{n - 1}'] * 10)}]" for n in range(1, 12)),
        "[" * 100_000,
        "{a: " * 50_000,
        "- " * 1000 + "x",
        "a: " + "[1, " * 30 + "1" + "]" * 30,
        "a: &a [*a]",
        "a: &a\n  b: *a",
        "a: [" + "1," * 20_000 + "1]",
        "x: y\n" * 60_000,
    ],
    ids=["billion laughs", "merge bomb", "open lists", "open mappings", "sequence", "deep", "self", "self mapping", "long",
         "large"],
)  # fmt: skip
def test_bounded_in_memory(load, text):
    tracemalloc.start()
    try:
        with pytest.raises(LaunchError):
            load(text)
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


def test_deep_json(load):
    for text in ("[" * 200_000, '{"a": ' * 40_000, f'{{"fsdp_config": {"[" * 400}{"]" * 400}}}'):
        with pytest.raises(LaunchError, match="cannot be read|nested"):
            load(text, "a.json")
    with pytest.raises(LaunchError, match="more than 10000 values"):
        load(json.dumps({str(n): 0 for n in range(20_000)}), "a.json")


def test_many_unknown_keys_are_answered_quickly(load, place):
    from accelerate.launch import config_file

    load("\n".join(f"unknown_key_{n}: 1" for n in range(4_000)))
    with pytest.raises(LaunchError, match="And 3995 more"):
        config_file.read(place / "a.yaml")


def test_anchors_that_are_meant_well(load):
    assert load("a: &a {b: 1}\nc: *a\nd: {<<: *a, e: 2}").content["d"] == {"b": 1, "e": 2}


def test_what_windows_writes(load):
    assert load("a: b\r\n".encode("utf-8-sig")).content == {"a": "b"}
    assert load("a: b\r\n".encode("utf-16")).content == {"a": "b"}
    assert load(b"\xef\xbb\xbf" + json.dumps({"a": 1}).encode(), "a.json").content == {"a": 1}
    with pytest.raises(LaunchError, match="is no text"):
        load(b"\xff\xfea")


def test_json_knows_lines_and_repetitions(load):
    text = load('{\n "a": 1,\n "s": {\n  "b": 2},\n "a": 3}', "a.json")
    assert text.content == {"a": 3, "s": {"b": 2}}
    assert text.lines == {("a",): 2, ("s",): 3, ("s", "b"): 4}
    assert text.repeated == {("a",): (2, 5)}


def test_what_is_no_file(place):
    (place / "folder").mkdir()
    with pytest.raises(LaunchError, match="is a folder; name the file in it"):
        config_text.load(place / "folder")
    with pytest.raises(LaunchError, match="cannot be opened: No such file"):
        config_text.load(place / "nowhere")
    if hasattr(os, "mkfifo"):
        os.mkfifo(place / "pipe")
        with pytest.raises(LaunchError, match="is a pipe or a device"):
            config_text.load(place / "pipe")


def test_a_file_that_may_not_be_read(place, monkeypatch):
    (place / "a.yaml").write_text("a: 1")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(LaunchError, match=r"a.yaml cannot be opened: Permission denied\."):
        config_text.load(place / "a.yaml")
