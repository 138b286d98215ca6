"""Environment variables, and facts about this machine.

Importing this module does not import torch.
"""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

logger = logging.getLogger("accelerate.utils.environment")  # the public path

T = TypeVar("T", bound=Callable[..., Any])

_TRUE = frozenset(("y", "yes", "t", "true", "on", "1"))
_FALSE = frozenset(("n", "no", "f", "false", "off", "0"))


# Reading variables


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Read a word (y, yes, t, true, on, 1 or n, no, f, false, off, 0, in any case) as 1 or 0, with `to_bool` as a bool.

    Raises:
        ValueError: the word is none of these.

    Example:
        >>> from accelerate.utils import str_to_bool
        >>> str_to_bool("yes"), str_to_bool("off")
        (1, 0)
    """
    word = value.lower()
    if word not in _TRUE and word not in _FALSE:
        raise ValueError(f"invalid truth value {value!r}: use one of y, yes, t, true, on, 1, n, no, f, false, off, 0.")
    return word in _TRUE if to_bool else int(word in _TRUE)


def integer_in(environ: Mapping[str, str], name: str) -> int | None:
    """Return a variable as an integer; None if it is not set, ValueError if it is something else."""
    text = environ.get(name, "")
    try:
        return int(text) if text.strip() else None
    except ValueError:
        raise ValueError(
            f"The environment variable {name} is {text!r}; a launcher sets it to an integer. Correct or unset it."
        ) from None


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first variable that holds an integer of at least zero. An empty variable counts as unset.

    Args:
        env_keys: names of variables, in the order of preference.
        default: what to return when none of them is set, or all are negative.

    Raises:
        ValueError: a variable holds something else than an integer.

    Example:
        >>> from accelerate.utils import get_int_from_env
        >>> get_int_from_env(["SOME_SIZE_THAT_IS_NOT_SET"], 1)
        1
    """
    for key in env_keys:
        text = os.environ.get(key, "").strip()
        if not text:
            continue
        try:
            number = int(text)
        except ValueError:
            raise ValueError(
                f"The environment variable {key} is {text!r}; set it to an integer or unset it."
            ) from None
        if number >= 0:
            return number
    return default


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return a variable as a truth value, or the default where it is not set, or empty.

    Raises:
        ValueError: its value is no truth value; see `str_to_bool`.

    Example:
        >>> from accelerate.utils import parse_flag_from_env
        >>> parse_flag_from_env("SOME_FLAG_THAT_IS_NOT_SET", default=True)
        True
    """
    text = os.environ.get(key, "").strip()
    if not text:
        return bool(str_to_bool(str(default)))
    try:
        return bool(str_to_bool(text))
    except ValueError as error:
        raise ValueError(f"The environment variable {key} has an {error}") from None


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return a variable unchanged, or the default if it is unset or empty.

    Example:
        >>> from accelerate.utils import parse_choice_from_env
        >>> parse_choice_from_env("SOME_CHOICE_THAT_IS_NOT_SET", default="no")
        'no'
    """
    text = os.environ.get(key, "")
    return text if text.strip() else str(default)


# Changing variables for a while


def restore(previous: Mapping[str, str | None]) -> None:
    """Give variables these values; None unsets one."""
    for key, value in previous.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set environment variables inside a `with` block and put the former values back afterwards, whatever happened.

    Args:
        kwargs: names (written in upper case in the environment) and values (converted to strings). None unsets a
            variable for the block.

    Example:
        >>> import os
        >>> with patch_environment(omp_num_threads=1):
        ...     os.environ["OMP_NUM_THREADS"]
        '1'
    """
    variables = {key.upper(): None if value is None else str(value) for key, value in kwargs.items()}
    previous = {key: os.environ.get(key) for key in variables}
    try:
        restore(variables)
        yield
    finally:
        restore(previous)


@contextmanager
def clear_environment() -> Iterator[None]:
    """Run a `with` block without any environment variable; all of them are back afterwards, changes are dropped.

    Not safe with other threads: their C code may read a variable while it is gone.

    Example:
        >>> import os
        >>> from accelerate.utils import clear_environment
        >>> with clear_environment():
        ...     len(os.environ)
        0
    """
    previous = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(previous)


def is_colab() -> bool:
    """Tell whether this is a notebook of Google Colab."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "google.colab" in type(shell).__module__ or "COLAB_RELEASE_TAG" in os.environ


# GPUs


def _nvidia_smi() -> str:
    """Return the path of `nvidia-smi`; without one on PATH, its name."""
    return shutil.which("nvidia-smi") or "nvidia-smi"


def ask_nvidia_smi(*arguments: str) -> list[str]:
    """Return the lines that `nvidia-smi` prints, without empty ones."""
    command = _nvidia_smi()
    if shutil.which(command) is None:
        raise FileNotFoundError("nvidia-smi is not on PATH; install the NVIDIA driver or add its folder to PATH.")
    answer = subprocess.run([command, *arguments], check=True, capture_output=True, text=True)
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


# Processors
