"""Configuration files: where they are, what they hold, and what that means in terms of options."""

import os
import pathlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate.config.enums import ComputeEnvironment, SageMakerDistributedType
from accelerate.config.options import OPTIONS, SECTIONS, SWITCH_OF_DISTRIBUTED_TYPE, Option
from accelerate.launch import config_text
from accelerate.launch.errors import LaunchError

# Keys that mean something only to SageMaker: they are known here, and `SageMakerConfig` holds them.
SAGEMAKER_KEYS = frozenset(
    [
        "ec2_instance_type",
        "iam_role_name",
        "image_uri",
        "profile",
        "region",
        "base_job_name",
        "pytorch_version",
        "transformers_version",
        "py_version",
        "sagemaker_inputs_file",
        "sagemaker_metrics_file",
        "additional_args",
    ]
)
# What older releases wrote, and what it is called today.
_OLD_TYPES = {"TPU": "XLA", "MPS": "NO"}
_OLD_DYNAMO = {"AOT_CUDAGRAPHS": "CUDAGRAPHS"}
_OLD_SECTION_KEYS = {"fsdp_config": {"fsdp_backward_prefetch_policy": "fsdp_backward_prefetch"}}
# Sections of features that were given up, with what to say where one of them is on.
_GONE_SECTIONS = {
    "ipex_config": "the extension of Intel is no longer applied; current versions of torch carry its speedups themselves"
}
# One text in the table, but a list is what one would write in YAML.
_COMMA_LISTS = frozenset(["gpu_ids", "fsdp_transformer_layer_cls_to_wrap", "deepspeed_moe_layer_cls_names"])
# So many faults are no typing errors; looking for what was meant would take seconds.
_MANY = 50


@dataclass(frozen=True)
class FileSettings:
    """What a configuration file says.

    Attributes:
        path: the file.
        values: option name to value.
        unused: messages about keys that have no effect.
        lines: option name to the line that sets it, from 1.
    """

    path: pathlib.Path
    values: Mapping[str, Any]
    unused: tuple[str, ...] = ()
    lines: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """Something in a configuration file that is wrong.

    Attributes:
        text: what, and what to do about it.
        line: where, from 1; None where no line can be named.
        fatal: a launch refuses the file because of it; otherwise the key is merely without effect.
    """

    text: str
    line: int | None = None
    fatal: bool = True


@dataclass(frozen=True)
class Inspection:
    """A configuration file with everything that is wrong in it.

    Attributes:
        settings: what could be read.
        problems: what could not, in the order of the file.
        notes: what is right but worth a word: old spellings, keys that are no longer needed.
        content: the file in today's spelling.
    """

    settings: FileSettings
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    content: Mapping[str, Any]


def cache_dir(environ: Mapping[str, str] | None = None) -> str:
    """Return the directory of the default configuration file: `accelerate` in the cache of the Hugging Face libraries.

    Args:
        environ: the variables; those of the process by default. `HF_HOME` and `XDG_CACHE_HOME` are honoured.
    """
    environ = os.environ if environ is None else environ
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return os.path.join(os.path.expanduser(home), "accelerate")


def default_path(environ: Mapping[str, str] | None = None) -> str:
    """Return where the default configuration file is, or would be written.

    A JSON file counts only where there is no YAML file.

    Args:
        environ: as in `cache_dir`.
    """
    directory = cache_dir(environ)
    found = [os.path.join(directory, f"default_config.{ending}") for ending in ("yaml", "json")]
    return next((path for path in found if os.path.isfile(path)), found[0])


def find(given: str | None, environ: Mapping[str, str]) -> pathlib.Path | None:
    """Return the configuration file of a run: the one given, else the default one, else None.

    Args:
        given: the value of `--config_file`.
        environ: as in `cache_dir`.

    Raises:
        LaunchError: what was given is a folder, or no file that can be read twice.
        FileNotFoundError: a file was given that does not exist.
    """
    path = pathlib.Path(default_path(environ) if given is None else given)
    if path.is_file():
        return path
    if given is None:
        return None
    if path.is_dir():
        inside = path / "default_config.yaml"
        hint = f"did you mean {inside}?" if inside.is_file() else "name the file in it."
        raise LaunchError(f"--config_file is {given!r}: that is a folder; {hint}")
    if path.exists():
        raise LaunchError(f"--config_file is {given!r}: that is a pipe or a device; it must be a file.")
    raise FileNotFoundError(
        f"--config_file is {given!r}: there is no such file. Write one with `accelerate config default --config_file "
        f"{given}`, or leave the option out."
    )


