"""Configuration files: where they are, what they hold, and what that means in terms of options.

`inspect` compares a file with the option table and finds everything that is wrong; a launch (`read`), `accelerate config show`,
`validate` and `update` all use it. A file may come from anywhere: its size and the number of its aliases are bounded before PyYAML's
safe loader builds anything.
"""

import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from accelerate.config.options import (
    FEATURES,
    MODERNISERS,
    OPTIONS,
    SECTIONS,
    SWITCH_OF_DISTRIBUTED_TYPE,
    Feature,
    Option,
)
from accelerate.launch.errors import LaunchError

Key = tuple[str, ...]

# Real files have fewer than 100 lines; this leaves room for long lists of commands.
LARGEST_FILE = 64 * 1024
MOST_ALIASES = 10
TOP_LEVEL = {option.file_key: option for option in OPTIONS if option.section is None and option.file_key}
# Keys of today's files that extensions read; the interview writes many of them into every file. Where an extension is deleted, they
# have no effect, and a value that asks for nothing is no problem.
_OF_EXTENSIONS = frozenset(
    (
        *("enable_cpu_affinity", "main_training_function", "downcast_bf16", "command_file", "commands"),
        *("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env"),
        *("deepspeed_config", "megatron_lm_config", "fp8_config", "mpirun_config"),
    )
)
_ASKS_FOR_NOTHING = (None, False, "no", "main", {}, [])


@dataclass(frozen=True)
class Problem:
    """Something wrong in a configuration file; a launch refuses the file only if it is `fatal`."""

    text: str
    line: int | None = None
    fatal: bool = True


def cache_dir(environ: Mapping[str, str] | None = None) -> str:
    """Return the directory of the default configuration file; `HF_HOME` and `XDG_CACHE_HOME` are honoured."""
    environ = os.environ if environ is None else environ
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return os.path.join(os.path.expanduser(home), "accelerate")


def default_path(environ: Mapping[str, str] | None = None) -> str:
    """Return where the default configuration file is, or would be written; JSON counts only where there is no YAML."""
    found = [os.path.join(cache_dir(environ), f"default_config.{ending}") for ending in ("yaml", "json")]
    return next((path for path in found if os.path.isfile(path)), found[0])


def find(given: str | os.PathLike[str] | None, environ: Mapping[str, str] | None = None) -> pathlib.Path | None:
    """Return the configuration file of a run: the one given, which has to exist, else the default one, else None."""
    path = default_path(environ) if given is None else given
    if os.path.exists(path) and not os.path.isdir(path):
        return pathlib.Path(path)
    if given is None:
        return None
    raise FileNotFoundError(f"--config_file is {str(path)!r}: there is no such file; `accelerate config` writes it.")


