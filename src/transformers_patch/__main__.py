"""`python -m transformers_patch`: run a script with the patch, or print the state of the patches."""

import argparse
import dataclasses
import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers_patch import engine
from transformers_patch.errors import UnsupportedVersion
from transformers_patch.training_args import STRATEGIES


def parser() -> argparse.ArgumentParser:
    """Build the parser of the two commands."""
    main = argparse.ArgumentParser(prog="python -m transformers_patch", description=__doc__)
    commands = main.add_subparsers(dest="command", required=True, metavar="{run,status}")
    what = "Apply the patch and run a script, or a module with -m, as python itself would run it."
    run = commands.add_parser("run", help="run a script, unchanged, with the patch applied", description=what)
    kept = "when a state is kept (default: preserve)"
    run.add_argument("--strategy", choices=STRATEGIES, default="preserve", help=kept)
    whole = "make the Trainer's checkpoints atomic (complete or absent); needs this fork's accelerate"
    run.add_argument("--checkpoints", action="store_true", help=whole)
    beside = "the same, and publish them while the training continues"
    run.add_argument("--async_checkpoints", dest="checkpoints", action="store_const", const="async", help=beside)
    equal = "let the Trainer's loss and norm of gradients on several ranks be those of one process"
    run.add_argument("--losses", action="store_true", help=equal)
    run.add_argument("-m", dest="module", action="store_true", help="the target is the name of a module")
    run.add_argument("target", help="path of the script, or name of the module")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    what = (
        "Say for every patch which release is installed, whether its code has the known shape, and why it is patched. "
    )
    what += "Exits with 1 if a patch, except those of the losses, does not support the installed release."
    status = commands.add_parser("status", help="say what can be patched here", description=what)
    status.add_argument("--json", action="store_true", help="print JSON")
    return main


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    options = parser().parse_args(argv)
    return show_status(options.json) if options.command == "status" else run(options)


def run(options: argparse.Namespace) -> int:
    """Apply the patch and run a program in this process, as `python target` or `python -m target` would.

    Args:
        options: the arguments of the parser's `run`.

    Returns:
        0 when the program ends normally, 2 when it cannot be started. Its own exits and exceptions pass through.
    """
    target = options.target
    try:
        if not options.module and not Path(target).is_file():
            raise FileNotFoundError(f"{target!r} is not a file. Give the path of a script, or -m MODULE.")
        engine.apply(options.strategy, options.checkpoints, options.losses)
    except (UnsupportedVersion, ImportError, FileNotFoundError) as error:
        print(f"transformers_patch run: {error}", file=sys.stderr)
        return 2
    sys.argv = [target, *options.arguments]
    if options.module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(target).resolve().parent)
        # Python makes `__file__` of a script absolute, so that it holds after a change of directory; runpy does not.
        runpy.run_path(str(Path(target).absolute()), run_name="__main__")
    return 0


def show_status(as_json: bool) -> int:
    """Print the state of every patch; return 1 if one does not support the installed release."""
    patches = engine.status()
    if as_json:
        print(json.dumps([dataclasses.asdict(patch) for patch in patches], indent=2))
    else:
        for patch in patches:
            print(f"{patch.name}: {patch.verdict}")
            print(f"  target    {patch.target}")
            print(f"  installed {patch.package} {patch.version or '-'} (written for {patch.versions})")
            print(f"  applied   {patch.applied or 'not in this process'}")
            print(f"  {patch.detail}")
    # The losses are for newer releases than the rest, which does without them.
    return int(any(patch.verdict == "not supported" for patch in patches if patch.part != "losses"))


if __name__ == "__main__":
    sys.exit(main())
