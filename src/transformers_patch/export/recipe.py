"""What a pull request is made of, and where the recipe for each package is found."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers_patch.export.sources import SourceTree, UnrecognisedSource

# Imported late: a recipe needs libcst, which only those who export install.
RECIPES = {
    "accelerate": "transformers_patch.export.accelerate_recipe",
    "transformers": "transformers_patch.export.transformers_recipe",
}
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


class MissingTool(RuntimeError):
    """A program or package that the export needs is not installed."""


@dataclass(frozen=True)
class Recipe:
    """How one pull request is made from one package's source tree.

    Attributes:
        package: The importable name of the package it changes.
        slug: A few words with hyphens for file names, such as "double-prepare".
        subject: The first line of the commit message, without "[PATCH]", in ASCII.
        body: Returns the text of the pull request, in Markdown, for a tree.
        edit: Returns the complete new text of every changed and every new file, by its path from the root. It raises
            `UnrecognisedSource`, naming what it looked for, where, and what it found, and changes nothing.
        message: The rest of the commit message, paragraphs of lines that fit into 72 columns.
    """

    package: str
    slug: str
    subject: str
    body: Callable[[SourceTree], str]
    edit: Callable[[SourceTree], dict[str, str]]
    message: str = ""


def load(package: str) -> Recipe:
    """Return the recipe for a package: the attribute `RECIPE` of its module.

    Args:
        package: A key of `RECIPES`.

    Raises:
        ValueError: There is no recipe for that package.
        MissingTool: libcst is not installed.
    """
    if package not in RECIPES:
        raise ValueError(f"--package {package!r} is not known; known are {', '.join(sorted(RECIPES))}.")
    try:
        return importlib.import_module(RECIPES[package]).RECIPE
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "libcst":
            raise
        raise MissingTool(
            'the export reads syntax trees with libcst, which is not installed: pip install "accelerate[export]"'
        ) from error


def payload(package: str, name: str) -> str:
    """Return one of our own texts that travel with a pull request: a file below `payload/<package>`."""
    return (Path(__file__).parent / "payload" / package / name).read_text("utf-8")


def require_package(tree: SourceTree, package: str) -> None:
    """Refuse a tree of another package.

    Raises:
        UnrecognisedSource: It is another one, or none.
    """
    if tree.package != package:
        raise UnrecognisedSource(
            f"looked for the package {package!r} in {tree.root}/src and found {tree.package!r} {tree.version}. "
            f"Give the source tree of {package}, or another --package."
        )
