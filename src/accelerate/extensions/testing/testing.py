"""Helpers of test suites: requirements, commands, base classes, and a comparison of tensors over ranks."""

import asyncio
import contextlib
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import mock

import torch

from accelerate.base import _lazy
from accelerate.base.environment import parse_flag_from_env as flag_of
from accelerate.comm.operations import gather
from accelerate.extensions.testing.requirements import *  # noqa: F403
from accelerate.extensions.testing.requirements import device_count, has_tracker, torch_device
from accelerate.state import AcceleratorState, GradientState, PartialState

_run_slow_tests = flag_of("RUN_SLOW")
__getattr__ = _lazy.aliases("accelerate.test_utils.testing", {"_atleast_one_tracker_available": has_tracker})


# -- commands ----------------------------------------------------------------------------------------------------------


class SubprocessCallException(Exception):
    """A command of a test has failed; the message holds its output."""

    __module__ = "accelerate.test_utils.testing"  # the path in pickles


@dataclass
class _RunOutput:
    """The result of a command: its exit status, and the lines of its output and of its errors."""

    returncode: int
    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)


def get_launch_command(**kwargs: Any) -> list[str]:
    """Return an `accelerate launch` command with options.

    Args:
        kwargs: option name to value. True gives only the flag; None omits the option.

    Example:
        >>> get_launch_command(num_processes=2, cpu=True)
        ['accelerate', 'launch', '--num_processes=2', '--cpu']
    """
    command = ["accelerate", "launch"]
    for name, value in kwargs.items():
        if value is True:
            command.append(f"--{name}")
        elif value is not None:
            command.append(f"--{name}={value}")
    return command


DEFAULT_LAUNCH_COMMAND = get_launch_command(
    num_processes=device_count if torch_device != "cpu" else 1, monitor_interval=0.1
)


def path_in_accelerate_package(*components: str) -> pathlib.Path:
    """Return a path inside the installed package."""
    return pathlib.Path(__file__).resolve().parents[2].joinpath(*components)


def run_command(
    command: Sequence[str], return_stdout: bool = False, env: Mapping[str, str] | None = None
) -> str | None:
    """Run a command and wait for it; `env` are all variables, by default those of this process.

    Returns:
        The output as text if it was requested.

    Raises:
        SubprocessCallException: the command failed; the message holds its output and errors.
    """
    words = [str(word) for word in command]
    environment = dict(os.environ if env is None else env)
    result = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, check=False)
    output = result.stdout.decode("utf-8", "replace")
    if result.returncode:
        raise SubprocessCallException(
            f"`{' '.join(words)}` failed with exit status {result.returncode}. Its output:\n\n{output}"
        )
    return output if return_stdout else None


def execute_subprocess_async(
    cmd: Sequence[str],
    env: Mapping[str, str] | None = None,
    stdin: Any = None,
    timeout: float = 180,
    quiet: bool = False,
    echo: bool = True,
) -> _RunOutput:
    """Run a command and show its lines when it has ended; `env` are all variables, by default those of this process.

    Args:
        timeout: after how many seconds it is stopped.
        quiet: do not show its lines.
        echo: show the command itself.

    Raises:
        RuntimeError: the command failed or was stopped; the message holds its errors.
    """
    words = [str(word) for word in cmd]
    text = " ".join(words)
    if echo:
        print(f"\nRunning: {text}", flush=True)
    ending = ""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, stdin=stdin, stdout=pipe, stderr=pipe, env=env, text=True, errors="replace"
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            ending = f"was stopped after {timeout} seconds"
            process.terminate()
            try:
                output, errors = process.communicate(timeout=40)  # a launcher stops its processes first
            except subprocess.TimeoutExpired:
                process.kill()
                output, errors = process.communicate()
    result = _RunOutput(process.returncode, output.splitlines(), errors.splitlines())
    if not quiet:
        for label, lines, stream in (("stdout:", result.stdout, sys.stdout), ("stderr:", result.stderr, sys.stderr)):
            for line in lines:
                print(label, line, file=stream)
    if ending or result.returncode:
        ending = ending or f"failed with exit status {result.returncode}"
        raise RuntimeError(f"`{text}` {ending}. Its errors:\n\n" + "\n".join(result.stderr or result.stdout))
    return result


async def _read_stream(stream: asyncio.StreamReader, callback: Callable[[bytes], Any]) -> None:
    """Call a function with each line of a stream, until it ends."""
    while line := await stream.readline():
        callback(line)


