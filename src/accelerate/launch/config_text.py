"""From the bytes of a configuration file to keys, values and line numbers, within bounds.

A file may come from anywhere, so nothing in it can build objects, fill the memory or keep the reader busy: YAML is loaded in
its safe form, after a first pass over its parts has counted them.
"""

import json
import os
import pathlib
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate.launch.errors import LaunchError

# Real files have fewer than 100 lines; these leave room for long lists of commands.
LARGEST_FILE = 256 * 1024
MOST_VALUES = 10_000
DEEPEST = 20
_FEW = 1000

Key = tuple[str, ...]


@dataclass(frozen=True)
class Text:
    """What a configuration file says, and where.

    Attributes:
        content: keys and values.
        lines: the line, from 1, of each key; keys of a section are `(section, key)`.
        repeated: keys that stand there more than once, with the lines; the last one counts, as in any YAML reader.
    """

    content: dict[str, Any]
    lines: Mapping[Key, int] = field(default_factory=dict)
    repeated: Mapping[Key, tuple[int, ...]] = field(default_factory=dict)


def load(path: str | os.PathLike[str]) -> Text:
    """Read a configuration file as it stands: JSON if its name ends so, else YAML.

    Args:
        path: the file; UTF-8, or UTF-16 with its mark, as some Windows programs write it.

    Raises:
        LaunchError: it is a folder, empty, no text, too large, no YAML or JSON, or holds something else than keys and values.
    """
    text = _text(pathlib.Path(path))
    if not text.strip():
        raise LaunchError(
            f"The configuration file {path} is empty. Write it with `accelerate config --config_file {path}`, or remove it: "
            "`accelerate launch` needs no file."
        )
    try:
        found = _json(text) if str(path).endswith(".json") else _yaml(text)
    except LaunchError as error:
        raise LaunchError(f"The configuration file {path} is not accepted: {error}") from None
    # A hostile file can make a reader fail in any way, RecursionError and OverflowError among them.
    except Exception as error:
        raise LaunchError(f"The configuration file {path} cannot be read: {_short(error)}") from error
    if found is None:
        raise LaunchError(f"The configuration file {path} is empty: it holds nothing but comments.")
    if not isinstance(found.content, dict):
        raise LaunchError(
            f"The configuration file {path} holds {_kind(found.content)}; it must hold keys and values, such as "
            "`num_processes: 2`."
        )
    return found


def _text(path: pathlib.Path) -> str:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise LaunchError(f"The configuration file {path} is a folder; name the file in it.")
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
        raise LaunchError(
            f"The configuration file {path} is no text: byte {error.start} is not {encoding[:6].upper().rstrip('-')}."
        ) from None


def _json(text: str) -> Text:
    repeated: dict[Key, tuple[int, ...]] = {}

    def lines_of(key: str) -> tuple[int, ...]:
        found = re.finditer(re.escape(json.dumps(key, ensure_ascii=False)) + r"\s*:", text)
        return tuple(text.count("\n", 0, match.start()) + 1 for match in found)

    def merged(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            for key in content:
                if sum(key == other for other, _ in pairs) > 1:
                    repeated[(key,)] = lines_of(key)
        return content

    content = json.loads(text, object_pairs_hook=merged)
    if _values(content) > _FEW:  # each key is looked for in the whole text
        return Text(content, {}, repeated)
    lines: dict[Key, int] = {}
    for key, value in content.items() if isinstance(content, dict) else ():
        for path in [(key,), *((key, inner) for inner in (value if isinstance(value, dict) else ()))]:
            lines.setdefault(path, next(iter(lines_of(path[-1])), 1))
    return Text(content, lines, repeated)


def _values(content: Any) -> int:
    """Count the values of JSON, which has no aliases; refuse what is too deep or too much."""
    total, level = 0, [content]
    for _ in range(DEEPEST + 1):
        total += len(level)
        inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list)))
        level = [value for values in inner for value in values]
    if level:
        raise LaunchError(f"it is nested more than {DEEPEST} levels deep.")
    if total > MOST_VALUES:
        raise LaunchError(f"it holds more than {MOST_VALUES} values.")
    return total


def _yaml(text: str) -> Text | None:
    import yaml  # not for commands that read no file

    _count(yaml.parse(text, Loader=yaml.SafeLoader))
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        lines: dict[Key, int] = {}
        repeated: dict[Key, list[int]] = {}
        if isinstance(node, yaml.MappingNode):
            for path, line in _keys(node, ()):
                if path in lines:
                    repeated.setdefault(path, [lines[path]]).append(line)
                lines[path] = line
        content = loader.construct_document(node)
    finally:
        loader.dispose()
    return Text(content, lines, {path: tuple(where) for path, where in repeated.items()})


def _keys(node: Any, above: Key) -> Iterator[tuple[Key, int]]:
    import yaml

    for key, value in node.value:
        path = (*above, str(key.value) if isinstance(key, yaml.ScalarNode) else _kind(key))
        if path[-1] == "<<":
            continue
        yield path, key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode) and not above:
            yield from _keys(value, path)


def _count(events: Iterator[Any]) -> None:
    """Refuse what would be deep or large once it is built, before anything is built.

    An alias counts as everything that it stands for: ten lines of aliases of aliases can stand for a billion values.
    """
    import yaml

    total, documents = 0, 0
    open_anchors: list[tuple[str | None, int]] = []
    sizes: dict[str, int] = {}
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise LaunchError("it holds several documents, separated by `---`; keep one.")
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in open_anchors):
                raise LaunchError(f"in line {event.start_mark.line + 1}, {event.anchor} contains itself.")
            total += sizes.get(event.anchor, 1)
        elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            open_anchors.append((event.anchor, total))
            total += 1
            if len(open_anchors) > DEEPEST:
                raise LaunchError(
                    f"in line {event.start_mark.line + 1}, it is nested more than {DEEPEST} levels deep."
                )
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            anchor, before = open_anchors.pop()
            if anchor:
                sizes[anchor] = total - before
        elif isinstance(event, yaml.ScalarEvent):
            total += 1
            if event.anchor:
                sizes[event.anchor] = 1
        if total > MOST_VALUES:
            raise LaunchError(f"it holds more than {MOST_VALUES} values, or aliases that stand for so many.")


def _short(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem or error.context or 'no YAML'}"
    return " ".join(str(error).split())[:300] or type(error).__name__


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "a truth value"}
    return names.get(type(value), type(value).__name__)
