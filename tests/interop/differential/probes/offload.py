"""Weights that are put on devices one by one, kept in files, loaded from checkpoints and quantised."""

import pathlib

import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.utils import modeling, offload
from interop.differential.core import call, probe, short, words
from interop.differential.probes.modeling import Net, on_meta

VALUES = {
    "none": lambda old: None, "zeros": lambda old: torch.zeros(old.shape, dtype=old.dtype),
    "half": lambda old: torch.full(old.shape, 2.0, dtype=torch.float16),
    "integers": lambda old: torch.full(old.shape, 3),
    "parameter": lambda old: nn.Parameter(torch.full(old.shape, 4.0)),
    "meta": lambda old: torch.empty(old.shape, device="meta"), "reshaped": lambda old: torch.zeros(1, *old.shape),
    "scalar": lambda old: torch.tensor(5.0), "itself": lambda old: old, "list": lambda old: [1.0],
    "number": lambda old: 1.0,
}  # fmt: skip
TENSORS = ["shift", "blocks.0.scale", "blocks.1.mask", "blocks.0", "blocks.9.scale", ""]
TARGETS = words("cpu meta CPU cpu:0 disk nothing", "")


def state(model):
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: (type(t), t) for name, t in tensors}


def changed(model, before):
    after = state(model)
    return {name: pair for name, pair in after.items() if name not in before or before[name][1] is not pair[1]}


@probe(
    "utils.modeling:set_module_tensor_to_device", quick=30, model={"net": Net, "meta": on_meta}, name=TENSORS,
    device=["cpu", torch.device("cpu"), "cpu:0", "meta", "nothing"], value=list(VALUES),
    dtype=[None, torch.float16, "bfloat16", torch.int8, "x", 5],
)  # fmt: skip
def set_value(model, name, device, value, dtype):
    before = state(model)
    old = before.get(name, (None, torch.ones(2)))[1]
    result = modeling.set_module_tensor_to_device(model, name, device, value=VALUES[value](old), dtype=dtype)
    return result, state(model).get(name), sorted(changed(model, before))


OFFLOADS = {
    "not": lambda m: m, "cpu": lambda m: cpu_offload(m, "cpu"), "disk": lambda m: disk_offload(m, "folder", "cpu"),
    "buffers": lambda m: cpu_offload(m, "cpu", offload_buffers=True),
    "dispatched": lambda m: dispatch_model(
        m, {"shift": "cpu", "embed": "cpu", "blocks": "disk", "norm": "cpu", "head": "disk"}, offload_dir="folder",
    ), "one device": lambda m: dispatch_model(m, {"": "cpu"}, force_hooks=True),
    "to meta": lambda m: add_hook_to_module(m, AlignDevicesHook("meta")) and m,
}  # fmt: skip
MODULES = ["", "blocks", "blocks.0", "blocks.1.first", "norm"]


@probe(
    "utils.modeling:align_module_device", "utils.modeling:has_offloaded_params", way=list(OFFLOADS), name=MODULES,
    device=[None, "cpu", "meta", "nothing"], change=[False, True],
)  # fmt: skip
def align_module_device(way, name, device, change):
    model = OFFLOADS[way](Net())
    module = model.get_submodule(name)
    before = modeling.has_offloaded_params(module)
    with modeling.align_module_device(module, device) as given:
        inside = [(n, t.device.type) for n, t in modeling.named_module_tensors(module)]
        for _, tensor in modeling.named_module_tensors(module) if change else ():
            if tensor.dtype.is_floating_point:
                tensor.data.fill_(3)
    return before, given, inside, state(module)


@probe(
    "utils.modeling:get_state_dict_offloaded_model", "utils.modeling:get_state_dict_from_offload",
    way=["not", "cpu", "disk"],
)  # fmt: skip
def state_of_root(way):
    model = OFFLOADS[way](Net())
    return modeling.get_state_dict_offloaded_model(model).get("shift"), modeling.get_state_dict_from_offload(
        model, "shift", {"shift": None}
    )


def entries(index):
    """Return an index without checksums, which 1.15.0 does not write."""
    return {name: {k: v for k, v in entry.items() if k != "xxh3"} for name, entry in index.items()}


