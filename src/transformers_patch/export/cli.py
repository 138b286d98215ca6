"""`python -m transformers_patch export`: write a pull request for a given source tree."""

import argparse
import os
import subprocess
import sys
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path

from transformers_patch.export import mail
from transformers_patch.export.recipe import RECIPES, MissingTool, Recipe, load, require_package
from transformers_patch.export.sources import SourceTree, UnrecognisedSource

_REFUSED = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `export` to a parser; `run` serves what it parses.

    Args:
        parser: The parser of the subcommand.
    """
    parser.add_argument("--package", required=True, choices=sorted(RECIPES), help="the package that is changed")
    parser.add_argument(
        "--source", required=True, metavar="DIR", help="its source tree: an unpacked distribution or a git checkout"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="where the pull request is written")
    parser.add_argument(
        "--author", metavar='"NAME <ADDRESS>"', help="the author of the commit; without it, who git says you are"
    )
    parser.add_argument("--date", help="the date of the commit, ISO 8601 or RFC 2822; without it, now")


def run(namespace: argparse.Namespace) -> int:
    """Write the patch, the new tests and the text of the pull request into the folder `--out`.

    Args:
        namespace: What a parser with `add_arguments` returned.

    Returns:
        0, or 2 with the reason on stderr and nothing written: the source is not recognised or has the change already,
        libcst is missing, or an option cannot be read.
    """
    try:
        tree, recipe = SourceTree(namespace.source), load(namespace.package)
        require_package(tree, recipe.package)
        written = _write(tree, recipe, Path(namespace.out), _author(namespace.author), _date(namespace.date))
    except (UnrecognisedSource, MissingTool, ValueError) as refusal:
        print(f"transformers_patch export: {refusal}", file=sys.stderr)
        return _REFUSED
    print(f"{recipe.package} {tree.version}: {recipe.subject}")
    for path in written:
        print(f"  {path}")
    print(f"Apply it in a checkout of {recipe.package} with: git am {written[0]}")
    return 0


def _write(tree: SourceTree, recipe: Recipe, out: Path, author: str, date: datetime) -> list[Path]:
    # Everything is made before anything is written: a refusal leaves no half of a pull request.
    files = recipe.edit(tree)
    texts = {
        f"0001-{recipe.slug}.patch": mail.patch(
            tree, files, subject=recipe.subject, message=recipe.message, author=author, date=date
        ),
        "PULL_REQUEST.md": recipe.body(tree),
    }
    texts |= {path: text for path, text in files.items() if path.startswith("tests/") and not tree.exists(path)}
    for name, text in texts.items():
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode("utf-8"))
    return [out / name for name in texts]


def _author(given: str | None) -> str:
    if given:
        return given
    name = os.environ.get("GIT_AUTHOR_NAME") or _git_setting("user.name")
    address = os.environ.get("GIT_AUTHOR_EMAIL") or _git_setting("user.email")
    if name and address:
        return f"{name} <{address}>"
    raise ValueError('git knows no user.name and user.email here; say who the author is: --author "Name <address>"')


def _git_setting(name: str) -> str:
    try:
        done = subprocess.run(["git", "config", "--get", name], capture_output=True, text=True, timeout=30)
    except OSError:
        return ""
    return done.stdout.strip()


def _date(given: str | None) -> datetime:
    if given is None:
        return datetime.now(timezone.utc).replace(microsecond=0)
    for read in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            date = read(given)
        except (ValueError, TypeError):
            continue
        # Without a zone it would depend on the machine where it is written.
        return date if date.tzinfo else date.replace(tzinfo=timezone.utc)
    raise ValueError(f"--date {given!r} is neither ISO 8601 (2026-01-31T12:00:00+00:00) nor RFC 2822")