def load_mapping(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a YAML file, or a JSON file by its ending, unchanged; a LaunchError if it is no mapping."""
    return _load(path)[0]


def _load(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[Key, int]]:
    """Return the content of a file, and the line of each key; keys of a section are `(section, key)`. JSON has no lines."""
    import yaml  # most launches have no file

    class Loader(yaml.SafeLoader):
        """Counts aliases, each of which can double what the file stands for."""

        aliases = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.aliases += self.check_event(yaml.AliasEvent)
            if self.aliases > MOST_ALIASES:
                raise LaunchError(f"it holds more than {MOST_ALIASES} aliases.")
            return super().compose_node(parent, index)

    path = pathlib.Path(path)
    lines: dict[Key, int] = {}
    try:
        with open(path, "rb") as stream:
            data = stream.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise LaunchError(f"it has more than {LARGEST_FILE // 1024} KiB, and is hardly a configuration.")
        if path.suffix == ".json":
            content = json.loads(data, object_pairs_hook=partial(_without_duplicates, data))
        else:
            loader = Loader(data)
            node = loader.get_single_node()
            _refuse_duplicates(node)
            content = node and loader.construct_document(node)
            json.dumps(content, default=str, skipkeys=True)  # refuses what contains itself
            lines = dict(_keys(node, ())) if isinstance(content, dict) else {}
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
        said = ", ".join(text for text in (error.context, error.problem) if text)
        raise LaunchError(f"The configuration file {path} cannot be read: {where}: {said}") from error
    # A hostile file can make a reader fail in any way, RecursionError and OverflowError among them.
    except Exception as error:
        said = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())[:300]
        raise LaunchError(f"The configuration file {path} cannot be read: {said or type(error).__name__}") from error
    if not isinstance(content, dict):
        found = "is empty" if content is None else f"holds a {type(content).__name__}, not keys and values"
        raise LaunchError(f"The configuration file {path} {found}. `accelerate config` writes one.")
    return content, lines


def _without_duplicates(data: bytes, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; a LaunchError for a key that it has twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        texts = enumerate(data.decode(errors="replace").splitlines(), 1)
        lines = ", ".join(str(number) for number, text in texts if json.dumps(twice) in text)
        raise LaunchError(f"the key {twice!r} is there twice (lines with it: {lines}). Remove one of them.")
    return content


def _refuse_duplicates(node: Any) -> None:
    """Raise a LaunchError for a key that a YAML mapping has twice."""
    left, seen = [node], set()
    while left:
        node = left.pop()
        if node is None or id(node) in seen or node.id not in ("mapping", "sequence"):
            continue
        seen.add(id(node))  # aliases share nodes
        if node.id == "sequence":
            left += node.value
            continue
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            # A merge may be there several times.
            if key.id == "scalar" and key.value != "<<" and lines.setdefault(key.value, line) != line:
                raise LaunchError(
                    f"the key {key.value!r} is in line {lines[key.value]} and in line {line}. Remove one of them."
                )
            left.append(value)


def _keys(mapping: Any, section: Key) -> Iterator[tuple[Key, int]]:
    """Yield the keys of a YAML mapping and of its sections, with their lines."""
    for key, value in mapping.value:
        name = str(key.value)
        if name != "<<":
            yield (*section, name), key.start_mark.line + 1
        if value.id == "mapping" and not section:
            yield from _keys(value, (name,))


def modernise(content: Mapping[str, Any], notes: list[str] | None = None) -> dict[str, Any]:
    """Return the content of a file with old spellings replaced by today's; `notes` receives a line for each."""
    new = dict(content)
    for key, word in (("mixed_precision", "no"), ("distributed_type", "NO")):
        if new.get(key) is False:  # what YAML 1.1 makes of an unquoted `no`
            new[key] = word
    for replace in MODERNISERS:
        replace(new, [] if notes is None else notes)
    return new


def read(path: pathlib.Path) -> "FileSettings":
    """Read a configuration file in terms of options; a LaunchError names what a launch refuses."""
    found = inspect(path)
    fatal = [problem for problem in found.problems if problem.fatal]
    if fatal:
        said = [f"line {problem.line}: {problem.text}" if problem.line else problem.text for problem in fatal[:5]]
        if len(fatal) > 5:
            said.append(f"And {len(fatal) - 5} more; `accelerate config validate {path}` lists all.")
        raise LaunchError(f"The configuration file {path} is not accepted: {' '.join(said)}")
    return found


def inspect(path: pathlib.Path) -> "FileSettings":
    """Compare a configuration file with the option table, and continue where something is wrong."""
    content, lines = _load(path)
    notes: list[str] = []
    found = FileSettings(path, modernise(content, notes), notes, lines)
    found.top_level()
    found.problems.sort(key=lambda problem: problem.line or 0)
    return found


@dataclass
class FileSettings:
    """What a configuration file says in terms of options, and everything that is wrong in it.

    Attributes:
        content: the file in today's spelling.
        notes: what is right but worth a word: old spellings, keys that are no longer needed.
        lines_of_keys: the lines of the keys of the file, from 1.
        values: option name to value.
        lines: option name to the line that sets it; None where no line can be named.
        problems: in the order of their lines.
    """

    path: pathlib.Path
    content: dict[str, Any]
    notes: list[str]
    lines_of_keys: Mapping[Key, int]
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int | None] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def unused(self) -> tuple[str, ...]:
        """Messages about keys that have no effect."""
        unused = [problem.text for problem in self.problems if not problem.fatal]
        unused += [note for note in self.notes if "no effect" in note]
        return tuple(f"{text} (in {self.path})" for text in unused)

    @property
    def elsewhere(self) -> Feature | None:
        """The feature that runs what the file describes on other machines than your own; None if there is none."""
        place = self.content.get("compute_environment")
        return next((feature for feature in elsewhere() if feature.wanted == place), None)

    def top_level(self) -> None:
        """Read all keys."""
        for key, raw in self.content.items():
            if key in SECTIONS:
                self.section(key, raw)
            elif key == "distributed_type":
                self.distributed_type(raw)
            elif key in TOP_LEVEL:
                self.value(TOP_LEVEL[key], raw, key)
            elif key in _OF_EXTENSIONS:
                if raw not in _ASKS_FOR_NOTHING:
                    self.add(f"{key} has no effect: the extension that reads it is not installed.", key, fatal=False)
            elif not any(key in feature.keys for feature in elsewhere()):
                self.add(unknown_key(key, known_keys(self.elsewhere)), str(key))

    def distributed_type(self, raw: Any) -> None:
        """Read the key of this name, which turns a switch on."""
        known: Iterable[str] = SWITCH_OF_DISTRIBUTED_TYPE
        if self.elsewhere:
            known = self.elsewhere.words
        if not isinstance(raw, str) or raw not in known:
            self.add(f"distributed_type is {raw!r:.80}; choose one of {', '.join(known)}.", "distributed_type")
        elif self.elsewhere:
            return
        elif switch := SWITCH_OF_DISTRIBUTED_TYPE[raw]:
            self.set(switch, True, "distributed_type")
        elif raw == "NO" and "num_processes" not in self.content:
            self.set("num_processes", 1, "distributed_type")

    def section(self, section: str, raw: Any) -> None:
        """Read the keys of a section."""
        if raw is not None and not isinstance(raw, dict):
            self.add(f"{section} is {raw!r:.80}; it must hold keys and values.", section)
            return
        before = len(self.values)
        today = self.content[section] = {}
        for key, value in (raw or {}).items():
            option = of_section(section, key)
            today[option.file_key if option else key] = value
            if option:
                self.value(option, value, section, str(key))
                continue
            near = nearest(str(key), [option.file_key for option in _options_of(section)])
            hint = f"; did you mean {near}?" if near else "."
            self.add(f"{section}.{_name(key)} is unknown and has no effect{hint}", section, str(key), fatal=False)
        if section == "parallelism_config" and len(self.values) > before:
            self.values["use_parallelism_config"] = True

    def value(self, option: Option, raw: Any, *key: str) -> None:
        """Read the value of an option, or note what is wrong with it."""
        source = ".".join(key)
        try:
            value = _parsed(option, raw, source)
        except ValueError as error:
            self.add(str(error)[:400], *key)
            return
        if fault := option.fault(value):
            self.add(f"{source} is {value}; {fault}.", *key)
        elif value is not None:
            self.set(option.name, value, *key)

    def set(self, name: str, value: Any, *key: str) -> None:
        """Keep the value of an option, and the line of its key."""
        self.values[name], self.lines[name] = value, self.lines_of_keys.get(key)

    def add(self, text: str, *key: str, fatal: bool = True) -> None:
        """Note a problem at the line of its key."""
        self.problems.append(Problem(text, self.lines_of_keys.get(key), fatal))


