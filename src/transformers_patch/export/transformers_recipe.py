"""The pull request for transformers: training arguments keep an accelerator state that exists, unless a flag says not to.

transformers has a path for a state that was configured before, taken when `accelerator_config` says `use_configured_state`.
The change takes that path on the user's behalf. So it consists of a field, a few lines in front of the existing test, and
one new file, which is this package's `agreement.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

import libcst as cst
import libcst.matchers as m

from transformers_patch.export.recipe import LICENCE_NOTICE, Recipe, payload, require_package
from transformers_patch.export.sources import SourceTree, UnrecognisedSource

ARGUMENTS = "src/transformers/training_args.py"
AGREEMENT = "src/transformers/utils/accelerator_state.py"
TEST = "tests/trainer/test_accelerator_state.py"
_CLASS, _METHOD = "TrainingArguments", "_setup_devices"
_FIELD, _NEIGHBOUR, _SWITCH = "preserve_accelerator_state", "accelerator_config", "use_configured_state"

_FIELD_TEXT = """\
{name}: bool = field(
    default=True,{kw_only}
    metadata={{
        "help": (
            "Whether to keep an accelerator state that exists already, made by an `Accelerator` or a `PartialState`. "
            "`False` resets it, so that these arguments build a new one."
        )
    }},
)
"""
_DOCUMENTATION = (
    "preserve_accelerator_state (`bool`, *optional*, defaults to `True`):",
    "    Whether to keep an accelerator state that exists already, made by an `Accelerator` or a `PartialState`. Arguments",
    "    that ask for another device or mixed precision than this state has raise a `ValueError`. `False` resets the state,",
    "    so that these arguments build a new one. Without a state it makes no difference.",
)
_IMPORT = "from .utils import accelerator_state\n"
_KEEP = """\
if self.preserve_accelerator_state and accelerator_state.state_exists():
    # The state is used as it is, so arguments that ask for something else have to be told.
    accelerator_state.check(self)
    {table}["use_configured_state"] = True
"""
_NEW_DOCSTRING = '''"""Whether training arguments agree with a shared accelerator state that they are about to keep.

