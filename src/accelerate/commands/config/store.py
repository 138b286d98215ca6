"""How configuration files are written: whole or not at all, and never over the only copy of something else."""

import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

from accelerate.launch.errors import LaunchError
from accelerate.runtime.durable import written_whole


def as_yaml(content: Mapping[str, Any]) -> str:
    """Return content as YAML, with sorted keys."""
    import yaml  # not for commands that write no file

    return yaml.safe_dump(dict(content), allow_unicode=True)


def as_json(content: Mapping[str, Any]) -> str:
    """Return content as JSON, with sorted keys."""
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def check_writable(path: str | os.PathLike[str]) -> None:
    """Refuse a place that cannot be written to, before questions are asked for it.

    Args:
        path: the file that is going to be written.

    Raises:
        LaunchError: it is no name of a file, or a folder, or its folder does not allow it.
    """
    if not os.fspath(path):
        raise LaunchError("--config_file is ''; name a file, or leave the option out for the default one.")
    path = pathlib.Path(path)
    if path.is_dir():
        raise LaunchError(f"{path} is a folder; name a file in it, such as {path / 'default_config.yaml'}.")
    if path.exists() and not path.is_file():
        raise LaunchError(f"{path} is a pipe or a device; it must be a file.")
    above = path.absolute().parent
    while not above.exists():
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise LaunchError(f"{path} cannot be written: {above} is no folder that you may write to.")


def write(path: str | os.PathLike[str], text: str) -> None:
    """Replace a file, or make it and its folder: a reader sees the old content or the new one, never a part.

    A link stays a link, and an existing file keeps its permissions.

    Args:
        path: the file.
        text: its content.

    Raises:
        LaunchError: it cannot be written there.
    """
    target = pathlib.Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(target) as temporary, open(temporary, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
            if target.exists():
                shutil.copymode(target, temporary)
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror or error}.") from None


def back_up(path: str | os.PathLike[str]) -> pathlib.Path:
    """Copy a file to `FILE.bak`, or `FILE.bak2` and so on: a backup that exists is left alone.

    Args:
        path: the file.

    Returns:
        The copy.

    Raises:
        LaunchError: it cannot be written.
    """
    source = pathlib.Path(os.path.realpath(path))
    number = 1
    while True:
        copy = source.with_name(f"{source.name}.bak{'' if number == 1 else number}")
        try:
            data = source.read_bytes()
            with open(copy, "xb") as stream:
                stream.write(data)
                os.fsync(stream.fileno())
            shutil.copymode(source, copy)
            return copy
        except FileExistsError:
            number += 1
        except OSError as error:
            raise LaunchError(f"{copy} cannot be written: {error.strerror or error}.") from None
