"""Configuration files: where they are, what they hold, and what that means in terms of options."""

import json
import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate.config.options import BY_NAME, OPTIONS, SECTIONS, SWITCH_OF_DISTRIBUTED_TYPE
from accelerate.launch.errors import LaunchError

# Keys that mean something only to SageMaker, whose runner does not exist yet: they are known, and never reach a run.
_SAGEMAKER_KEYS = frozenset(
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


@dataclass(frozen=True)
class FileSettings:
    """What a configuration file says.

    Attributes:
        path: the file.
        values: option name to value.
        unused: messages about keys that have no effect.
    """

    path: pathlib.Path
    values: Mapping[str, Any]
    unused: tuple[str, ...] = ()


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
        FileNotFoundError: a file was given that does not exist.
    """
    path = pathlib.Path(default_path(environ) if given is None else given)
    if path.is_file():
        return path
    if given is None:
        return None
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
    text = pathlib.Path(path).read_text(encoding="utf-8")
    try:
        if str(path).endswith(".json"):
            content = json.loads(text)
        else:
            import yaml  # not for commands that read no file

            content = yaml.safe_load(text)
    except Exception as error:
        raise LaunchError(f"The configuration file {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise LaunchError(
            f"The configuration file {path} holds {type(content).__name__}; it must hold keys and values, such as "
            "`num_processes: 2`."
        )
    return content


def modernise(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a configuration file with old spellings replaced by today's.

    Args:
        content: what the file holds; it stays as it is.
    """
    new = dict(content)
    if "fp16" in new:
        half = new.pop("fp16")
        new.setdefault("mixed_precision", "fp16" if half else "no")
    if "dynamo_backend" in new:
        backend = new.pop("dynamo_backend")
        new["dynamo_config"] = {} if backend in (None, "NO", False) else {"dynamo_backend": backend}
    for key, word in (("mixed_precision", "no"), ("distributed_type", "NO")):
        if new.get(key) is False:  # what YAML 1.1 makes of an unquoted `no`
            new[key] = word
    return new


def read(path: pathlib.Path) -> FileSettings:
    """Read a configuration file in terms of options.

    Args:
        path: the file.

    Raises:
        LaunchError: a key at the top level is unknown, a value is not one of its option's, or the file is not readable.
    """
    content = modernise(load_mapping(path))
    by_key = {option.file_key: option for option in OPTIONS if option.section is None and option.file_key}
    values: dict[str, Any] = {}
    unused: list[str] = []
    unknown = []
    for key, raw in content.items():
        if key in SECTIONS:
            values.update(_section(key, raw, path, unused))
        elif key == "distributed_type":
            values.update(_distributed_type(raw, path))
        elif key in by_key:
            option = by_key[key]
            values[option.name] = _parse(option.name, raw, f"{key} in {path}")
        elif key not in _SAGEMAKER_KEYS:
            unknown.append(key)
    if unknown:
        raise LaunchError(
            f"The configuration file {path} has unknown keys: {', '.join(sorted(map(str, unknown)))}. Correct or remove "
            f"them; known are {', '.join(sorted([*by_key, 'distributed_type', *SECTIONS]))}."
        )
    if values.get("num_processes", 1) < 1:
        del values["num_processes"]  # -1 is how such files say "not set"
    return FileSettings(path, {name: value for name, value in values.items() if value is not None}, tuple(unused))


def _distributed_type(raw: Any, path: pathlib.Path) -> dict[str, Any]:
    name = str(raw)
    if name not in SWITCH_OF_DISTRIBUTED_TYPE:
        raise LaunchError(
            f"distributed_type in {path} is {raw!r}; choose one of {', '.join(SWITCH_OF_DISTRIBUTED_TYPE)}."
        )
    switch = SWITCH_OF_DISTRIBUTED_TYPE[name]
    return {switch: True} if switch else {}


def _section(section: str, raw: Any, path: pathlib.Path, unused: list[str]) -> dict[str, Any]:
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise LaunchError(f"{section} in {path} is {raw!r}; it must hold keys and values.")
    options = [option for option in OPTIONS if option.section == section and option.file_key]
    by_key = {option.file_key: option for option in options} | {option.name: option for option in options}
    prefix = section.removesuffix("config")
    values = {}
    for key, content in raw.items():
        option = by_key.get(key) or by_key.get(prefix + str(key))
        if option is None:
            unused.append(f"{section}.{key} in {path} is unknown and has no effect.")
        else:
            values[option.name] = _parse(option.name, content, f"{section}.{key} in {path}")
    if section == "parallelism_config" and values:
        values["use_parallelism_config"] = True
    return values


def _parse(name: str, raw: Any, source: str) -> Any:
    try:
        return BY_NAME[name].parse(raw, source)
    except ValueError as error:
        raise LaunchError(str(error)) from None
