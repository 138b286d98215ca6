"""`accelerate checkpoint`: look at checkpoints, verify, accept, convert and prune them, without the run that wrote them.

It needs no GPU and no process group. Only `accept`, `export` and `reshard` load torch, and what looks into shards.
"""

import argparse
import contextlib
import datetime
import json
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from accelerate.base._warn import printable
from accelerate.base.table import size_text, table
from accelerate.checkpoint.manifest import CHECKPOINTS_FOLDER
from accelerate.checkpoint.storage import CheckpointStorage, storage_of
from accelerate.commands.utils import brief, make_parser
from accelerate.extensions.convert import inspect
from accelerate.extensions.convert.inspect import Details, Pruning, Summary
from accelerate.launch.errors import LaunchError, RunError

# What was written to within this time may belong to a run that is saving right now.
BUSY_SECONDS = 600


def checkpoint_command(args: argparse.Namespace) -> None:
    """Run a subcommand: status 1 if `verify` found a problem, or something could not be removed."""
    with one_line_errors():
        status = args.run(args)
    if status:
        raise SystemExit(status)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what damaged or unusual files run into into a LaunchError; errors of the system are left as they are."""
    try:
        yield
    except (LaunchError, RunError, OSError):
        raise
    except pickle.UnpicklingError as error:  # torch's message says how to run it all the same
        raise LaunchError("A file holds objects that are no plain data, and is not run.") from error
    except (ImportError, ValueError, RuntimeError) as error:
        raise LaunchError(brief(error)) from error
    except (TypeError, LookupError, ArithmeticError, MemoryError) as error:
        raise LaunchError(f"{type(error).__name__}: {brief(error)}") from error


# -- ls ----------------------------------------------------------------------------------------------------------------


def list_command(args: argparse.Namespace) -> int:
    """Print the checkpoints in a folder, newest last, and what saves left; return the exit status."""
    folder = storage_of(args.folder)
    found = inspect.survey(folder)
    if args.json:
        print(json.dumps([one.to_json() for one in found], indent=1))
        return 0
    if found:
        headings = ["NAME", "STEP", "ITERATION", "SIZE", "AGE", "RANKS", "STRATEGY", "STATE"]
        print(table(headings, [_row(one) for one in found], right=["STEP", "SIZE"]))
    else:
        print(f"There is no checkpoint in {folder.location}.")
    for home in (folder, folder.child(CHECKPOINTS_FOLDER)):
        for path, left in home.leftovers().items():
            print(f"Also there: {path} ({size_text(left.size)}), of a save or a removal that has not ended.")
    return 0


def _row(one: Summary) -> list[str]:
    keys = ("step", "iteration", "world_size", "strategy")
    step, iteration, ranks, strategy = (str(getattr(one.state.manifest, key, "-")) for key in keys)
    return [one.name, step, iteration, size_text(one.size), _age(one.age), ranks, strategy, _state(one)]


def _age(seconds: float | None) -> str:
    """Return a length of time as days and hours, minutes and seconds; "-" if it is not known."""
    return "-" if seconds is None else str(datetime.timedelta(seconds=int(seconds)))


def _state(one: Summary) -> str:
    return f"{one.state.kind}: {one.state.reason}" if one.state.kind == "incomplete" else one.state.kind


# -- verify ------------------------------------------------------------------------------------------------------------


def verify_command(args: argparse.Namespace) -> int:
    """Compare every file of a checkpoint, or of each in a folder, with its checksum; return 1 if there is a problem."""
    folder = storage_of(args.checkpoint)
    found = inspect.survey(folder)
    if not found:
        raise FileNotFoundError(f"There is no checkpoint in {folder.location!r}.")
    whole = damaged = 0
    for one in found:
        problems = inspect.verify(one)
        one.storage.release()
        if problems:
            damaged += 1
            print(f"{one.name}: {len(problems)} problem{'s' * (len(problems) > 1)}", *problems, sep="\n  ")
        elif one.state.manifest is None:
            print(f"{one.name} has no manifest; nothing to verify by. It has:")
            print("\n".join(f"  {name}  {size_text(size)}" for name, size in inspect.all_files(one.storage).items()))
        else:
            whole += 1
            print(f"{one.name}: whole ({len(one.state.manifest.files)} files, {size_text(one.size)})")
    if len(found) > 1:
        print(f"{whole} of {len(found)} checkpoints are complete.")
    return int(damaged > 0)


# -- accept ------------------------------------------------------------------------------------------------------------


def accept_command(args: argparse.Namespace) -> int:
    """Write the manifest of a checkpoint again, for the files that were changed on purpose; return the exit status."""
    from accelerate.extensions.convert.accept import accept

    storage = storage_of(args.checkpoint)
    lines = accept(storage)
    print(*lines or ["Nothing has changed."], sep="\n")
    if lines:
        print(f"{storage.location}: accepted. It loads with the files that are there.")
    return 0


# -- info --------------------------------------------------------------------------------------------------------------


def info_command(args: argparse.Namespace) -> int:
    """Print what a checkpoint consists of; return the exit status."""
    found = inspect.details(storage_of(args.checkpoint))
    if args.json:
        print(json.dumps(found.to_json(args.tensors), indent=1))
        return 0
    print("\n".join(f"{title:12}{text}" for title, text in _facts(found)))
    rows = []
    for name, entry in found.files.items():
        rank = "-" if found.summary.state.manifest is None else str(entry.rank)
        rows.append([name, size_text(entry.size), rank, str(len(entry.tensors or ()) or "-")])
    print("\n" + table(["FILE", "SIZE", "RANK", "TENSORS"], rows, right=["SIZE"]))
    tied = [[alias, kept, file] for file, entry in found.files.items() for alias, kept in entry.aliases.items()]
    if tied:
        print("\n" + table(["TIED", "TO", "FILE"], tied))
    if args.tensors:
        listed = [
            [name, "x".join(map(str, entry.shape)) or "scalar", entry.dtype, file]
            for file, entries in found.tensors.items()
            for name, entry in entries.items()
        ]
        print("\n" + table(["TENSOR", "SHAPE", "DTYPE", "FILE"], listed))
    return 0


def _facts(found: Details) -> Iterator[tuple[str, str]]:
    one = found.summary
    yield "Checkpoint", one.storage.location
    yield "State", _state(one)
    if one.saved is not None:
        saved = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(one.saved))
        yield "Saved", f"{saved}, {_age(one.age)} ago"
    yield "Size", size_text(one.size)
    if (manifest := one.state.manifest) is not None:
        mesh = ", ".join(f"{dim}={size}" for dim, size in (manifest.mesh or {}).items())
        yield "Ranks", f"{manifest.world_size} ({manifest.strategy}{', mesh ' + mesh if mesh else ''})"
        yield "Step", f"{manifest.step}, iteration {manifest.iteration}"
        yield "Versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    if count := sum(map(len, found.tensors.values())):
        dtypes = ", ".join(f"{numbers:,} {dtype}" for dtype, numbers in found.dtypes.items())
        yield "Tensors", f"{count:,} with {sum(found.dtypes.values()):,} numbers ({dtypes})"


# -- export and reshard --------------------------------------------------------------------------------------------------


def export_command(args: argparse.Namespace) -> int:
    """Write a model's weights as Hugging Face safetensors; return the exit status."""
    from accelerate.extensions.convert.convert import export

    limit = int(args.max_shard_size) if args.max_shard_size.isdigit() else args.max_shard_size
    written = export(args.checkpoint, args.out, args.model, limit, args.dtype, args.overwrite)
    total = size_text(sum(entry.size for entry in written.values()))
    tensors = sum(len(entry.tensors or ()) for entry in written.values())
    print(f"{args.out}: {tensors} tensors in {len(written)} file{'s' * (len(written) > 1)} ({total})")
    return 0


