"""The pull request for accelerate: what is prepared already is not wrapped a second time.

The change consists of a new file and of single lines in the class `Accelerator`: a registry made in the constructor, a question
at the start of `_prepare_one`, a decorator on the four `prepare_*` methods, and a reset in `free_memory`.
"""

import ast
from pathlib import Path

from source_file import SourceFile, UnknownSource

NAME = "double-prepare"
PACKAGE = "accelerate"
SUBJECT = "Detect objects that are prepared twice in Accelerator._prepare_one"
PATCH = "0001-double-prepare.patch"
ACCELERATOR = "src/accelerate/accelerator.py"
CHANGES = (ACCELERATOR,)
NEW = {"src/accelerate/utils/prepared.py": "prepared.py", "tests/test_double_prepare.py": "test_double_prepare.py"}
LISTS = ["self._optimizers", "self._models", "self._schedulers", "self._dataloaders"]
METHODS = ("prepare_model", "prepare_optimizer", "prepare_scheduler", "prepare_data_loader")
DISPATCH = ["self", "obj", "first_pass", "device_placement"]
QUESTION = """\
# What is prepared already must not be wrapped again
prepared = find_prepared(self, obj, first_pass, device_placement)
if prepared is not None:
    return prepared

"""


def edit(root: Path) -> dict[str, str]:
    """Return the new text of the file that changes; `NEW` names the files that are added.

    Raises:
        UnknownSource: The tree has the change already, or not the shape that it needs.
    """
    file = SourceFile(root, ACCELERATOR)
    if "_prepared_objects" in file.text:
        raise UnknownSource(f"the change is already in {root}: found `_prepared_objects` in {ACCELERATOR}.")
    line = file.import_from("utils.other")
    file.add_below(line, "from .utils.prepared import PreparedObjects, find_prepared, remember\n")
    cls = file.cls("Accelerator")
    _add_below_lists(file, file.method(cls, "__init__"), "self._prepared_objects = PreparedObjects()\n")
    _add_below_lists(file, file.method(cls, "free_memory"), "self._prepared_objects.clear()\n")
    _add_at_start(file, file.method(cls, "prepare"), "self._prepared_objects.begin_call()\n")
    dispatch = file.method(cls, "_prepare_one")
    names = [argument.arg for argument in dispatch.args.args]
    if names != DISPATCH:
        raise file.refuse(f"`_prepare_one({', '.join(DISPATCH)})`", f"`_prepare_one({', '.join(names)})`")
    _add_at_start(file, dispatch, QUESTION)
    for name in METHODS:
        method = file.method(cls, name)
        file.add(method.lineno, "@remember\n", method.col_offset)
    return {ACCELERATOR: file.changed()}


def _add_at_start(file: SourceFile, method: ast.FunctionDef, text: str) -> None:
    documented = ast.get_docstring(method) is not None
    file.add_above(method.body[int(documented)], text)


def _add_below_lists(file: SourceFile, method: ast.FunctionDef, text: str) -> None:
    assigned = [node for node in method.body if isinstance(node, ast.Assign) and ast.unparse(node.value) == "[]"]
    emptied = {ast.unparse(node.targets[0]): node for node in assigned}
    for name in LISTS:
        if name not in emptied:
            raise file.refuse(f"`{name} = []` in `Accelerator.{method.name}`", ", ".join(emptied) or "no list emptied")
    file.add_below(max((emptied[name] for name in LISTS), key=lambda node: node.lineno), text)
