"""The pull request for accelerate: what is prepared already is not wrapped a second time.

The change consists of a new file and of single lines at places that are found in the syntax tree, by the names of methods
and attributes: an import, a registry made in the constructor, a question at the start of `_prepare_one`, a decorator on the
four `prepare_*` methods, and a reset in `free_memory`.
"""

from collections.abc import Callable, Sequence

import libcst as cst
from libcst import matchers as m

from transformers_patch.export.recipe import LICENCE_NOTICE, Recipe, payload, require_package
from transformers_patch.export.sources import SourceTree, UnrecognisedSource

ACCELERATOR = "src/accelerate/accelerator.py"
REGISTRY = "src/accelerate/utils/prepared.py"
TEST = "tests/test_double_prepare.py"
LISTS = ("_optimizers", "_models", "_schedulers", "_dataloaders")
METHODS = ("prepare_model", "prepare_optimizer", "prepare_scheduler", "prepare_data_loader")
DISPATCH = ("self", "obj", "first_pass", "device_placement")

_IMPORT = "from .utils.prepared import PreparedObjects, find_prepared, remember\n"
_MAKE = "self._prepared_objects = PreparedObjects()\n"
_BEGIN = "self._prepared_objects.begin_call()\n"
_FORGET = "self._prepared_objects.clear()\n"
_ASK = """\
# What is prepared already must not be wrapped again
prepared = find_prepared(self, obj, first_pass, device_placement)
if prepared is not None:
    return prepared

"""

MESSAGE = """\
Preparing an object a second time nests one distributed wrapper in
another, or registers the model twice, so that a checkpoint costs twice
as much. A model that was prepared for evaluation and is then prepared
for training may even stay unwrapped.

Each Accelerator now remembers by identity what it has prepared, with
weak references. _prepare_one returns the prepared object for one that
it knows, with a warning that points at the caller's line.
"""


def edit(tree: SourceTree) -> dict[str, str]:
    """Return the new text of every changed and every new file.

    Args:
        tree: accelerate's source.

    Raises:
        UnrecognisedSource: The tree has the change already, or not the shape that it needs.

    Example:
        >>> import tempfile
        >>> try:
        ...     edit(SourceTree(tempfile.mkdtemp()))
        ... except UnrecognisedSource as refusal:
        ...     print("`__version__`" in str(refusal))
        True
    """
    require_package(tree, "accelerate")
    source = tree.read(ACCELERATOR)
    _refuse_applied(tree, source)
    try:
        module = cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise UnrecognisedSource(f"{ACCELERATOR} in {tree.root} is not Python that can be read: {error}") from error
    transformer = _Insert(str(tree.root))
    changed = module.visit(transformer).code
    transformer.check_complete()
    return {
        ACCELERATOR: changed,
        REGISTRY: f"{LICENCE_NOTICE}\n{payload('accelerate', 'prepared.py')}",
        TEST: f"{LICENCE_NOTICE}\n{payload('accelerate', 'test_double_prepare.py')}",
    }


def body(tree: SourceTree) -> str:
    """Return the text of the pull request.

    Args:
        tree: The source that the patch is written against, which the text names.
    """
    return payload("accelerate", "PULL_REQUEST.md").replace("{version}", tree.version)


def _refuse_applied(tree: SourceTree, source: str) -> None:
    known = [path for path in (REGISTRY, TEST) if tree.exists(path)]
    known += [f"the name `_prepared_objects` in {ACCELERATOR}"] if "_prepared_objects" in source else []
    if known:
        raise UnrecognisedSource(
            f"the change is already in {tree.root}: found {', '.join(known)}. Export against a tree without it."
        )


def _statements(text: str) -> list[cst.BaseStatement]:
    """Parse our own lines, with the comments in front of them and without an empty line more than they have."""
    module = cst.parse_module(text)
    first, *others = module.body
    return [first.with_changes(leading_lines=[*module.header, *first.leading_lines]), *others]


def _assigns(statement: cst.CSTNode, attributes: Sequence[str]) -> str | None:
    """Return which attribute of `self` a statement sets to an empty list, if it sets one of these."""
    for attribute in attributes:
        target = m.AssignTarget(target=m.Attribute(value=m.Name("self"), attr=m.Name(attribute)))
        empty = m.Assign(targets=[target], value=m.List(elements=[]))
        if m.matches(statement, m.SimpleStatementLine(body=[empty])):
            return attribute
    return None


def _after_docstring(function: cst.FunctionDef) -> int:
    return int(function.get_docstring() is not None)