def reshard_command(args: argparse.Namespace) -> int:
    """Write a checkpoint again, for another number of ranks or in another layout; return the exit status."""
    from accelerate.extensions.convert.convert import reshard

    out = storage_of(args.out)
    if not out.is_empty():
        raise FileExistsError(f"{out.location!r} is not empty; name another folder.")
    reshard(args.checkpoint, args.out, args.layout, args.shards)
    print(f"{args.out}: {args.layout}{f', {args.shards} shards' if args.layout == 'sharded' else ''}")
    return 0


# -- prune -------------------------------------------------------------------------------------------------------------


def prune_command(args: argparse.Namespace) -> int:
    """Remove the oldest automatically named checkpoints; return 1 if one could not be removed."""
    folder = storage_of(args.folder)
    found = plan = inspect.plan_pruning(folder, args.keep, args.foreign)
    for line in _lines(found, folder):
        print(line)
    if args.incomplete:
        _refuse_if_busy(found)
    elif found.unfinished or found.left:
        print("What is incomplete stays; --incomplete removes it, too.")
        plan = replace(found, unfinished=[], left={})
    going = [*plan.old, *plan.unfinished, *plan.left.values()]
    size = size_text(sum(one.size for one in going))
    if not going:
        print("There is nothing to remove.")
        return 0
    if args.dry_run:
        print(f"{len(going)} would be removed ({size}).")
        return 0
    if not args.yes:
        if not sys.stdin.isatty():
            raise LaunchError("There is no terminal to ask on; --yes removes without asking, --dry_run only reports.")
        print(f"Remove {len(going)} ({size})? [y/N] ", end="", flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("Nothing was removed.")
            return 0
        if inspect.plan_pruning(folder, args.keep, args.foreign) != found:
            raise LaunchError("What is there has changed since the question, so nothing was removed. Run this again.")
    return _remove(plan)


def _lines(plan: Pruning, folder: CheckpointStorage) -> Iterator[str]:
    for one in [*plan.old, *plan.unfinished]:
        yield f"{one.name}  {size_text(one.size)}  {_age(one.age)} old, {_state(one)}"
    for path, left in plan.left.items():
        yield f"{path}  {size_text(left.size)}  left behind by a save or a removal"
    for one in plan.unread:
        yield f"{one.name} stays: it was saved, and cannot be read here: {one.state.reason}"
    if plan.elsewhere is not None:
        yield f"{CHECKPOINTS_FOLDER} leads out of {folder.location}; to prune there, name {plan.elsewhere.location}."


def _refuse_if_busy(plan: Pruning) -> None:
    written = {one.name: one.saved for one in plan.unfinished}
    written |= {path: left.modified for path, left in plan.left.items()}
    if busy := [name for name, when in written.items() if when is not None and when > time.time() - BUSY_SECONDS]:
        recent = f"{busy[0]} was written to within the last {BUSY_SECONDS // 60} minutes"
        raise LaunchError(f"{recent}: a run may be saving. Run this again later, or without --incomplete.")


def _remove(plan: Pruning) -> int:
    problems = []
    if plan.left:
        for home in plan.homes:
            home.sweep(older_than_s=0)  # `_refuse_if_busy` has looked
            still = sorted(plan.left.keys() & home.leftovers().keys())
            problems += [f"{path} could not be removed, or is in use." for path in still]
    for one in [*plan.old, *plan.unfinished]:
        try:
            one.storage.remove()
        except OSError as error:
            problems.append(f"{one.name} could not be removed: {error}")
    for problem in problems:
        print(printable(problem), file=sys.stderr)
    print(f"{len(plan.left) + len(plan.old) + len(plan.unfinished) - len(problems)} removed.")
    return int(bool(problems))


# -- the command line --------------------------------------------------------------------------------------------------


def checkpoint_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate checkpoint` and its subcommands."""
    description = "List, verify, accept, inspect, convert and prune checkpoints."
    parser = make_parser("checkpoint", description, subparsers, checkpoint_command)
    commands = parser.add_subparsers(title="subcommands", required=True)

    def add(
        name: str, run: Callable[[argparse.Namespace], int], description: str, **positional: str
    ) -> argparse.ArgumentParser:
        made = make_parser(name, description, commands, checkpoint_command)
        made.set_defaults(run=run)
        for dest, text in positional.items():
            made.add_argument(dest, help=text)
        return made

    where = "A folder or an fsspec URL."
    folder = f"A project's folder, a folder of checkpoints, or a checkpoint. {where}"
    made = add("ls", list_command, "List the checkpoints in a folder, newest last.", folder=folder)
    made.add_argument("--json", action="store_true", help="Print JSON.")

    text = "Read all files and compare their checksums; status 1 if something is wrong."
    add("verify", verify_command, text, checkpoint=f"A checkpoint, or a folder of checkpoints. {where}")

    text = "Let the manifest match files that you changed on purpose."
    add("accept", accept_command, text, checkpoint="A checkpoint: a local folder.")

    made = add("info", info_command, "Show what a checkpoint consists of.", checkpoint=f"A checkpoint. {where}")
    made.add_argument("--tensors", action="store_true", help="List every tensor.")
    made.add_argument("--json", action="store_true", help="Print JSON.")

    out = "The folder to write; it must be empty or missing."
    text = "Write a checkpoint of a sharded model again in another layout."
    made = add("reshard", reshard_command, text, checkpoint="A checkpoint.", out=out)
    made.add_argument("--layout", choices=["full", "sharded"], required=True, help="Full state dicts, or shards.")
    made.add_argument("--shards", type=int, default=1, help="How many shards (with --layout sharded).")

    text = "Write a model's weights as Hugging Face safetensors."
    made = add("export", export_command, text, checkpoint=f"A checkpoint. {where}", out=out)
    made.add_argument("--model", type=int, default=0, help="Number of the model, in the order of preparation.")
    made.add_argument("--max_shard_size", default="5GB", help="Largest size of a file: bytes, or as in 500MB.")
    text = "Convert floating-point tensors to this dtype."
    made.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], help=text)
    made.add_argument("--overwrite", action="store_true", help="Replace the weights in OUT; its other files stay.")

    folder = f"A project's folder, or a folder of checkpoints. {where}"
    made = add("prune", prune_command, "Remove the oldest automatically named checkpoints.", folder=folder)
    text = "How many of the newest complete ones stay in each folder, at least 1."
    made.add_argument("--keep", type=int, required=True, help=text)
    made.add_argument("--dry_run", action="store_true", help="Print what would be removed, and remove nothing.")
    made.add_argument("--yes", action="store_true", help="Do not ask.")
    made.add_argument(
        "--incomplete", action="store_true", help="Also remove incomplete checkpoints and leftovers of killed saves."
    )
    made.add_argument("--foreign", action="store_true", help="Count and remove those without a manifest, too.")
    return parser