async def _stream_subprocess(
    cmd: Sequence[str],
    env: Mapping[str, str] | None = None,
    stdin: Any = None,
    timeout: float | None = None,
    quiet: bool = False,
    echo: bool = False,
) -> _RunOutput:
    """Run a command and show its lines as they come, whatever its exit status; a timeout kills it (TimeoutError)."""
    if echo:
        print("\nRunning:", " ".join(cmd))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*cmd, stdin=stdin, stdout=pipe, stderr=pipe, env=env)
    result = _RunOutput(0)

    def keep(lines: list[str], label: str, file: Any) -> Callable[[bytes], None]:
        def take(line: bytes) -> None:
            lines.append(line.decode("utf-8", "replace").rstrip())
            if not quiet:
                print(label, lines[-1], file=file)

        return take

    streams = (
        _read_stream(process.stdout, keep(result.stdout, "stdout:", sys.stdout)),
        _read_stream(process.stderr, keep(result.stderr, "stderr:", sys.stderr)),
    )
    try:
        *_, result.returncode = await asyncio.wait_for(asyncio.gather(*streams, process.wait()), timeout)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()
        raise
    return result


def parse_flag_from_env(key: str, default: Any = False) -> Any:
    """Return the truth value of a variable, or the default unchanged; another word is a ValueError."""
    return flag_of(key) if os.environ.get(key, "").strip() else default


def pytest_xdist_worker_id() -> int:
    """Return the number of this worker of pytest-xdist, or 0 outside it."""
    number = re.search(r"\d+$", os.environ.get("PYTEST_XDIST_WORKER", ""))
    return int(number[0]) if number else 0


def get_torch_dist_unique_port() -> int:
    """Return a port for a process group that no other worker of pytest-xdist uses."""
    return 29500 + pytest_xdist_worker_id()


@contextlib.contextmanager
def assert_exception(exception_class: type[BaseException], msg: str | None = None) -> Iterator[None]:
    """Expect an exception of a type, with `msg` in its text, from a block; else raise an AssertionError."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, exception_class):
            raise AssertionError(
                f"Expected {exception_class.__name__}, got {type(error).__name__}: {error}"
            ) from error
        if msg is not None and msg not in str(error):
            raise AssertionError(f"Expected {msg!r} in the message, got {str(error)!r}") from error
        return
    raise AssertionError(f"Expected {exception_class.__name__}, and nothing was raised")


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Call a function and return its output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        func(*args, **kwargs)
    return output.getvalue()


# -- cases -------------------------------------------------------------------------------------------------------------


class AccelerateTestCase(unittest.TestCase):
    """A test case that leaves no shared state behind."""

    __module__ = "accelerate.test_utils.testing"  # the path in pickles

    def tearDown(self) -> None:
        """Forget the state of the Accelerators that the test built."""
        super().tearDown()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


class TempDirTestCase(unittest.TestCase):
    """A test case with a separate directory, `self.tmpdir`, emptied before each test if `clear_on_setup` is set."""

    __module__ = "accelerate.test_utils.testing"  # the path in pickles

    clear_on_setup: bool = True
    tmpdir: ClassVar[pathlib.Path]

    @classmethod
    def setUpClass(cls) -> None:
        """Make the directory."""
        super().setUpClass()
        cls.tmpdir = pathlib.Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        """Remove the directory."""
        shutil.rmtree(cls.tmpdir, ignore_errors=True)
        super().tearDownClass()

    def setUp(self) -> None:
        """Empty the directory."""
        super().setUp()
        if self.clear_on_setup:
            for path in self.tmpdir.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()


class MockingTestCase(unittest.TestCase):
    """A test case that replaces things for the length of a test."""

    __module__ = "accelerate.test_utils.testing"  # the path in pickles

    def add_mocks(self, mocks: mock.Mock | list[Any]) -> None:
        """Start one or several patches of `unittest.mock`, and stop them when the test ends."""
        self.mocks = list(mocks) if isinstance(mocks, (list, tuple)) else [mocks]
        for patch in self.mocks:
            patch.start()
            self.addCleanup(patch.stop)


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor, of the same shape everywhere, is the same on all ranks.

    Collective: call on every rank.
    """
    local = tensor[None].clone().to(PartialState().device)
    return all(torch.equal(received, local[0]) for received in gather(local))
