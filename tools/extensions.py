#!/usr/bin/env python3
"""Write what follows from the specs of the extensions: the methods that they add, and the table of all extensions.

python tools/extensions.py           writes src/accelerate/extensions/methods.pyi, and the table of docs/architecture.md
python tools/extensions.py --check   writes nothing; status 1 if one of them is not up to date
"""

import argparse
import inspect
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

from accelerate import extension

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "src" / "accelerate" / "extensions"
METHODS, PAGE = FOLDER / "methods.pyi", ROOT / "docs" / "architecture.md"
HEAD = '"""Methods and attributes of the Accelerator that come from extensions. Written by tools/extensions.py."""\n'
BEGIN, END = "<!-- extensions: written by tools/extensions.py -->\n", "<!-- end of extensions -->\n"
IMPORT = re.compile(r"^\s*from accelerate\.extensions(?:\.| import )(\w+)", re.MULTILINE)


def signature_of(function: Callable[..., Any]) -> str:
    """Return the signature of a method: its function takes the Accelerator first, with `self` in its place, if it is not static."""
    signature = inspect.signature(inspect.unwrap(function))
    parameters = list(signature.parameters.values())
    if not isinstance(function, staticmethod):
        parameters[0] = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    plain = [each.replace(default=...) if each.default is not each.empty else each for each in parameters]
    return str(signature.replace(parameters=plain)).replace("Ellipsis", "...")


def methods() -> str:
    """Return the text of the declarations."""
    lines = []
    for spec in extension.specs():
        for name, address in spec.methods.items():
            function = extension.imported(address)
            static = "    @staticmethod\n" if isinstance(function, staticmethod) else ""
            lines.append(f"{static}    def {name}{signature_of(function)}: ...")
        for name, address in spec.attributes.items():
            lines.append(f"    @property\n    def {name}{signature_of(extension.imported(address))}: ...")
    body = re.sub(r"(?<![\w.])Any\b", "typing.Any", "\n".join(lines))  # newer Pythons shorten it
    modules = {path.rpartition(".")[0] for path in re.findall(r"\b[a-z_]\w*(?:\.\w+)+", body)}
    imports = "".join(f"import {module}\n" for module in sorted(modules))
    return f"{HEAD}\n{imports}\nclass ExtensionMethods:\n{body}\n"


def table() -> str:
    """Return the table of all extensions: purpose, and the extensions that each imports."""
    rows = ["| extension | what it is | imports |", "|---|---|---|"]
    for spec in sorted(extension.specs(), key=lambda spec: spec.name):
        purpose = (sys.modules[f"accelerate.extensions.{spec.name}"].__doc__ or "").partition("\n")[0].rstrip(".")
        texts = [file.read_text("utf-8") for file in sorted((FOLDER / spec.name).rglob("*.py"))]
        others = {name for text in texts for name in IMPORT.findall(text)} - {spec.name}
        link = f"[{spec.name}](https://github.com/OWNER/accelerate-fork/blob/main/src/accelerate/extensions/{spec.name}/README.md)"
        rows.append(f"| {link} | {purpose} | {', '.join(sorted(others)) or '-'} |")
    return "\n".join([*rows, ""])


def main() -> int:
    """Write or check the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a file is not up to date")
    args = parser.parse_args()
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    page = before + BEGIN + table() + END + rest.partition(END)[2]
    stale = [(path, text) for path, text in ((METHODS, methods()), (PAGE, page)) if path.read_text("utf-8") != text]
    for path, text in stale:
        if args.check:
            print(f"{path.name} is not up to date: run python tools/extensions.py", file=sys.stderr)
        else:
            path.write_text(text, "utf-8")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
