"""The pull request for transformers' Trainer: the auxiliary loss of a mixture of experts is a mean over micro-batches and replicas.

The change consists of a new file and of two lines: an import, and a call in front of what `Trainer.compute_loss` returns.
"""

import ast
from pathlib import Path

from source_file import SourceFile, UnknownSource

NAME = "auxiliary-loss"
PACKAGE = "transformers"
SUBJECT = "Count the auxiliary loss of experts once in the Trainer"
PATCH = "0001-auxiliary-loss.patch"
TRAINER = "src/transformers/trainer.py"
CHANGES = (TRAINER,)
NEW = {
    "src/transformers/trainer_auxiliary_loss.py": "trainer_auxiliary_loss.py",
    "tests/trainer/test_trainer_auxiliary_loss.py": "test_trainer_auxiliary_loss.py",
}
TAKES = ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]
RETURNS = "return (loss, outputs) if return_outputs else loss"
# By what the Trainer multiplies and divides a loss, which the new file reads, too.
SCALES = ("average_tokens_across_devices", "model_accepts_loss_kwargs", "num_processes", "get_tp_size", "n_gpu")
DIVIDES = ("loss_is_scaled_for_ga", "current_gradient_accumulation_steps")


def edit(root: Path) -> dict[str, str]:
    """Return the new text of the file that changes; `NEW` names the files that are added.

    Raises:
        UnknownSource: The tree has the change already, or not the shape that it needs.
    """
    file = SourceFile(root, TRAINER)
    if "aux_loss" in file.text or "auxiliary_loss" in file.text:
        raise UnknownSource(
            f"the change, or another one of it, is already in {root}: {TRAINER} has an auxiliary loss."
        )
    file.add_above(
        file.import_from("trainer_callback"), "from .trainer_auxiliary_loss import average_auxiliary_loss\n"
    )
    cls = file.cls("Trainer")
    method = file.method(cls, "compute_loss")
    names = [argument.arg for argument in method.args.args]
    if names != TAKES:
        raise file.refuse(f"`compute_loss({', '.join(TAKES)})`", f"`compute_loss({', '.join(names)})`")
    scaling, last = method.body[-2:]
    if ast.unparse(last) != RETURNS:
        raise file.refuse(f"`{RETURNS}` at the end of `compute_loss`", f"`{ast.unparse(last)}`")
    _reads(file, scaling, SCALES, "in front of what `compute_loss` returns")
    _reads(file, file.method(cls, "training_step"), DIVIDES, "in `training_step`")
    file.add_above(last, "loss = average_auxiliary_loss(self, model, outputs, loss, num_items_in_batch)\n")
    return {TRAINER: file.changed()}


def _reads(file: SourceFile, node: ast.stmt, names: tuple[str, ...], where: str) -> None:
    read = {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
    if missing := [name for name in names if name not in read]:
        raise file.refuse(f"{', '.join(missing)} {where}", "none")