class _Insert(cst.CSTTransformer):
    """Inserts our lines into the class `Accelerator`, and remembers which places it has found."""

    def __init__(self, root: str) -> None:
        super().__init__()
        self._root = root
        self._path: list[str] = []
        self._done: list[str] = []
        self._edits: dict[str, Callable[[cst.FunctionDef], cst.FunctionDef]] = {
            "__init__": lambda node: self._after_lists(node, _MAKE),
            "free_memory": lambda node: self._after_lists(node, _FORGET),
            "prepare": lambda node: self._at_start(node, _BEGIN),
            "_prepare_one": self._ask,
            **dict.fromkeys(METHODS, self._decorate),
        }

    def _unknown(self, looked_for: str, found: str) -> UnrecognisedSource:
        return UnrecognisedSource(f"looked for {looked_for} in {ACCELERATOR} of {self._root} and found {found}.")

    def check_complete(self) -> None:
        """Raise unless every place was found exactly once."""
        for name in ("the import", *self._edits):
            count = self._done.count(name)
            if count != 1:
                what = "an import from `.utils.other`" if name == "the import" else f"`Accelerator.{name}`"
                raise self._unknown(what, "none" if count == 0 else f"{count} of them")

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self._path.append(node.name.value)

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.ClassDef:
        self._path.pop()
        return updated_node

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._path.append(node.name.value)

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        name = self._path.pop()
        if self._path != ["Accelerator"] or name not in self._edits:
            return updated_node
        if not isinstance(updated_node.body, cst.IndentedBlock):
            raise self._unknown(f"a block of statements in `Accelerator.{name}`", "a body on one line")
        self._done.append(name)
        return self._edits[name](updated_node)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.BaseStatement]:
        other = m.Attribute(value=m.Name("utils"), attr=m.Name("other"))
        line = m.SimpleStatementLine(body=[m.ImportFrom(module=other, relative=[m.Dot()])])
        if self._path or not m.matches(updated_node, line):
            return updated_node
        self._done.append("the import")
        return cst.FlattenSentinel([updated_node, *_statements(_IMPORT)])

    def _at(self, node: cst.FunctionDef, position: int, text: str) -> cst.FunctionDef:
        lines = list(node.body.body)
        return node.with_deep_changes(node.body, body=[*lines[:position], *_statements(text), *lines[position:]])

    def _at_start(self, node: cst.FunctionDef, text: str) -> cst.FunctionDef:
        return self._at(node, _after_docstring(node), text)

    def _after_lists(self, node: cst.FunctionDef, text: str) -> cst.FunctionDef:
        found = {name: i for i, line in enumerate(node.body.body) if (name := _assigns(line, LISTS))}
        if missing := [name for name in LISTS if name not in found]:
            raise self._unknown(
                f"`self.{missing[0]} = []` in `Accelerator.{node.name.value}`", ", ".join(found) or "no list emptied"
            )
        return self._at(node, max(found.values()) + 1, text)

    def _ask(self, node: cst.FunctionDef) -> cst.FunctionDef:
        names = tuple(parameter.name.value for parameter in node.params.params)
        if names != DISPATCH:
            raise self._unknown(f"`_prepare_one({', '.join(DISPATCH)})`", f"`_prepare_one({', '.join(names)})`")
        called = {call.func.attr.value for call in m.findall(node, m.Call(func=m.Attribute(value=m.Name("self"))))}
        if missing := [name for name in METHODS if name not in called]:
            raise self._unknown(
                f"a call of `self.{missing[0]}` in `Accelerator._prepare_one`", ", ".join(sorted(called))
            )
        asked = self._at_start(node, _ASK)
        # The empty line between our lines and what was the first statement.
        position = _after_docstring(node) + 2
        follower = asked.body.body[position]
        spaced = follower.with_changes(leading_lines=[cst.EmptyLine(indent=False), *follower.leading_lines])
        lines = [*asked.body.body[:position], spaced, *asked.body.body[position + 1 :]]
        return asked.with_deep_changes(asked.body, body=lines)

    def _decorate(self, node: cst.FunctionDef) -> cst.FunctionDef:
        if len(node.params.params) < 2:
            raise self._unknown(f"`{node.name.value}(self, object, ...)`", "fewer parameters")
        return node.with_changes(decorators=[*node.decorators, cst.Decorator(decorator=cst.Name("remember"))])


RECIPE = Recipe(
    package="accelerate",
    slug="double-prepare",
    subject="Detect objects that are prepared twice in Accelerator._prepare_one",
    body=body,
    edit=edit,
    message=MESSAGE,
)
