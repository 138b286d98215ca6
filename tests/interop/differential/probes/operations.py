"""Operations on nested structures that no other process takes part in."""

import copy

from accelerate.utils import operations
from interop.differential.core import call, probe
from interop.differential.probes.nested import HOLLOW, TENSORS, VALUES, seen, some

PLAIN = {k: v for k, v in VALUES.items() if k not in ("generator", "torch.nested", "sparse", "object", "namespace")}
FEW = some("scalar, vector, matrix, no rows, torch.int64, nested, named tuple, text, None")
call("utils.operations:is_torch_xpu_tensor", value=some("vector, dict, text"))


@probe("utils.operations:send_to_device", value=VALUES)
def sent_to_its_device(value):
    yield from seen(operations.send_to_device(value, "cpu"), value)


@probe("utils.operations:initialize_tensors", "utils.operations:get_data_structure", value=TENSORS | HOLLOW)
def initialized(value):
    made = operations.initialize_tensors(operations.get_data_structure(value))
    return operations.recursively_apply(lambda t: (list(t.shape), t.dtype, t.device.type, t.requires_grad), made)


call(
    "utils.operations:slice_tensors",
    value=FEW | some("dict, empty list, mixed dict, meta, user dict"),
    part=[slice(0, 1), slice(1, None), slice(-1, None), slice(5, 9), slice(0, 2, 2), 0, None, [0], (0,), "x"],
)


@probe("utils.operations:concatenate", value=PLAIN, count=[1, 3], dim=[0, 1])
def concatenate(value, count, dim):
    return operations.concatenate([copy.deepcopy(value) for _ in range(count)], dim=dim)


call(
    "utils.operations:pad_input_tensors",
    "pad_input_tensors_otherwise",
    value=some("scalar, no rows, text, None, mixed dict, empty list, torch.bool, torch.int64, user dict"),
    batch_size=[0, 2, 3],
    num_processes=[2, 3],
)  # fmt: skip
