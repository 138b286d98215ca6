"""The pull request for transformers' arguments: training arguments keep an accelerator state that exists, unless a flag says not to.

transformers has a path for a state that was configured before, taken when `accelerator_config` says `use_configured_state`.
The change takes that path on the user's behalf. So it consists of a field, a few lines in front of the existing test, and
one new file, which is the shim's `agreement.py`.
"""

import ast
import re
from pathlib import Path

from source_file import SourceFile, UnknownSource

NAME = "state-reset"
PACKAGE = "transformers"
SUBJECT = "Keep an existing accelerator state in TrainingArguments"
PATCH = "0001-preserve-accelerator-state.patch"
ARGUMENTS = "src/transformers/training_args.py"
CHANGES = (ARGUMENTS,)
AGREEMENT = "src/transformers/utils/accelerator_state.py"
NEW = {"tests/trainer/test_accelerator_state.py": "test_accelerator_state.py"}
SHIM = Path(__file__).resolve().parents[2] / "src/transformers_patch"
FIELD = """
preserve_accelerator_state: bool = field(
    default=True,
    metadata={
        "help": (
            "Whether to keep an accelerator state that exists already, made by an `Accelerator` or a `PartialState`. "
            "`False` resets it, so that these arguments build a new one."
        )
    },
)
"""
DOCUMENTATION = """\
preserve_accelerator_state (`bool`, *optional*, defaults to `True`):
    Whether to keep an accelerator state that exists already, made by an `Accelerator` or a `PartialState`. Arguments
    that ask for another device or mixed precision than this state has raise a `ValueError`. `False` resets the state,
    so that these arguments build a new one. Without a state it makes no difference.
"""
KEEP = """\
if self.preserve_accelerator_state and accelerator_state.state_exists():
    # The state is used as it is, so arguments that ask for something else raise here.
    accelerator_state.check(self)
    {table}["use_configured_state"] = True
"""
AGREEMENT_HEAD = '''\
"""Whether training arguments agree with a shared accelerator state that they are about to keep.

Preserving a state means training on it as it is. Where the arguments ask for something else, that must not pass silently:
what would change the numbers or the hardware raises, what cannot be changed any more on a live process group warns once.
"""

from __future__ import annotations

'''


def edit(root: Path) -> dict[str, str]:
    """Return the new text of the file that changes and of the module that comes with it; `NEW` names what is added, too.

    Raises:
        UnknownSource: The tree has the change already, or not the shape that it needs.
    """
    file = SourceFile(root, ARGUMENTS)
    if "preserve_accelerator_state" in file.text:
        raise UnknownSource(f"the change is already in {root}: found `preserve_accelerator_state` in {ARGUMENTS}.")
    guards = [node for node in file.tree.body if _imports_states(node)]
    guard = file.only(guards, "`if is_accelerate_available():` that imports PartialState from accelerate.state")
    file.add_below(guard.body[-1], "from .utils import accelerator_state\n")
    cls = file.cls("TrainingArguments")
    fields = [node for node in cls.body if isinstance(node, ast.AnnAssign) and _calls(node, "field")]
    if not fields:
        raise file.refuse("fields of the dataclass `TrainingArguments`", "none")
    # The last one, so that no positional argument moves.
    file.add_below(fields[-1], FIELD)
    _document(file, cls)
    _keep(file, file.method(cls, "_setup_devices"))
    return {ARGUMENTS: file.changed(), AGREEMENT: _agreement()}


def _imports_states(node: ast.stmt) -> bool:
    if not isinstance(node, ast.If) or ast.unparse(node.test) != "is_accelerate_available()":
        return False
    imports = [line for line in node.body if isinstance(line, ast.ImportFrom) and line.module == "accelerate.state"]
    return any(alias.name == "PartialState" for line in imports for alias in line.names)


def _calls(node: ast.AST, name: str) -> bool:
    functions = [ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)]
    return any(function.rpartition(".")[2] == name for function in functions)


def _document(file: SourceFile, cls: ast.ClassDef) -> None:
    """Describe the field in front of the section of its neighbour in the docstring."""
    docstring = cls.body[0]
    lines = list(enumerate(file.text.splitlines(), 1))[docstring.lineno - 1 : docstring.end_lineno]
    sections = [(number, line) for number, line in lines if line.lstrip().startswith("accelerator_config (`")]
    number, line = file.only(sections, "the section `accelerator_config` in the docstring of `TrainingArguments`")
    file.add(number, DOCUMENTATION, len(line) - len(line.lstrip()))


def _keep(file: SourceFile, method: ast.FunctionDef) -> None:
    """Insert the comparison in front of the test that decides whether the state is kept."""
    tests = []
    for node in ast.walk(method):
        if isinstance(node, ast.If) and any(_calls(line, "_reset_state") for line in node.orelse):
            match = re.fullmatch(r"(\w+)\['use_configured_state'\]", ast.unparse(node.test))
            tests += [(node, match[1])] if match else []
    test, table = file.only(tests, '`if <name>["use_configured_state"]:` whose `else` calls `_reset_state`')
    # The entry comes from the configuration, and leaves the table again before a second state is built.
    for owner in ("self.accelerator_config", table):
        if f"{owner}.pop('use_configured_state'" not in ast.unparse(method):
            raise file.refuse(f'`{owner}.pop("use_configured_state")` in `_setup_devices`', "none")
    file.add_above(test, KEEP.format(table=table))


def _agreement() -> str:
    """Return the shim's `agreement.py` with the head and the spacing that a file of transformers has."""
    text = (SHIM / "agreement.py").read_text("utf-8")
    code = text.split('"""\n\n', 1)[1].replace("import torch\n\nfrom accelerate", "import torch\nfrom accelerate")
    return AGREEMENT_HEAD + code
