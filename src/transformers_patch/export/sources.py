"""The source tree that a pull request is written against: which package it is, which version, and what its files say."""

import re
from functools import cached_property
from pathlib import Path

_VERSION = re.compile(r"^__version__\s*=\s*[\"']([^\"']+)[\"']", re.M)


class UnrecognisedSource(RuntimeError):
    """The tree is not the package that was asked for, or not in the shape that a recipe knows; nothing was written."""


class SourceTree:
    """An unpacked source distribution or a git checkout, which is only read.

    Args:
        root: The folder that holds `src`.

    Raises:
        UnrecognisedSource: There is no such folder.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "src/thing").mkdir(parents=True)
        >>> _ = (folder / "src/thing/__init__.py").write_text('__version__ = "1.2"', "utf-8")
        >>> SourceTree(folder).package, SourceTree(folder).version
        ('thing', '1.2')
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise UnrecognisedSource(f"--source {str(root)!r} is not a folder; give the folder of a source tree.")

    def __repr__(self) -> str:
        return f"SourceTree({str(self.root)!r})"

    def exists(self, relative: str) -> bool:
        """Say whether the tree has a file or a folder of that name, relative to its root."""
        return (self.root / relative).exists()

    def read(self, relative: str) -> str:
        """Return the text of a file, its line ends as they are.

        Args:
            relative: The path from the root, with forward slashes.

        Raises:
            UnrecognisedSource: There is no such file, it is not UTF-8, or it has carriage returns, which `git am` strips
                from a patch, so that the patch would not apply.
        """
        path = self.root / relative
        if not path.is_file():
            raise UnrecognisedSource(
                f"looked for the file {relative} in {self.root}; it is not there. Is this the root of a source tree?"
            )
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise UnrecognisedSource(f"{relative} in {self.root} is not UTF-8: {error}.") from None
        if "\r" in text:
            raise UnrecognisedSource(
                f"{relative} in {self.root} has carriage returns, which a mailed patch cannot carry. Check it out again "
                "with `git config core.autocrlf false`."
            )
        return text

    def executable(self, relative: str) -> bool:
        """Say whether a file of the tree has its executable bit set, which a patch has to repeat."""
        path = self.root / relative
        return path.is_file() and bool(path.stat().st_mode & 0o100)

    @cached_property
    def _identity(self) -> tuple[str, str]:
        found = {}
        for path in sorted(self.root.glob("src/*/__init__.py")):
            if match := _VERSION.search(path.read_text("utf-8", errors="replace")):
                found[path.parent.name] = match[1]
        if len(found) != 1:
            raise UnrecognisedSource(
                f"looked for one package with a `__version__` in {self.root}/src/*/__init__.py and found "
                f"{', '.join(found) or 'none'}. Give the root of an unpacked source distribution or of a git checkout."
            )
        return next(iter(found.items()))

    @property
    def package(self) -> str:
        """The importable name of the package in the tree."""
        return self._identity[0]

    @property
    def version(self) -> str:
        """The version that the package gives itself."""
        return self._identity[1]