def _parsed(option: Option, raw: Any, source: str) -> Any:
    """Return what YAML made of a value as the option's value; a ValueError says what is wrong with it."""
    is_list = option.type in ("strs", "bools")
    flat = isinstance(raw, list) and not any(isinstance(item, (list, dict)) for item in raw)
    if flat and option.type == "str":  # one text in the table, but a list is what one would write in YAML
        raw = ",".join(map(str, raw))
    if isinstance(raw, (list, dict)) and not (flat and is_list) and option.type != "json":
        wanted = "a list of single values" if is_list else "a single value"
        raise ValueError(f"{source} is {raw!r:.80}; it must be {wanted}.")
    if isinstance(raw, bool) and option.type in ("int", "float"):
        raise ValueError(f"{source} is {str(raw).lower()}; it must be a number.")
    return option.parse(raw, source)


def elsewhere() -> list[Feature]:
    """Return the features that run a script on other machines than your own."""
    return [feature for feature in FEATURES.values() if feature.switch == "compute_environment"]


def known_keys(feature: Feature | None = None) -> list[str]:
    """Return the keys that a file, or one for a feature that is elsewhere, may have at its top level."""
    return sorted({*TOP_LEVEL, "distributed_type", *SECTIONS, *(feature.keys if feature else ())})


def _options_of(section: str) -> list[Option]:
    return [option for option in OPTIONS if option.section == section and option.file_key]


def of_section(section: str, key: Any) -> Option | None:
    """Return the option that a key of a section sets; the prefix of the section may be omitted."""
    words = [prefix + str(key) for prefix in ("", section.removesuffix("config"), f"{section}_")]
    return next((option for option in _options_of(section) if {option.name, option.file_key} & {*words}), None)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that this one was probably meant to be, or None."""
    import difflib  # only for mistyped words

    word = word.replace("numa_affinity", "enable_cpu_affinity")  # which was removed
    return next(iter(difflib.get_close_matches(word[:100], list(known), n=1, cutoff=0.7)), None)


def unknown_key(key: Any, known: Iterable[str]) -> str:
    """Return a sentence about an unknown key, with the nearest known one."""
    known = list(known)
    name = _name(key)
    if near := nearest(str(key), known):
        return f"{name} is unknown; did you mean {near}?"
    for option in OPTIONS:
        if option.section and option.file_key == key:
            return f"{name} belongs under {option.section}."
        if option.name == key and option.spellings:
            return f"{name} is an option of `accelerate launch` alone; a file cannot set it. Write --{key} instead."
    return f"{name} is unknown. Correct or remove it; known are {', '.join(known)}."


def _name(key: Any) -> str:
    """Return a key as it may be printed: it can hold escape sequences for the terminal."""
    text = str(key)[:100]
    return text if text.isidentifier() else repr(text)
