"""The pull request for transformers' Trainer: a checkpoint is written under another name, and renamed when it is complete.

The change consists of a new file and of single lines: in `_save_checkpoint` one where the folder is named, two where the best
checkpoint is looked for, and a few in front of the push; and one in `get_last_checkpoint`.
"""

import ast
from pathlib import Path

from source_file import SourceFile, UnknownSource

NAME = "trainer-checkpoints"
PACKAGE = "transformers"
SUBJECT = "Write Trainer checkpoints under another name, and rename them when they are complete"
PATCH = "0001-trainer-checkpoints.patch"
TRAINER = "src/transformers/trainer.py"
UTILS = "src/transformers/trainer_utils.py"
CHANGES = (TRAINER, UTILS)
NEW = {
    "src/transformers/trainer_staging.py": "trainer_staging.py",
    "tests/trainer/test_trainer_staging.py": "test_trainer_staging.py",
}
STAGE = """\
# Everything is written under another name, which the folder loses when it is complete
wait = smp.barrier if is_sagemaker_mp_enabled() else self.accelerator.wait_for_everyone
checkpoint_dir, output_dir = output_dir, stage_checkpoint(output_dir, self.args, wait)
"""
BEST = """\
elif best_checkpoint_dir == checkpoint_dir:
    self.state.best_model_checkpoint = checkpoint_dir
"""
PUBLISH = """\
publish_checkpoint(output_dir, checkpoint_dir, self.args, wait)
output_dir = checkpoint_dir

"""


def edit(root: Path) -> dict[str, str]:
    """Return the new text of the files that change; `NEW` names the files that are added.

    Raises:
        UnknownSource: The tree has the change already, or not the shape that it needs.
    """
    trainer, utils = SourceFile(root, TRAINER), SourceFile(root, UTILS)
    for file, path in ((trainer, TRAINER), (utils, UTILS)):
        if "trainer_staging" in file.text:
            raise UnknownSource(f"the change is already in {root}: found `trainer_staging` in {path}.")
    trainer.add_above(
        trainer.import_from("trainer_utils"), "from .trainer_staging import publish_checkpoint, stage_checkpoint\n"
    )
    utils.add_above(utils.import_from("utils"), "from .trainer_staging import pass_over_unfinished\n")
    _stage(trainer, trainer.method(trainer.cls("Trainer"), "_save_checkpoint"))
    functions = [node for node in utils.tree.body if getattr(node, "name", "") == "get_last_checkpoint"]
    function = utils.only(functions, "the function `get_last_checkpoint`")
    lists = _assignments(function, "checkpoints", ast.ListComp)
    listed = utils.only(lists, "`checkpoints = [...]` in `get_last_checkpoint`")
    if [argument.arg for argument in function.args.args] != ["folder"]:
        raise utils.refuse("`get_last_checkpoint(folder)`", ast.unparse(function.args))
    utils.add_below(listed, "checkpoints = pass_over_unfinished(folder, checkpoints)\n")
    return {TRAINER: trainer.changed(), UTILS: utils.changed()}


def _assignments(function: ast.FunctionDef, name: str, kind: type[ast.expr]) -> list[ast.stmt]:
    found = [node for node in ast.walk(function) if isinstance(node, ast.Assign) and isinstance(node.value, kind)]
    return [node for node in found if [ast.unparse(target) for target in node.targets] == [name]]


def _stage(file: SourceFile, method: ast.FunctionDef) -> None:
    """Insert what stages behind the name of the folder, and what publishes in front of the push, which rotation follows."""
    what = "`output_dir = ...` in `_save_checkpoint`"
    file.add_below(file.only(_assignments(method, "output_dir", ast.Call), what), STAGE)
    tests = [node for node in ast.walk(method) if isinstance(node, ast.If)]
    best = [
        node for node in tests if ast.unparse(node.test) == "os.path.exists(best_checkpoint_dir)" and not node.orelse
    ]
    file.add_below(file.only(best, "`if os.path.exists(best_checkpoint_dir):` without an `else`"), BEST)
    pushes = [
        node for node in method.body if isinstance(node, ast.If) and ast.unparse(node.test) == "self.args.push_to_hub"
    ]
    push = file.only(pushes, "`if self.args.push_to_hub:` in `_save_checkpoint`")
    after = ast.unparse(ast.Module(method.body[method.body.index(push) :], []))
    before = ast.unparse(ast.Module(method.body[: method.body.index(push)], []))
    if "rotate_checkpoints(" not in after or "save_to_json(" not in before:
        raise file.refuse(
            "the state saved before the push, and the rotation after it, in `_save_checkpoint`", "another order"
        )
    if "output_dir" not in ast.unparse(push):
        raise file.refuse("`output_dir` in the push of `_save_checkpoint`", ast.unparse(push))
    file.add_above(push, PUBLISH)