Preserving a state means training on it as it is. Where the arguments ask for something else, that must not pass silently:
what would change the numbers or the hardware raises, what cannot be changed any more on a live process group warns once.
"""'''
_BLANK = cst.EmptyLine(indent=False)


@dataclass(frozen=True)
class Places:
    """Where in `training_args.py` the change goes.

    Attributes:
        module: The syntax tree of the file.
        documentation: The class's docstring, or None where it has not the shape that can be added to.
        after: The field after which the new one is put.
        kw_only: Whether the new field is keyword-only, because every Python that the tree supports knows such fields.
        guard: The `if` that imports accelerate's states where accelerate is there.
        test: The `if` that decides whether the state is kept.
        table: The name of the dictionary that `test` looks into.
    """

    module: cst.Module
    documentation: cst.SimpleString | None
    after: cst.SimpleStatementLine
    kw_only: bool
    guard: cst.If
    test: cst.If
    table: str


class _Replace(cst.CSTTransformer):
    # Nodes compare by identity, so a node of the tree that was searched names exactly one place.

    def __init__(self, changes: dict[cst.CSTNode, Callable]) -> None:
        super().__init__()
        self.changes = changes

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> object:
        left = super().on_leave(original_node, updated_node)
        change = self.changes.get(original_node)
        return left if change is None else change(left)


def edit(tree: SourceTree) -> dict[str, str]:
    """Return the new text of every file of the pull request.

    Args:
        tree: A source tree of transformers.

    Raises:
        UnrecognisedSource: It is no such tree, has the change already, or has not the shape that the change relies on.
    """
    places = locate(tree)
    config = places.module.config_for_parsing

    def statement(text: str) -> cst.BaseStatement:
        return cst.parse_statement(text, config=config)

    keyword = "\n    kw_only=True," if places.kw_only else ""
    field = statement(_FIELD_TEXT.format(name=_FIELD, kw_only=keyword))
    gap = () if places.kw_only else (_BLANK,)
    changes: dict[cst.CSTNode, Callable] = {
        places.after: lambda node: cst.FlattenSentinel([node, field.with_changes(leading_lines=gap)]),
        places.guard: lambda node: node.with_deep_changes(node.body, body=[*node.body.body, statement(_IMPORT)]),
        places.test: lambda node: cst.FlattenSentinel([statement(_KEEP.format(table=places.table)), node]),
    }
    if places.documentation is not None:
        changes[places.documentation] = lambda node: node.with_changes(value=_documented(node.value))
    return {
        ARGUMENTS: places.module.visit(_Replace(changes)).code,
        AGREEMENT: agreement_text(python_3_10=places.kw_only),
        TEST: _spaced(cst.parse_module(payload("transformers", "test_accelerator_state.py"))).code,
    }


def body(tree: SourceTree) -> str:
    """Return the text of the pull request.

    Args:
        tree: The tree that `edit` was given.

    Raises:
        UnrecognisedSource: As for `edit`.
    """
    places = locate(tree)
    place = (
        f"a keyword-only field after `{_NEIGHBOUR}`, so no positional argument moves"
        if places.kw_only
        else "the last field of the class, because fields that are keyword-only need Python 3.10; no positional argument "
        "of `TrainingArguments` moves"
    )
    documented = (
        "The docstring describes it below `accelerator_config`."
        if places.documentation is not None
        else "The docstring of the class has no section that it could be added to; **describe the field there by hand**."
    )
    text = payload("transformers", "PULL_REQUEST.md")
    return Template(text).substitute(version=tree.version, place=place, documented=documented)


def locate(tree: SourceTree) -> Places:
    """Find every place of the change by syntax tree.

    Args:
        tree: A source tree of transformers.

    Raises:
        UnrecognisedSource: A place is missing or not alone, or the change is there already.
    """
    require_package(tree, "transformers")
    module = _parse(tree)
    cls = _one(tree, _classes(module), f"a dataclass {_CLASS}")
    fields = [line for line in cls.body.body if m.matches(line, _declares(m.Name()))]
    if any(m.matches(line, _declares(m.Name(_FIELD))) for line in fields) or tree.exists(AGREEMENT):
        raise UnrecognisedSource(
            f"{ARGUMENTS} of {tree.root} has {_FIELD!r} already, or the tree has {AGREEMENT}: the change is there. "
            "Give an unchanged source tree."
        )
    neighbour = _one(
        tree,
        [line for line in fields if m.matches(line, _declares(m.Name(_NEIGHBOUR)))],
        f"the field {_NEIGHBOUR} of {_CLASS}",
    )
    kw_only = _needs_python_3_10(module, fields)
    test, table = _find_test(tree, cls)
    return Places(
        module=module,
        documentation=_find_docstring(cls),
        after=neighbour if kw_only else fields[-1],
        kw_only=kw_only,
        guard=_one(
            tree, _guards(module), "`if is_accelerate_available():` that imports PartialState from accelerate.state"
        ),
        test=test,
        table=table,
    )


def _parse(tree: SourceTree) -> cst.Module:
    try:
        return cst.parse_module(tree.read(ARGUMENTS))
    except cst.ParserSyntaxError as error:
        raise UnrecognisedSource(f"{ARGUMENTS} of {tree.root} cannot be parsed: {error.message}") from None


def _one(tree: SourceTree, found: Sequence, what: str) -> object:
    if len(found) != 1:
        raise UnrecognisedSource(
            f"transformers {tree.version} is not in the shape that this change was written for: looked for {what} in "
            f"{ARGUMENTS} and found {len(found) or 'none'}. Nothing was written."
        )
    return found[0]


def _classes(module: cst.Module) -> list[cst.ClassDef]:
    decorator = m.Decorator(m.Name("dataclass") | m.Call(m.Name("dataclass")))
    matcher = m.ClassDef(name=m.Name(_CLASS), decorators=[m.ZeroOrMore(), decorator, m.ZeroOrMore()])
    return [node for node in module.body if m.matches(node, matcher)]


def _declares(name: m.Name) -> m.SimpleStatementLine:
    return m.SimpleStatementLine(body=[m.AnnAssign(target=name, value=m.Call(func=m.Name("field")))])


def _needs_python_3_10(module: cst.Module, fields: Sequence[cst.SimpleStatementLine]) -> bool:
    # dataclass evaluates annotations, and `X | None` between types needs 3.10: whoever imports the file has it.
    postponed = m.ImportFrom(
        module=m.Name("__future__"), names=[m.ZeroOrMore(), m.ImportAlias(m.Name("annotations")), m.ZeroOrMore()]
    )
    union = m.BinaryOperation(operator=m.BitOr())
    return not m.findall(module, postponed) and any(m.findall(line.body[0].annotation, union) for line in fields)


def _guards(module: cst.Module) -> list[cst.If]:
    source = m.Attribute(value=m.Name("accelerate"), attr=m.Name("state"))
    names = [m.ZeroOrMore(), m.ImportAlias(name=m.Name("PartialState")), m.ZeroOrMore()]
    line = m.SimpleStatementLine(body=[m.ImportFrom(module=source, names=names)])
    test = m.Call(func=m.Name("is_accelerate_available"), args=[])
    matcher = m.If(test=test, body=m.IndentedBlock(body=[m.ZeroOrMore(), line, m.ZeroOrMore()]))
    return [node for node in module.body if m.matches(node, matcher)]


def _switch() -> m.SimpleString:
    return m.SimpleString(value=m.MatchIfTrue(lambda text: text[1:-1] == _SWITCH))


def _calls(node: cst.CSTNode, owner: object, method: str, *arguments: m.Arg) -> Sequence[cst.CSTNode]:
    return m.findall(
        node, m.Call(func=m.Attribute(value=owner, attr=m.Name(method)), args=[*arguments, m.ZeroOrMore()])
    )


def _find_test(tree: SourceTree, cls: cst.ClassDef) -> tuple[cst.If, str]:
    methods = [node for node in cls.body.body if m.matches(node, m.FunctionDef(name=m.Name(_METHOD)))]
    method = _one(tree, methods, f"the method {_CLASS}.{_METHOD}")
    if not _calls(method, m.DoNotCare(), "_reset_state"):
        raise UnrecognisedSource(
            f"transformers {tree.version}: {_CLASS}.{_METHOD} in {ARGUMENTS} does not call `_reset_state`, so there is "
            "nothing to keep a state from. The change is not needed there, or its place is another."
        )
    index = m.SubscriptElement(slice=m.Index(value=_switch()))
    tests = m.findall(method, m.If(test=m.Subscript(value=m.Name(), slice=[index])))
    tests = [node for node in tests if node.orelse and _calls(node.orelse, m.DoNotCare(), "_reset_state")]
    test = _one(tree, tests, f'`if <name>["{_SWITCH}"]:` in {_METHOD} whose `else` calls `_reset_state`')
    table = test.test.value.value
    config = m.Attribute(value=m.Name("self"), attr=m.Name(_NEIGHBOUR))
    _one(tree, _calls(method, config, "pop", m.Arg(_switch())), f'`self.{_NEIGHBOUR}.pop("{_SWITCH}")` in {_METHOD}')
    _one(
        tree,
        _calls(method, m.Name(table), "pop", m.Arg(_switch())),
        f'`{table}.pop("{_SWITCH}")` in {_METHOD}, which keeps a second state from being built',
    )
    return test, table


def _find_docstring(cls: cst.ClassDef) -> cst.SimpleString | None:
    first = cls.body.body[0]
    if not m.matches(first, m.SimpleStatementLine(body=[m.Expr(value=m.SimpleString())])):
        return None
    text = first.body[0].value
    return text if _documented(text.value) is not None else None


def _documented(docstring: str) -> str | None:
    # The section of a field is its first line and what is indented deeper; blank lines that end it belong to what follows.
    lines = docstring.split("\n")
    starts = [number for number, line in enumerate(lines) if line.lstrip().startswith(f"{_NEIGHBOUR} (`")]
    if len(starts) != 1:
        return None
    indent = len(lines[starts[0]]) - len(lines[starts[0]].lstrip())
    end = starts[0] + 1
    while end < len(lines) - 1 and (not lines[end].strip() or lines[end].startswith(" " * (indent + 1))):
        end += 1
    while not lines[end - 1].strip():
        end -= 1
    return "\n".join([*lines[:end], *(" " * indent + line for line in _DOCUMENTATION), *lines[end:]])


def agreement_text(python_3_10: bool) -> str:
    """Return this package's `agreement.py` with the head that a file of transformers has; the code is the same.

    Args:
        python_3_10: Whether the tree supports no Python below 3.10. Older ones cannot evaluate `str | None`, so annotations
            are then postponed.
    """
    module = cst.parse_module((Path(__file__).parents[1] / "agreement.py").read_text("utf-8"))
    count = _imports(module)
    imports, code = module.body[1:count], module.body[count:]
    # transformers sorts accelerate among the packages of others, without a blank line between.
    imports = [
        node.with_changes(leading_lines=()) if "accelerate" in module.code_for_node(node) else node for node in imports
    ]
    future = cst.parse_statement("from __future__ import annotations").with_changes(leading_lines=[_BLANK])
    head = [cst.parse_statement(_NEW_DOCSTRING), *([] if python_3_10 else [future])]
    return LICENCE_NOTICE + _spaced(module.with_changes(header=(), body=[*head, *imports, *code])).code


def _imports(module: cst.Module) -> int:
    # How many statements the docstring and the imports at the top are.
    line = m.SimpleStatementLine(body=[m.Import() | m.ImportFrom() | m.Expr(value=m.SimpleString())])
    return next(number for number, node in enumerate(module.body) if not m.matches(node, line))


def _spaced(module: cst.Module) -> cst.Module:
    # transformers leaves two blank lines after the imports.
    number = _imports(module)
    first = module.body[number]
    comments = [line for line in first.leading_lines if line.comment]
    spaced = first.with_changes(leading_lines=[_BLANK, _BLANK, *comments])
    return module.with_changes(body=[*module.body[:number], spaced, *module.body[number + 1 :]])


RECIPE = Recipe(
    package="transformers",
    slug="preserve-accelerator-state",
    subject="Keep an existing accelerator state in TrainingArguments",
    body=body,
    edit=edit,
    message=payload("transformers", "message.txt"),
)
