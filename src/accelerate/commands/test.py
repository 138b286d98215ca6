"""`accelerate test`: check that training works on this machine, through the launcher."""

import argparse
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from accelerate.commands.utils import make_parser, or_exit

# The launcher's exit status for a request that it cannot run.
_USAGE = 2
# How long an interrupted launch may take to stop its workers before it is told to.
_PATIENCE_S = 10.0


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate test`.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` returned, or None for a parser of its own.
    """
    parser = make_parser(
        "test", "Check that training works on this machine.", subparsers, test_command, allow_abbrev=False
    )
    parser.add_argument(
        "--config_file", help="The configuration file to test; by default the one that a launch reads."
    )
    return parser


def test_command(args: argparse.Namespace) -> None:
    """Run the self check through `accelerate launch`, as a user's script would run.

    Args:
        args: what `test_command_parser` parsed.

    Raises:
        SystemExit: the check failed (status 1), could not be started (2), or was interrupted (130).
    """
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    config = [] if args.config_file is None else ["--config_file", args.config_file]
    script = ["--module", "accelerate.test_utils.scripts.test_script"]
    print("Running the self check:", "accelerate launch", *config, *script, flush=True)
    status = _run([*launcher, *config, *script])
    if status:
        what = "could not be started" if status == _USAGE else "failed; what failed is told above"
        print(f"The self check {what}.", file=sys.stderr)
        raise SystemExit(status)
    print("The self check passed: this machine is ready to train.")


def _run(command: list[str]) -> int:
    """Run a launch to its end and return its exit status.

    It is not killed at Ctrl-C, as `subprocess.run` would do, but left to stop its workers: the terminal interrupts it as well.
    """
    with subprocess.Popen(command) as child, _forwarded(signal.SIGTERM, child):
        try:
            status = child.wait()
        except KeyboardInterrupt:
            try:
                child.wait(_PATIENCE_S)
            except (KeyboardInterrupt, subprocess.TimeoutExpired):
                child.terminate()  # it was not interrupted, or does not care
            raise
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def _forwarded(number: signal.Signals, child: subprocess.Popen) -> Iterator[None]:
    """Pass a signal on to a child, within the block; only the main thread of a program can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, lambda *_: child.terminate())
    try:
        yield
    finally:
        signal.signal(number, before)


# pytest collects functions of this name.
test_command.__test__ = False
test_command_parser.__test__ = False


def main() -> None:
    """Run `accelerate test` as a program of its own.

    Raises:
        SystemExit: as in `test_command`.
    """
    or_exit("accelerate test", test_command, test_command_parser().parse_args())


if __name__ == "__main__":
    main()
