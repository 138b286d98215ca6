import ast
import difflib
import inspect
import textwrap
from pathlib import Path

import pytest

import transformers_patch
from transformers_patch.export.sources import SourceTree, UnrecognisedSource

pytest.importorskip("libcst", reason='the export needs libcst: pip install "accelerate[export]"')

from transformers_patch.export import transformers_recipe as recipe

OLD_PYTHON = "Optional[Union[dict, str]]"


def added(folder):
    """Return the inserted lines of `training_args.py`; nothing may be removed."""
    tree = SourceTree(folder)
    new = recipe.edit(tree)[recipe.ARGUMENTS]
    lines = list(difflib.ndiff(tree.read(recipe.ARGUMENTS).splitlines(), new.splitlines()))
    assert not [line for line in lines if line.startswith("-")]
    return [line[2:] for line in lines if line.startswith("+")], new


def class_of(text):
    return next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))


def test_three_files_change(make_tree):
    files = recipe.edit(SourceTree(make_tree()))
    assert list(files) == [recipe.ARGUMENTS, recipe.AGREEMENT, recipe.TEST]
    for text in files.values():
        ast.parse(text)


def test_the_state_is_kept_before_it_is_decided(make_tree):
    _, text = added(make_tree())
    method = next(n for n in class_of(text).body if getattr(n, "name", "") == "_setup_devices")
    kept, test = method.body[2:4]
    assert ast.unparse(kept.test) == "self.preserve_accelerator_state and accelerator_state.state_exists()"
    assert [ast.unparse(line) for line in kept.body] == [
        "accelerator_state.check(self)",
        "table['use_configured_state'] = True",
    ]
    assert ast.unparse(test.test) == "table['use_configured_state']" and test.orelse
    # The remark stays with the statement that it is about.
    lines = text.splitlines()
    assert lines[lines.index("        # a remark on the test") + 1].startswith(
        '        if table["use_configured_state"]'
    )


@pytest.mark.parametrize(
    "annotation, after, keyword", [("dict | None", "accelerator_config", True), (OLD_PYTHON, "last", False)]
)
def test_no_positional_argument_moves(make_tree, annotation, after, keyword):
    _, text = added(make_tree(annotation=annotation))
    fields = [node for node in class_of(text).body if isinstance(node, ast.AnnAssign)]
    names = [node.target.id for node in fields]
    position = names.index("preserve_accelerator_state")
    assert names[position - 1] == after
    options = {keyword.arg: keyword.value for keyword in fields[position].value.keywords}
    assert options["default"].value is True and ("kw_only" in options) is keyword
    assert "Whether to keep" in ast.unparse(options["metadata"])


def test_postponed_annotations_say_nothing_about_the_python(make_tree):
    folder = make_tree(('"""Arguments."""\n', '"""Arguments."""\n\nfrom __future__ import annotations\n'))
    assert "kw_only" not in added(folder)[1]


def test_the_import_is_guarded(make_tree):
    text = added(make_tree())[1]
    guard = next(n for n in ast.parse(text).body if ast.unparse(n).startswith("if is_accelerate_available():"))
    assert ast.unparse(guard.body[-1]) == "from .utils import accelerator_state"
    assert text.count("accelerator_state\n") == 1


def test_the_docstring_describes_it_after_its_neighbour(make_tree):
    text = added(make_tree())[1]
    lines = inspect.cleandoc(ast.get_docstring(class_of(text))).splitlines()
    start = next(number for number, line in enumerate(lines) if "preserve_accelerator_state" in line)
    assert lines[start].startswith("    preserve_accelerator_state (`bool`, *optional*, defaults to `True`):")
    assert lines[start - 1] == "        - more" and lines[start + 1].startswith("        Whether to keep")
    assert lines[start + 5].startswith("    last")


@pytest.mark.parametrize(
    "old, new",
    [
        ("        accelerator_config (`str`, *optional*):\n", "        its configuration:\n"),
        ("        first (`str`):\n", "        accelerator_config (`str`, *optional*):\n"),
    ],
)
def test_a_docstring_in_another_shape_is_left_alone_and_the_text_says_so(make_tree, old, new):
    folder = make_tree((old, new))
    lines, text = added(folder)
    assert not [line for line in lines if "*optional*" in line]
    assert "preserve_accelerator_state: bool" in text
    assert "describe the field there by hand" in recipe.body(SourceTree(folder))


def test_the_text_of_the_pull_request(make_tree):
    text = recipe.body(SourceTree(make_tree()))
    for word in ("7.0", "keyword-only", "The docstring describes it"):
        assert word in text
    for heading in ("## Problem", "## Evidence", "## Semantics", "## Alternatives considered", "## Compatibility"):
        assert heading in text
    assert "$" not in text.replace("$ ", "")


