"""From the bytes of a configuration file to keys, values and line numbers, within bounds.

A file may come from anywhere, so nothing in it builds objects, fills the memory or keeps the reader busy: PyYAML's safe loader reads
it, and counts its values before it builds them. JSON is read by `json`, and by the same loader for its line numbers.
"""

import json
import os
import pathlib
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from accelerate.launch.config_file import is_a_folder
from accelerate.launch.errors import LaunchError

# Real files have fewer than 100 lines; these leave room for long lists of commands.
LARGEST_FILE = 256 * 1024
MOST_VALUES = 10_000
DEEPEST = 20

Key = tuple[str, ...]


@dataclass(frozen=True)
class Text:
    """What a configuration file says, and where.

    Attributes:
        content: keys and values; the last of several equal keys counts, as in any YAML reader.
        lines: the lines, from 1, of each key; keys of a section are `(section, key)`.
    """

    content: dict[str, Any]
    lines: Mapping[Key, Sequence[int]]


def load(path: str | os.PathLike[str]) -> Text:
    """Read a configuration file as it stands: JSON if its name ends so, else YAML.

    Args:
        path: the file; UTF-8, or UTF-16 with its mark, as some Windows programs write it.

    Raises:
        LaunchError: it is a folder, empty, no text, too large, no YAML or JSON, or holds something else than keys and values.
    """
    text = _text(pathlib.Path(path))
    is_json = str(path).endswith(".json")
    readable = text
    if is_json:  # YAML has all of JSON but tabs between the values, and some invisible characters within them
        readable = "".join(letter if letter.isprintable() or letter in "\r\n" else " " for letter in text)
    try:
        loader = _BoundedLoader(readable)
        node = loader.get_single_node()
        if node is not None:
            content = json.loads(text) if is_json else loader.construct_document(node)
    except LaunchError as error:
        raise LaunchError(f"The configuration file {path} is not accepted: {error}") from None
    # A hostile file can make a reader fail in any way, RecursionError and OverflowError among them.
    except Exception as error:
        raise LaunchError(f"The configuration file {path} cannot be read: {_short(error)}") from error
    if node is None:
        raise LaunchError(
            f"The configuration file {path} is empty. Write it with `accelerate config --config_file {path}`, or remove it: "
            "`accelerate launch` needs no file."
        )
    if not isinstance(content, dict):
        raise LaunchError(
            f"The configuration file {path} holds {_kind(content)}; it must hold keys and values, such as "
            "`num_processes: 2`."
        )
    lines: dict[Key, list[int]] = defaultdict(list)
    for key, line in _keys(node, ()):
        lines[key].append(line)
    return Text(content, dict(lines))


def _text(path: pathlib.Path) -> str:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise LaunchError(is_a_folder(path))
        if not stat.S_ISREG(mode):  # a pipe would wait for its writer, and could be read once only
            raise LaunchError(f"The configuration file {path} is a pipe or a device; it must be a file.")
        with open(path, "rb") as stream:
            data = stream.read(LARGEST_FILE + 1)
    except OSError as error:
        raise LaunchError(f"The configuration file {path} cannot be opened: {error.strerror or error}.") from None
    if len(data) > LARGEST_FILE:
        raise LaunchError(
            f"The configuration file {path} has more than {LARGEST_FILE // 1024} KiB; it is hardly a configuration."
        )
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        name = encoding.removesuffix("-sig").upper()
        raise LaunchError(f"The configuration file {path} is no text: byte {error.start} is not {name}.") from None


class _BoundedLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which refuses what is deep or large before it goes on with it.

    An alias counts as everything that it stands for: ten lines of aliases of aliases can stand for a billion values.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = 0
        self._depth = 0
        self._sizes: dict[str, int | None] = {}  # by anchor; None while what it names is not yet complete

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        place = f"in line {event.start_mark.line + 1}, "
        before = self._values
        self._depth += 1
        if self._depth > DEEPEST and isinstance(event, yaml.CollectionStartEvent):
            raise LaunchError(f"{place}it is nested more than {DEEPEST} levels deep.")
        if isinstance(event, yaml.AliasEvent):
            size = self._sizes.get(event.anchor, 1)
            if size is None:
                raise LaunchError(f"{place}{event.anchor} contains itself.")
            self._values += size
        else:
            self._values += 1
            self._sizes[event.anchor] = None
        if self._values > MOST_VALUES:
            raise LaunchError(f"it holds more than {MOST_VALUES} values, or aliases that stand for so many.")
        node = super().compose_node(parent, index)
        self._sizes[event.anchor] = self._values - before
        self._depth -= 1
        return node


def _keys(mapping: yaml.MappingNode, section: Key) -> Iterator[tuple[Key, int]]:
    for key, value in mapping.value:
        name = str(key.value) if isinstance(key, yaml.ScalarNode) else key.id
        if name == "<<":
            continue
        yield (*section, name), key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode) and not section:
            yield from _keys(value, (name,))


def _short(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        said = ", ".join(text for text in (error.context, error.problem) if text)
        return f"line {mark.line + 1}, column {mark.column + 1}: {said}"
    return " ".join(str(error).split())[:300] or type(error).__name__


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "a truth value"}
    return names.get(type(value), type(value).__name__)