def load_mapping(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a configuration file as it stands.

    Args:
        path: a YAML file, or a JSON file by its ending (YAML readers accept JSON too).

    Raises:
        LaunchError: it is no mapping, or not readable as what it claims to be.
    """
    return config_text.load(path).content


def modernise(content: Mapping[str, Any], notes: list[str] | None = None) -> dict[str, Any]:
    """Return the content of a configuration file with old spellings replaced by today's.

    Args:
        content: what the file holds; it stays as it is.
        notes: receives a line for each thing that was replaced or given up.
    """
    new = dict(content)
    said = [] if notes is None else notes
    if "fp16" in new:
        half = new.pop("fp16")
        new.setdefault("mixed_precision", "fp16" if half and str(half).lower() not in ("no", "false") else "no")
        said.append("fp16 is now mixed_precision: fp16.")
    if "dynamo_backend" in new:
        backend = new.pop("dynamo_backend")
        new["dynamo_config"] = {} if backend in (None, "NO", "no", False) else {"dynamo_backend": backend}
        if new["dynamo_config"]:
            said.append("dynamo_backend is now a key of dynamo_config.")
    for key, word in (("mixed_precision", "no"), ("distributed_type", "NO")):
        if new.get(key) is False:  # what YAML 1.1 makes of an unquoted `no`
            new[key] = word
    kind = new.get("distributed_type")
    if isinstance(kind, str) and kind in _OLD_TYPES:
        new["distributed_type"] = _OLD_TYPES[kind]
        said.append(f"distributed_type: {kind} is now {_OLD_TYPES[kind]}.")
    for section, reason in _GONE_SECTIONS.items():
        gone = new.pop(section, None)
        if isinstance(gone, dict) and any(gone.values()):
            said.append(f"{section} has no effect: {reason}.")
    for section, names in _OLD_SECTION_KEYS.items():
        if isinstance(new.get(section), dict) and not names.keys().isdisjoint(new[section]):
            new[section] = {names.get(key, key): value for key, value in new[section].items()}
            said += [f"{section}.{old} is now {name}." for old, name in names.items() if old in content[section]]
    dynamo = new.get("dynamo_config")
    if isinstance(dynamo, dict) and str(dynamo.get("dynamo_backend")).upper() in _OLD_DYNAMO:
        new["dynamo_config"] = {**dynamo, "dynamo_backend": _OLD_DYNAMO[str(dynamo["dynamo_backend"]).upper()]}
    return new


def full_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a configuration file with the keys of its sections spelled as they are written today.

    Args:
        content: what the file holds; it stays as it is. Unknown keys are kept.
    """
    new = dict(content)
    for section in SECTIONS:
        if isinstance(new.get(section), dict):
            found = ((of_section(section, key), key, value) for key, value in new[section].items())
            new[section] = {option.file_key if option else key: value for option, key, value in found}
    return new


def read(path: pathlib.Path) -> FileSettings:
    """Read a configuration file in terms of options.

    Args:
        path: the file.

    Raises:
        LaunchError: a key at the top level is unknown, a value is not one of its option's, or the file is not readable.
    """
    found = inspect(path)
    fatal = [problem for problem in found.problems if problem.fatal]
    if fatal:
        said = [f"line {problem.line}: {problem.text}" if problem.line else problem.text for problem in fatal]
        more = f" And {len(said) - 5} more; `accelerate config validate {path}` lists all." if said[5:] else ""
        raise LaunchError(f"The configuration file {path} is not accepted: {' '.join(said[:5])}{more}")
    return found.settings


def inspect(path: pathlib.Path) -> Inspection:
    """Read a configuration file in terms of options, and go on where something is wrong.

    Args:
        path: the file.

    Raises:
        LaunchError: the file is not readable at all, as in `load_mapping`.
    """
    reader = _Reader(config_text.load(path), path)
    reader.read()
    return reader.result()


class _Reader:
    """One file on its way to options."""

    def __init__(self, text: config_text.Text, path: pathlib.Path) -> None:
        self.path = path
        self.text = text
        self.notes: list[str] = []
        self.content = modernise(text.content, self.notes)
        self.values: dict[str, Any] = {}
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []
        self.sagemaker = self.content.get("compute_environment") == ComputeEnvironment.AMAZON_SAGEMAKER.value

    def add(self, text: str, *key: str, fatal: bool = True) -> None:
        self.problems.append(Problem(text, self.line(*key), fatal))

    def line(self, *key: str) -> int | None:
        lines = self.text.lines
        if key in lines or not key:
            return lines.get(key)
        old = next((old for old, new in _OLD_SECTION_KEYS.get(key[0], {}).items() if new == key[-1]), None)
        if old is not None:
            return lines.get((key[0], old))
        return lines.get(("dynamo_backend",)) if key[0] == "dynamo_config" else None

    def read(self) -> None:
        for key, raw in self.content.items():
            name = str(key)
            if key in SECTIONS:
                self.section(name, raw)
            elif key == "distributed_type":
                self.kind(raw)
            elif key == "compute_environment":
                self.environment(raw)
            elif key in TOP_LEVEL:
                self.value(TOP_LEVEL[key], raw, name)
            elif key not in SAGEMAKER_KEYS:
                known = known_keys(self.sagemaker)
                many = len(self.problems) > _MANY
                self.add(f"{_name(name)} is unknown." if many else unknown_key(name, known), name)
        for key, where in self.text.repeated.items():
            lines = " and ".join(map(str, where))
            self.problems.append(
                Problem(
                    f"{'.'.join(key)} stands there {len(where)} times, in lines {lines}; keep one.", where[-1], False
                )
            )

    def environment(self, raw: Any) -> None:
        if raw is None or raw in list(ComputeEnvironment.__members__):
            self.store("compute_environment", raw, "compute_environment")
        else:  # other readers of such files insist on capitals
            known = ", ".join(ComputeEnvironment.__members__)
            self.add(f"compute_environment is {_shown(raw)}; choose one of {known}.", "compute_environment")

    def kind(self, raw: Any) -> None:
        known = SageMakerDistributedType.__members__ if self.sagemaker else SWITCH_OF_DISTRIBUTED_TYPE
        if not isinstance(raw, str) or raw not in known:
            self.add(f"distributed_type is {_shown(raw)}; choose one of {', '.join(known)}.", "distributed_type")
        elif not self.sagemaker and (switch := SWITCH_OF_DISTRIBUTED_TYPE[raw]):
            self.store(switch, True, "distributed_type")
        elif raw == "NO" and not self.sagemaker and "num_processes" not in self.content:
            self.store("num_processes", 1, "distributed_type")

    def section(self, section: str, raw: Any) -> None:
        if raw is None:
            return
        if not isinstance(raw, dict):
            self.add(f"{section} is {_shown(raw)}; it must hold keys and values.", section)
            return
        before = len(self.values)
        for key, content in raw.items():
            option = of_section(section, key)
            if option is not None:
                self.value(option, content, section, str(key))
            else:
                known = [option.file_key for option in OPTIONS if option.section == section and option.file_key]
                near = None if len(self.problems) > _MANY else nearest(str(key), known)
                self.add(
                    f"{section}.{_name(key)} is unknown and has no effect{f'; did you mean {near}?' if near else '.'}",
                    section,
                    str(key),
                    fatal=False,
                )
        if section == "parallelism_config" and len(self.values) > before:
            self.values["use_parallelism_config"] = True

    def value(self, option: Option, raw: Any, *key: str) -> None:
        source = ".".join(key)
        if isinstance(raw, list) and option.name in _COMMA_LISTS and not any(isinstance(x, (list, dict)) for x in raw):
            raw = ",".join(map(str, raw))
        listed = option.type in ("strs", "bools")
        if isinstance(raw, (list, dict)) and (not listed or isinstance(raw, dict)):
            self.add(f"{source} is {_shown(raw)}; it must be a {'list' if listed else 'single value'}.", *key)
            return
        inner = next((x for x in raw if isinstance(x, (list, dict))), None) if isinstance(raw, list) else None
        if inner is not None:
            self.add(f"{source} holds {_shown(inner)}; it must be a list of single values.", *key)
            return
        if isinstance(raw, bool) and option.type in ("int", "float"):
            self.add(f"{source} is {str(raw).lower()}; it must be a number.", *key)
            return
        try:
            value = option.parse(raw, source)
        except (ValueError, OverflowError) as error:  # a number such as .inf overflows
            self.add(_cut(str(error)), *key)
            return
        if option.name == "num_processes" and value is not None and value < 1:
            if value == 0:
                self.add("num_processes is 0; it must be at least 1, or -1 for as many as there are devices.", *key)
            return  # -1 is how such files say "not set"
        self.store(option.name, value, *key)

    def store(self, name: str, value: Any, *key: str) -> None:
        if value is None:
            return
        self.values[name] = value
        if (line := self.line(*key)) is not None:
            self.lines[name] = line

    def result(self) -> Inspection:
        problems = sorted(self.problems, key=lambda problem: problem.line or 0)
        unused = [f"{problem.text} (in {self.path})" for problem in problems if not problem.fatal]
        gone = [note for note in self.notes if "no effect" in note]
        unused += [f"{note} (in {self.path})" for note in gone]
        settings = FileSettings(self.path, self.values, tuple(unused), self.lines)
        return Inspection(settings, tuple(problems), tuple(self.notes), self.content)


TOP_LEVEL: dict[str, Option] = {
    option.file_key: option for option in OPTIONS if option.section is None and option.file_key
}


def known_keys(sagemaker: bool = False) -> list[str]:
    """Return the keys that a file may have at its top level.

    Args:
        sagemaker: those of a file for SageMaker too.
    """
    return sorted({*TOP_LEVEL, "distributed_type", *SECTIONS, *(SAGEMAKER_KEYS if sagemaker else ())})


def of_section(section: str, key: Any) -> Option | None:
    """Return the option that a key of a section sets; the prefix of the section may be left out.

    Args:
        section: a key of `accelerate.config.options.SECTIONS`.
        key: as written in the file.

    Example:
        >>> of_section("fsdp_config", "offload_params").name
        'fsdp_offload_params'
    """
    options = [option for option in OPTIONS if option.section == section and option.file_key]
    by_key = {option.name: option for option in options} | {option.file_key: option for option in options}
    prefixes = ("", section.removesuffix("config"), f"{section}_")
    return next((by_key[prefix + str(key)] for prefix in prefixes if prefix + str(key) in by_key), None)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that this one was probably meant to be, or None.

    Args:
        word: as written.
        known: the words that exist.
    """
    import difflib  # only for those who mistyped

    return next(iter(difflib.get_close_matches(word[:100], list(known), n=1, cutoff=0.7)), None)


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return a sentence about an unknown key, with the nearest known one.

    Args:
        key: as written.
        known: the keys that exist.
    """
    known = list(known)
    near = nearest(key, known)
    if near:
        return f"{_name(key)} is unknown; did you mean {near}?"
    options = [option for option in OPTIONS if option.section and option.file_key == key]
    if options:
        return f"{_name(key)} belongs under {options[0].section}."
    if any(option.name == key and option.spellings for option in OPTIONS):
        return f"{_name(key)} is an option of `accelerate launch` alone; a file cannot set it. Write --{key} instead."
    return f"{_name(key)} is unknown. Correct or remove it; known are {', '.join(known)}."


def _name(key: Any) -> str:
    # A key may hold escape sequences for the terminal.
    text = str(key)[:100]
    return text if text.isidentifier() else repr(text)


def _shown(raw: Any) -> str:
    return _cut(repr(raw), 80)


def _cut(text: str, most: int = 400) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
