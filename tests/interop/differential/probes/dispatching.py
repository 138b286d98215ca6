"""Big models: made empty, offloaded, dispatched."""

import copy
import os
import pathlib

import torch
from torch import nn

import accelerate
from accelerate import big_modeling, hooks
from interop.differential.core import probe
from interop.differential.probes.hooks import hooked, output
from interop.differential.probes.loading import LOAD_MAPS, checkpoint
from interop.differential.probes.modeling import MODELS, Net, convolutions, on_meta, shared
from interop.differential.probes.offload import TARGETS, state

MAKERS = {
    "net": Net, "linear": lambda: nn.Linear(2, 2), "convolutions": convolutions, "shared": shared,
    "tied": MODELS["tied"], "frozen": lambda: nn.ParameterList([nn.Parameter(torch.ones(2), requires_grad=False)]),
}  # fmt: skip


@probe(
    "big_modeling:init_empty_weights", "big_modeling:init_on_device", make=list(MAKERS),
    device=[None, *TARGETS, torch.device("meta"), 5], include_buffers=[None, True], variable=[None, "1"],
)  # fmt: skip
def init_on_device(make, device, include_buffers, variable):
    if variable:
        os.environ["ACCELERATE_INIT_INCLUDE_BUFFERS"] = variable
    with (
        big_modeling.init_empty_weights(include_buffers)
        if device is None
        else big_modeling.init_on_device(device, include_buffers) as given
    ):
        model, loose = MAKERS[make](), torch.ones(2)
    return (
        given, {n: (kind, t.device.type, t.requires_grad) for n, (kind, t) in state(model).items()}, loose.device.type,
        torch.ones(1).device.type,
    )  # fmt: skip


OFFLOADS = {
    "cpu": lambda m, **g: accelerate.cpu_offload(m, **g),
    "disk": lambda m, **g: accelerate.disk_offload(m, "folder", **g),
    "path": lambda m, **g: accelerate.disk_offload(m, pathlib.Path("a/b"), **g),
}


@probe(
    "big_modeling:cpu_offload", "big_modeling:disk_offload", way=list(OFFLOADS),
    model={n: MODELS[n] for n in ("net", "tied", "shared", "empty")}, device=[None, "cpu"], buffers=[False, True],
    preload=[None, ["Block"]],
)  # fmt: skip
def offload_model(way, model, device, buffers, preload):
    expected = output(copy.deepcopy(model))
    found = OFFLOADS[way](model, execution_device=device, offload_buffers=buffers, preload_module_classes=preload)
    first = hooked(found)
    same = [output(found), expected]
    hooks.remove_hook_from_submodules(found)
    return found is model, first, same, hooked(found, values=True)


@probe("big_modeling:cpu_offload", weights=[None, "all", "some", "none"], meta=[False, True])
def cpu_offload_of(weights, meta):
    given = {n: torch.full_like(t, 2) for n, t in Net().state_dict().items()}
    chosen = {None: None, "all": given, "some": {"shift": given["shift"]}, "none": {}}[weights]
    model = accelerate.cpu_offload(on_meta() if meta else Net(), "cpu", state_dict=chosen)
    return hooked(model), output(model)


PARTS = {"shift": "cpu", "embed": "cpu", "blocks.0": "cpu", "blocks.1": "cpu", "norm": "cpu", "head": "cpu"}
DISPATCH = {
    "cpu": {"": "cpu"}, "device": {"": torch.device("cpu")}, "disk": {"": "disk"}, "parts": PARTS,
    "some disk": {**PARTS, "blocks.1": "disk"}, "most disk": dict.fromkeys(PARTS, "disk") | {"norm": "cpu"},
    "too few": {"embed": "cpu"}, "too many": {**PARTS, "nothing": "disk"}, "empty": {}, "index": {"": 0},
    "unknown": {"": "nothing"}, "none": None, "text": "auto",
}  # fmt: skip


@probe(
    "big_modeling:dispatch_model", device_map=list(DISPATCH), model={n: MODELS[n] for n in ("net", "tied")},
    folder=[None, "folder"], buffers=[False, True], force=[False, True],
)  # fmt: skip
def dispatch_model(device_map, model, folder, buffers, force):
    expected = output(copy.deepcopy(model))
    found = accelerate.dispatch_model(
        model, DISPATCH[device_map], offload_dir=folder, offload_buffers=buffers, force_hooks=force
    )
    return found is model, hooked(found), [output(found), expected]


@probe(
    "big_modeling:load_checkpoint_and_dispatch", kind=["half", "shards", "nothing"],
    device_map=[*LOAD_MAPS, "balanced", "sequential", "words"], meta=[True, False], buffers=[False, True],
)  # fmt: skip
def load_checkpoint_and_dispatch(kind, device_map, meta, buffers):
    where = LOAD_MAPS.get(device_map, device_map)
    budget = {"cpu": 10**6} if isinstance(where, str) else None
    model = accelerate.load_checkpoint_and_dispatch(
        on_meta() if meta else Net(), checkpoint(kind), where, max_memory=budget, offload_folder="folder",
        offload_buffers=buffers,
    )  # fmt: skip
    return hooked(model), output(model)
