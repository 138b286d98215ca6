"""The pull request for transformers' tensor parallelism: tokens are divided, and gradients summed, over its ranks as often as needed.

The change consists of single lines: a statement in front of the division in `Trainer._get_num_items_in_batch`, and a second hook of
a replicated parameter next to the one that sums its gradient over the ranks.
"""

import ast
from pathlib import Path

from source_file import SourceFile

NAME = "tensor-parallel-losses"
PACKAGE = "transformers"
SUBJECT = "Count tokens and accumulated gradients once under tensor parallelism"
PATCH = "0001-tensor-parallel-losses.patch"
TRAINER = "src/transformers/trainer.py"
LAYERS = "src/transformers/distributed/tensor_parallel.py"
CHANGES = (TRAINER, LAYERS)
TEST = "test_tensor_parallel_losses.py"
NEW = {f"tests/trainer/{TEST}": TEST}
SUMS, HOOKS = "self.args.average_tokens_across_devices", "register_post_accumulate_grad_hook"
COUNT = """\
# Only a sum over ranks has the tokens of those that share a batch by tensor parallelism several times
if not self.args.average_tokens_across_devices:
    num_items_in_batch = num_items_in_batch * self.get_tp_size()
"""
SHARE = """\

def _share_accumulated_grad(param):
    # Called before a gradient is added to those of earlier micro-batches, which are sums over the mesh already. They are
    # summed with it once more: a share of each rank adds up to what they were.
    def share(grad):
        if param.grad is not None:
            param.grad.div_(mesh.size())

    return share
"""


def edit(root: Path) -> dict[str, str]:
    """Return the new text of the files that change; `NEW` names the file that is added.

    Raises:
        UnknownSource: The tree has the change already, or not the shape that it needs.
    """
    trainer, layers = SourceFile(root, TRAINER), SourceFile(root, LAYERS)
    _count(trainer, trainer.method(trainer.cls("Trainer"), "_get_num_items_in_batch"))
    _share(layers, layers.method(layers.cls("ReplicatedWithGradAllReduce"), "install_forward"))
    return {TRAINER: trainer.changed(), LAYERS: layers.changed()}


def _count(file: SourceFile, method: ast.FunctionDef) -> None:
    """Insert the statement in front of the one division by the ranks of tensor parallelism."""
    assigned = [node for node in ast.walk(method) if isinstance(node, ast.Assign)]
    divided = [
        node
        for node in assigned
        if isinstance(node.value, ast.BinOp)
        and isinstance(node.value.op, ast.Div)
        and ast.unparse(node.targets[0]) == ast.unparse(node.value.left) == "num_items_in_batch"
        and "self.get_tp_size()" in ast.unparse(node.value.right)
    ]
    where = f"in `{method.name}`"
    division = file.only(divided, f"`num_items_in_batch = num_items_in_batch / (self.get_tp_size() ...)` {where}")
    if (read := ast.unparse(method).count("get_tp_size")) != 1:
        raise file.refuse(f"one use of `get_tp_size` {where}", f"{read}: the change, or another one, is already there")
    gathered = [node for node in assigned if ".gather(" in ast.unparse(node.value)]
    tests = [node for node in ast.walk(method) if isinstance(node, ast.If) and ast.unparse(node.test) == SUMS]
    test = file.only(tests, f"`if {SUMS}:` {where}")
    inside = {node for statement in test.body for node in ast.walk(statement)}
    if not gathered or not inside.issuperset(gathered) or division in {*ast.walk(test)}:
        raise file.refuse(f"the sum over ranks inside, and the division behind, `if {SUMS}:` {where}", "another order")
    file.add_above(division, COUNT)


def _share(file: SourceFile, method: ast.FunctionDef) -> None:
    """Insert the hook's function behind the one that sums, and its registration in front of the other's."""
    if "register_hook" in ast.unparse(method):
        raise file.refuse(
            f"no `register_hook` in `{method.name}`", "one: the change, or another one, is already there"
        )
    sums = [node for node in method.body if isinstance(node, ast.FunctionDef) and "all_reduce(" in ast.unparse(node)]
    summing = file.only(sums, f"one function in `{method.name}` that calls `all_reduce`")
    if [argument.arg for argument in method.args.args] != ["self", "module", "mesh"]:
        raise file.refuse("`install_forward(self, module, mesh)`", f"`{ast.unparse(method.args)}`")
    registered = f"param.{HOOKS}({summing.name})"
    calls = [node for node in ast.walk(method) if isinstance(node, ast.Expr) and ast.unparse(node) == registered]
    file.add_below(summing, SHARE)
    file.add_above(
        file.only(calls, f"`{registered}` in `{method.name}`"), "param.register_hook(_share_accumulated_grad(param))\n"
    )