def test_the_last_field_is_explained_where_keywords_are_not_known(make_tree):
    assert "last field" in recipe.body(SourceTree(make_tree(annotation=OLD_PYTHON)))


@pytest.mark.parametrize("python_3_10", [True, False])
def test_the_shipped_module_is_agreement(python_3_10):
    shipped = ast.parse(recipe.agreement_text(python_3_10))
    own = ast.parse(Path(transformers_patch.__path__[0], "agreement.py").read_text("utf-8"))
    assert [ast.dump(node) for node in shipped.body[1:] if "__future__" not in ast.dump(node)] == [
        ast.dump(node) for node in own.body[1:]
    ]
    assert ("__future__" in ast.dump(shipped)) is not python_3_10
    assert recipe.agreement_text(python_3_10).startswith("# Licensed under the Apache License, Version 2.0")
    assert "Copyright" not in recipe.agreement_text(python_3_10)


def test_the_shipped_module_needs_no_newer_python_than_the_tree():
    ast.parse(recipe.agreement_text(python_3_10=False), feature_version=(3, 9))
    assert "transformers_patch" not in recipe.agreement_text(python_3_10=False)


def test_a_nested_decision_is_found(make_tree):
    folder = make_tree(
        (
            '        if table["use_configured_state"]:\n            self.state = PartialState()\n        else:\n'
            "            AcceleratorState._reset_state(reset_partial_state=True)\n",
            '        if True:\n            if table["use_configured_state"]:\n                self.state = PartialState()\n'
            "            else:\n                AcceleratorState._reset_state(reset_partial_state=True)\n",
        )
    )
    assert "            if self.preserve_accelerator_state and" in added(folder)[1]


REFUSED = {
    "no class": (("class TrainingArguments:", "class Arguments:"), "dataclass TrainingArguments.*found none"),
    "no dataclass": (("@dataclass\n", ""), "dataclass TrainingArguments.*found none"),
    "no neighbour": (("    accelerator_config: ", "    other: "), "field accelerator_config.*found none"),
    "no method": (("def _setup_devices", "def devices"), "_setup_devices.*found none"),
    "no guard": (("if is_accelerate_available():", "if True:"), "is_accelerate_available.*found none"),
    "no import": (("import AcceleratorState, PartialState", "import AcceleratorState"), "PartialState.*found none"),
    "no reset": (("AcceleratorState._reset_state(reset_partial_state=True)", "pass"), "does not call `_reset_state`"),
    "no decision": (('if table["use_configured_state"]:', "if use_configured_state:"), "whose `else` calls.*found none"),
    "not read": (("self.accelerator_config.pop(", "dict(a=1).get("), "self.accelerator_config.pop.*found none"),
    "built again": (("if not table.pop(", "if not dict.get(table, "), "second state.*found none|table.pop.*found none"),
    "twice": (("        return self.state", '        if table["use_configured_state"]:\n            pass\n        else:\n            AcceleratorState._reset_state()\n        return self.state'), "found 2"),
    "no python": (("class TrainingArguments:", "class class:"), "cannot be parsed"),
    "patched": (("    last: int", "    preserve_accelerator_state: bool = field(default=True)\n    last: int"), "already"),
}  # fmt: skip


@pytest.mark.parametrize("replacement, said", REFUSED.values(), ids=REFUSED)
def test_another_shape_is_refused(make_tree, replacement, said):
    folder = make_tree(replacement)
    with pytest.raises(UnrecognisedSource, match=f"(?s){said}"):
        recipe.edit(SourceTree(folder))
    with pytest.raises(UnrecognisedSource):
        recipe.body(SourceTree(folder))


def test_the_new_module_alone_counts_as_patched(make_tree):
    folder = make_tree()
    (folder / recipe.AGREEMENT).parent.mkdir()
    (folder / recipe.AGREEMENT).write_text("", "utf-8")
    with pytest.raises(UnrecognisedSource, match="already"):
        recipe.edit(SourceTree(folder))


def test_another_package_is_refused(make_tree):
    with pytest.raises(UnrecognisedSource, match="'transformers'.*found 'other' 7.0"):
        recipe.edit(SourceTree(make_tree(package="other")))


def test_a_tree_without_the_file_is_refused(make_tree):
    folder = make_tree()
    (folder / recipe.ARGUMENTS).unlink()
    with pytest.raises(UnrecognisedSource, match="training_args.py.*is not there"):
        recipe.edit(SourceTree(folder))


def test_the_payload_names_nobody_as_its_owner():
    for text in (recipe.RECIPE.message, recipe.payload("transformers", "test_accelerator_state.py")):
        assert "Copyright" not in text
    assert max(map(len, recipe.RECIPE.message.splitlines())) <= 76
    assert textwrap.dedent(recipe.RECIPE.message) == recipe.RECIPE.message
