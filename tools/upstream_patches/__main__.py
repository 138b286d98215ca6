"""Write a pull request that carries a fix upstream: `python tools/upstream_patches --package NAME --source DIR --out DIR`.

A source tree is read, edited at places that its syntax tree names, and written as a patch that `git am` applies. What the
patches add is in `payload/` and is ours.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import for_accelerate
import for_tensor_parallel
import for_the_losses
import for_the_trainer
import for_transformers
from source_file import UnknownSource

# The first of a package is written where none is named.
RECIPES = {
    recipe.NAME: recipe
    for recipe in (for_accelerate, for_transformers, for_the_trainer, for_the_losses, for_tensor_parallel)
}
PAYLOAD = Path(__file__).parent / "payload"
# The notice that the licence asks files to carry. It names no holder: every contributor keeps what is theirs.
LICENCE_NOTICE = """\
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""


def version_of(root: Path, package: str) -> str:
    """Return the version of a package's source tree.

    Raises:
        UnknownSource: It is the tree of another package, or none.
    """
    init = root / "src" / package / "__init__.py"
    found = re.search(r"^__version__\s*=\s*[\"']([^\"']+)", init.read_text("utf-8"), re.M) if init.is_file() else None
    if found is None:
        raise UnknownSource(
            f"looked for the `__version__` of {package} in {init} and found none. Is --source its tree?"
        )
    return found[1]


def spaced(text: str) -> str:
    """Return a module with two blank lines after its imports, which is transformers' style."""
    head = [node for node in ast.parse(text).body[1:] if isinstance(node, (ast.Import, ast.ImportFrom))]
    lines = text.splitlines(keepends=True)
    return "".join([*lines[: head[-1].end_lineno], "\n", *lines[head[-1].end_lineno :]])


def edited(root: Path, recipe: ModuleType) -> dict[str, str]:
    """Return the complete new text of every changed and every new file, by its path from the root."""
    changed = recipe.edit(root)
    changed |= {path: (PAYLOAD / recipe.NAME / name).read_text("utf-8") for path, name in recipe.NEW.items()}
    new = {path: text for path, text in changed.items() if path not in recipe.CHANGES}
    if any((root / path).exists() for path in new):
        raise UnknownSource(f"the change is already in {root}: one of {', '.join(new)} is there.")
    style = spaced if recipe.PACKAGE == "transformers" else str
    return changed | {path: LICENCE_NOTICE + style(text) for path, text in new.items()}


def git(folder: Path, *arguments: str, author: str = "", date: str = "") -> str:
    """Run git without the user's settings, and return what it prints.

    Raises:
        ValueError: git refuses, for instance the author or the date.
    """
    person = {f"GIT_{who}_{what}": "upstream_patches" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "TZ": "UTC", **person}
    options = [f"--author={author}"] * bool(author) + [f"--date={date}"] * bool(date)
    done = subprocess.run(
        ["git", *arguments, *options], cwd=folder, env={**os.environ, **settings}, capture_output=True, text=True
    )
    if done.returncode:
        raise ValueError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout


def patch(root: Path, files: dict[str, str], recipe: ModuleType, message: str, author: str, date: str) -> str:
    """Return the mail that `git am` turns into one commit, made in a repository of the changed files alone.

    Args:
        root: The tree as it is.
        files: What `edited` returned.
        recipe: It has the first line of the commit message.
        message: The rest of the commit message.
        author: `Name <address>`.
        date: The author's date, as git reads it; without a zone it is UTC.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        git(folder, "init", "--quiet")
        for path in files:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            if (root / path).exists():
                shutil.copy(root / path, folder / path)  # with its executable bit
        git(folder, "add", "--all", "--force")
        git(folder, "commit", "--quiet", "--message=as it is")
        for path, text in files.items():
            (folder / path).write_text(text, "utf-8")
        git(folder, "add", "--all", "--force")
        words = [f"--message={recipe.SUBJECT}", f"--message={message}"]
        git(folder, "commit", "--quiet", *words, author=author, date=date)
        return git(folder, "format-patch", "-1", "--stdout", "--zero-commit", "--full-index", "--no-signature")


def me() -> str:
    """Return who the user is to git."""
    command = ["git", "-c", "user.useConfigOnly=true", "var", "GIT_AUTHOR_IDENT"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError('git knows no user.name and user.email here; give the author: --author "Name <address>"')
    return done.stdout.rpartition(">")[0] + ">"


def main() -> int:
    """Write the patch, the new test and the text of the pull request into the folder `--out`.

    Returns:
        0, or 2 with the reason on stderr and nothing written.
    """
    parser = argparse.ArgumentParser(prog="python tools/upstream_patches", description=__doc__.partition("\n")[0])
    packages = sorted({recipe.PACKAGE for recipe in RECIPES.values()})
    parser.add_argument("--package", required=True, choices=packages, help="the package that is changed")
    parser.add_argument("--patch", choices=list(RECIPES), help="which of its repairs; without it, the first one")
    parser.add_argument(
        "--source", required=True, type=Path, help="its source tree: an unpacked distribution or a git checkout"
    )
    parser.add_argument("--out", required=True, type=Path, help="where the pull request is written")
    parser.add_argument("--author", help='"NAME <ADDRESS>" of the commit; without it, the user that git knows')
    parser.add_argument("--date", default="", help="the date of the commit, such as ISO 8601; without it, now")
    options = parser.parse_args()
    package = options.package
    known = [name for name, recipe in RECIPES.items() if package == recipe.PACKAGE]
    chosen = options.patch or known[0]
    if chosen not in known:
        parser.error(f"--patch {chosen} is not for {package}; for it there is {', '.join(known)}")
    recipe, payload = RECIPES[chosen], PAYLOAD / chosen
    try:
        version = version_of(options.source, package)
        files = edited(options.source, recipe)
        message = (payload / "message.txt").read_text("utf-8")
        mail = patch(options.source, files, recipe, message, options.author or me(), options.date)
    except ValueError as refusal:
        print(f"upstream_patches: {refusal}", file=sys.stderr)
        return 2
    body = (payload / "PULL_REQUEST.md").read_text("utf-8").replace("{version}", version)
    texts = {recipe.PATCH: mail, "PULL_REQUEST.md": body}
    texts |= {path: text for path, text in files.items() if path.startswith("tests/")}
    for name, text in texts.items():
        (options.out / name).parent.mkdir(parents=True, exist_ok=True)
        (options.out / name).write_text(text, "utf-8")
    print(f"{package} {version}: {recipe.SUBJECT}", *(options.out / name for name in texts), sep="\n  ")
    print(f"Apply it in a checkout of {package} with: git am {options.out / recipe.PATCH}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
