"""How configuration files are written: whole or not at all, and never over the only copy of something else."""

import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

from accelerate.launch.errors import LaunchError
from accelerate.runtime.durable import written_whole

Path = str | os.PathLike[str]


def check_writable(path: Path) -> None:
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
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise LaunchError(f"{path} cannot be written: {above} is no folder that you may write to.")


def write(path: Path, content: Mapping[str, Any], as_json: bool | None = None) -> None:
    """Replace a file, or make it and its folder: a reader sees the old content or the new one, never a part.

    A link stays a link, and an existing file keeps its permissions.

    Args:
        path: the file.
        content: its keys and values; they are sorted.
        as_json: whether it is JSON rather than YAML; None asks the ending `.json`.

    Raises:
        LaunchError: it cannot be written there.
    """
    if str(path).endswith(".json") if as_json is None else as_json:
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    else:
        import yaml  # not for commands that write no file

        text = yaml.safe_dump(dict(content), allow_unicode=True)
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


def back_up(path: Path) -> pathlib.Path:
    """Copy a file to `FILE.bak`, or `FILE.bak2` and so on: a backup that exists is left alone.

    Args:
        path: the file.

    Returns:
        The copy.

    Raises:
        LaunchError: it cannot be written.
    """
    source = pathlib.Path(os.path.realpath(path))
    names = itertools.chain([f"{source.name}.bak"], (f"{source.name}.bak{number}" for number in itertools.count(2)))
    copy = next(copy for copy in map(source.with_name, names) if not os.path.lexists(copy))
    try:
        with open(copy, "xb") as stream:
            stream.write(source.read_bytes())
            os.fsync(stream.fileno())
        shutil.copymode(source, copy)
    except OSError as error:
        raise LaunchError(f"{copy} cannot be written: {error.strerror or error}.") from None
    return copy