WEIGHTS = {
    "parameter": lambda: nn.Parameter(torch.ones(2)), "transposed": lambda: torch.arange(6.0).reshape(2, 3).T,
    "slice": lambda: torch.arange(6.0)[1:6:2], "meta": lambda: torch.ones(2, device="meta"), "number": lambda: 5,
}  # fmt: skip


@probe(
    "utils.offload:offload_weight", weight=WEIGHTS, name=["w", "a/b", "..", "ä", ""],
    folder=["folder", pathlib.Path("p"), "."],
)  # fmt: skip
def odd_weights(weight, name, folder):
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    index = offload.offload_weight(weight, name, folder, index={})
    return entries(index), offload.load_offloaded_weight(pathlib.Path(folder) / f"{name}.dat", index[name])


INFOS = [
    {"dtype": "float32", "shape": [2]}, {"dtype": "float32", "shape": []}, {"dtype": "float16", "shape": [4]},
    {"dtype": "float32", "shape": [3]}, {"dtype": "int32", "shape": [1]}, {"dtype": "bfloat16", "shape": [2, 2]},
    {"dtype": "nothing", "shape": [2]}, {"shape": [2]}, {"dtype": "float32"}, {}, None,
    {"dtype": "float32", "shape": (2,)}, {"dtype": "torch.float32", "shape": [2]},
    {"dtype": torch.float32, "shape": [2]}, {"dtype": "float32", "shape": [-1]},
]  # fmt: skip


@probe(
    "utils.offload:load_offloaded_weight", info=INFOS,
    file=["w.dat", "nothing.dat", "empty.dat", pathlib.Path("w.dat")],
)  # fmt: skip
def load_offloaded_weight(info, file):
    pathlib.Path("w.dat").write_bytes(torch.tensor([1.0, 2.0]).numpy().tobytes())
    pathlib.Path("empty.dat").write_bytes(b"")
    return offload.load_offloaded_weight(file, info)


def sources():
    """Write weights in each of the ways that a loader reads, and return indices of them."""
    offload.offload_state_dict("folder", {"w": torch.ones(2), "f": torch.zeros(1)})
    save_file({"s": torch.full((2,), 5.0), "t": torch.arange(3)}, "s.safetensors")
    file = {"safetensors_file": "s.safetensors"}
    return {
        "none": None,
        "empty": {},
        "dat": {"w": {"dtype": "float32", "shape": [2]}},
        "safetensors": {"s": file, "x": {**file, "weight_name": "t"}, "h": {**file, "weight_name": "s", "dtype": "float16"}},
        "missing": {"m": {"safetensors_file": "m.safetensors"}, "n": {"dtype": "float32", "shape": [2]}, "s": {**file, "weight_name": "nothing"}},
    }  # fmt: skip


@probe(
    "utils.offload:OffloadedWeightsLoader", memory=[None, {"w": torch.zeros(1)}], folder=[None, "folder", "missing"],
    index=["none", "empty", "dat", "safetensors", "missing"], key=["w", "f", "s", "x", "h", "m", "n", "nothing", None],
    device=[None, "cpu"],
)  # fmt: skip
def loader(memory, folder, index, key, device):
    made = offload.OffloadedWeightsLoader(state_dict=memory, save_folder=folder, index=sources()[index], device=device)
    return made[key]


short(
    "PrefixedDataset", lambda dataset, prefix, key: offload.PrefixedDataset(dataset, prefix)[key],
    "utils.offload:PrefixedDataset",
    dataset=[{}, {"a.x": 1, "a.y": 2, "b.x": 3}, {"x": 1}, {"a.a.x": 1, "a.x": 2}, None],
    prefix=["", "a.", "b.", "a", "c."], key=["x", "y", "a.x", "", "nothing", None],
)  # fmt: skip
call(
    "utils.offload:extract_submodules_state_dict", state=[{}, {"a": 1, "a.b": 2, "ab.c": 3, "c.a": 4}, {"": 1}, None],
    names=[[], ["a"], ["a", "c"], ["a.b"], [""], ["nothing"], "a", "", None, ("c",), [None]],
)  # fmt: skip
