"""The reference has every public name, and is what the docstrings say."""

import importlib
import importlib.util
import inspect
import pathlib
import re
from collections.abc import Iterator

import accelerate
from accelerate import extension

ROOT = pathlib.Path(__file__).parents[3]
spec = importlib.util.spec_from_file_location("api_reference", ROOT / "tools/api_reference.py")
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def test_the_page_has_every_public_name_and_is_up_to_date():
    listed = {name for modules in tool.SECTIONS.values() for name in modules.get("accelerate", "").split()}
    assert listed == {name for name in accelerate.__all__ if not name.startswith("__")}
    assert tool.page() == tool.PAGE.read_text("utf-8"), "run python tools/api_reference.py"


CONTRACT = re.compile(r"(?:Collective: call on every rank|Not a collective)[.,]|No method is a collective\.")


def functions_of_the_page() -> Iterator[tuple[str, str]]:
    """Yield the functions and methods of the page, each with its docstring and that of its class."""
    values = {
        f"{module}.{name}": getattr(importlib.import_module(module), name)
        for modules in tool.SECTIONS.values()
        for module, names in modules.items()
        for name in names.split()
    }
    values |= {name: extension.imported(path) for spec in extension.specs() for name, path in spec.methods.items()}
    for path, value in values.items():
        if not inspect.isclass(value):
            yield path, value.__doc__ or ""
            continue
        for name, member in vars(value).items():
            function = getattr(member, "__func__", member)
            if inspect.isfunction(function) and not name.startswith("_") and "accelerate" in function.__module__:
                yield f"{path}.{name}", f"{function.__doc__} {value.__doc__}"


def test_each_function_of_the_page_says_whether_it_is_a_collective():
    functions = dict(functions_of_the_page())
    assert len(functions) > 200
    lacking = [path for path, docstring in functions.items() if not CONTRACT.search(docstring)]
    assert not lacking, "add 'Collective: call on every rank.' or 'Not a collective.' to their docstrings"
