#!/usr/bin/env python3
"""Write the declarations of the methods that extensions give the Accelerator, for type checkers and editors.

python tools/extension_methods.py           writes src/accelerate/extensions/methods.pyi
python tools/extension_methods.py --check   writes nothing; status 1 if the file is not up to date
"""

import argparse
import inspect
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

from accelerate import extension

PAGE = pathlib.Path(__file__).parents[1] / "src" / "accelerate" / "extensions" / "methods.pyi"
HEAD = '''"""Methods and attributes of the Accelerator that come from extensions. Written by tools/extension_methods.py."""
# ruff: noqa: I001
'''


def signature_of(function: Callable[..., Any]) -> str:
    """Return the signature of a method whose function takes the Accelerator first, with `self` in its place."""
    _, *parameters = inspect.signature(function).parameters.values()
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    plain = [each.replace(default=...) if each.default is not each.empty else each for each in parameters]
    text = str(inspect.signature(function).replace(parameters=[own, *plain]))
    text = re.sub(r"(?<![\w.])Any\b", "typing.Any", text)  # a bare Any loses its module
    return text.replace("=Ellipsis", "=...").replace("= Ellipsis", "= ...").replace("Ellipsis", "...")


def page() -> str:
    """Return the text of the file."""
    lines = []
    for spec in extension.specs():
        for name, address in spec.methods.items():
            lines.append(f"    def {name}{signature_of(extension.imported(address))}: ...")
        for name, address in spec.attributes.items():
            lines.append(f"    @property\n    def {name}{signature_of(extension.imported(address))}: ...")
    body = "\n".join(lines)
    modules = {".".join(path.split(".")[:-1]) for path in re.findall(r"\b[a-z_]\w*(?:\.\w+)+", body)}
    imports = "".join(f"import {module}\n" for module in sorted(modules))
    return f"{HEAD}\n{imports}\nclass ExtensionMethods:\n{body}\n"


def main() -> int:
    """Write or check the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if the file is not up to date")
    args = parser.parse_args()
    text = page()
    if args.check:
        if PAGE.read_text("utf-8") == text:
            return 0
        print(f"{PAGE.name} is not up to date: run python tools/extension_methods.py", file=sys.stderr)
        return 1
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
