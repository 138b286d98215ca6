"""Set the git address of this project's copy, in every file that names it.

    python tools/set_owner.py acme/accelerate

The address in use is read from `url=` in setup.py; each occurrence of it in the pages, README.md, mkdocs.yml and
setup.py is replaced. `--check` names the files that have another address and changes nothing. Exit status 1 where something is
wrong.
"""

import argparse
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
URL = re.compile(r'url="https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?[#"]')
ADDRESS = re.compile(r"[\w.-]+/[\w.-]+")


def files(root: pathlib.Path) -> list[pathlib.Path]:
    """Return the files that may name the address."""
    single = [root / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "mkdocs.yml", "setup.py")]
    return [*(path for path in single if path.exists()), *sorted((root / "docs").rglob("*.md"))]


def current(root: pathlib.Path) -> str:
    """Return the address in setup.py, as OWNER/NAME.

    Raises:
        ValueError: setup.py has no `url=` of GitHub.
    """
    found = URL.search((root / "setup.py").read_text("utf-8"))
    if found is None:
        raise ValueError(
            "setup.py has no url= of the form https://github.com/OWNER/NAME; write one, then call this again."
        )
    return found[1]


def set_owner(root: pathlib.Path, address: str) -> list[pathlib.Path]:
    """Put an address in the place of the current one, and return the files that changed.

    Args:
        root: The checkout.
        address: OWNER/NAME on GitHub.

    Raises:
        ValueError: The address is not of that form.
    """
    if not ADDRESS.fullmatch(address):
        raise ValueError(f"{address!r} is no address; give OWNER/NAME, for instance acme/accelerate.")
    before = current(root)
    pattern = re.compile(rf"(?<![\w./-]){re.escape(before)}(?![\w-])|(?<=github\.com/){re.escape(before)}(?![\w-])")
    changed = []
    for path in files(root):
        text = path.read_text("utf-8")
        replaced = pattern.sub(address, text)
        if replaced != text:
            path.write_text(replaced, "utf-8")
            changed.append(path)
    return changed


def strangers(root: pathlib.Path) -> list[str]:
    """Return a line for each address of a copy of this project that is not the current one."""
    address = current(root)
    pattern = re.compile(r"github\.com/([\w.-]+/[\w-]*accelerate-fork[\w-]*)")
    found = []
    for path in files(root):
        for other in sorted(set(pattern.findall(path.read_text("utf-8"))) - {address}):
            found.append(f"{path.relative_to(root)}: names {other}, and setup.py {address}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "address", nargs="?", help="OWNER/NAME of your copy on GitHub; without it, prints the current one"
    )
    parser.add_argument("--check", action="store_true", help="change nothing; say which files name another address")
    args = parser.parse_args()
    try:
        if args.check:
            problems = strangers(ROOT)
            print("\n".join(problems) or f"the address is {current(ROOT)} everywhere")
            return bool(problems)
        if args.address is None:
            print(current(ROOT))
            return 0
        for path in set_owner(ROOT, args.address):
            print(path.relative_to(ROOT))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
