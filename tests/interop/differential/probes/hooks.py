"""Hooks around forward, and the functions that give a whole model its hooks."""

import copy
import inspect
import pickle

import torch
from torch import nn

from accelerate import big_modeling, hooks
from interop.differential.core import probe
from interop.differential.probes.modeling import MODELS, Block, Net
from interop.differential.probes.offload import state

FIELDS = [
    "execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys",
    "input_device", "original_devices", "param_original_devices", "buffer_original_devices", "tied_params_names",
    "tied_params_map", "prev_module_hook", "storage_dtype", "compute_dtype", "non_blocking", "no_grad",
]  # fmt: skip


class Recorder(hooks.ModelHook):
    def __init__(self, add=1, no_grad=False):
        self.add, self.no_grad, self.calls = add, no_grad, []

    def init_hook(self, module):
        self.calls.append("init")
        return module

    def pre_forward(self, module, *args, **kwargs):
        self.calls.append("pre")
        return tuple(a + self.add for a in args), kwargs

    def post_forward(self, module, output):
        self.calls.append("post")
        return output * 10 + self.add

    def detach_hook(self, module):
        self.calls.append("detach")
        return module


def fields(hook):
    """Return the attributes of a hook that libraries read."""
    if hook is None:
        return None
    found = {name: getattr(hook, name) for name in FIELDS if hasattr(hook, name)}
    if not found.get("original_devices"):
        found.pop("original_devices", None)  # 1.15.0 has it once something is offloaded
    if isinstance(found.get("tied_params_map"), dict):
        found["tied_params_map"] = [sorted(map(str, entries)) for entries in found["tied_params_map"].values()]
    if getattr(hook, "weights_map", None) is not None:
        # 1.15.0 writes buffers that are not offloaded, too.
        names = [name for name in hook.weights_map if not name.endswith(("mask", "scale"))]
        found["weights_map"] = sorted(names), getattr(hook.weights_map, "prefix", None)
    return type(hook).__name__, found, [fields(inner) for inner in getattr(hook, "hooks", ())]


def hooked(model, values=False):
    found = {name: fields(m.__dict__.get("_hf_hook")) for name, m in model.named_modules() if "_hf_hook" in m.__dict__}
    # Without a hook a `forward` on the instance is what 1.15.0 leaves there.
    names = ("_old_forward", "_hf_hook", "forward", "to", "cuda", "npu")
    extra = {
        name: [k for k in names if k in m.__dict__ and (k != "forward" or "_hf_hook" in m.__dict__)]
        for name, m in model.named_modules()
    }
    where = {name: (type(t).__name__, t if values else t.device.type) for name, (_, t) in state(model).items()}
    return found, {name: keys for name, keys in extra.items() if keys}, where, getattr(model, "hf_device_map", None)


def output(model):
    if type(model).forward is nn.modules.module._forward_unimplemented:
        return None
    return model(torch.ones(1, 2, dtype=torch.long) if isinstance(model, Net) else torch.ones(2, 3))


class Signed(nn.Module):
    """A module whose forward has parameters of all kinds."""

    def forward(
        self, x: torch.Tensor, /, scale: float = 2.0, *more: int, bias: float = 0.0, **rest: int
    ) -> torch.Tensor:
        """Scale."""
        return x * scale + bias + sum(more) + sum(rest.values())


CALLS = {
    "plain": lambda m: m(torch.ones(2)), "positions": lambda m: m(torch.ones(2), 3.0, 4, 5),
    "names": lambda m: m(torch.ones(2), bias=1.0, scale=0.5, other=7), "none": lambda m: m(),
    "wrong": lambda m: m(x=torch.ones(2)), "signature": lambda m: str(inspect.signature(m.forward)),
    "name": lambda m: (m.forward.__name__, m.forward.__doc__, m.forward.__wrapped__.__name__),
    "partial": lambda m: (type(m.forward).__name__, m.forward.args[0] is m),
    "pickle": lambda m: pickle.loads(pickle.dumps(m))(torch.ones(1)),
    "deepcopy": lambda m: copy.deepcopy(m)(torch.ones(1)),
    "copy keeps": lambda m: copy.deepcopy(m).forward.args[0] is m,
    "replaced": lambda m: setattr(m, "_old_forward", lambda x: x * 100) or m(torch.ones(1)),
    "own hook": lambda m: setattr(m, "_hf_hook", Recorder(50)) or m(torch.ones(1)),
    "train": lambda m: m.train().training, "state": lambda m: m.state_dict(), "repr": repr,
    "children": lambda m: len(list(m.modules())),
    "names of attributes": lambda m: sorted(k for k in vars(m) if k.startswith(("_hf", "_old", "forw"))),
    "double": lambda m: m.double()(torch.ones(1)),
    "twice": lambda m: hooks.add_hook_to_module(m, Recorder(3))(torch.ones(1)),
}  # fmt: skip
HOOKS = {
    "model": hooks.ModelHook, "recorder": Recorder, "align": hooks.AlignDevicesHook,
    "sequential": lambda: hooks.SequentialHook(Recorder(), hooks.ModelHook()),
    "casting": lambda: hooks.LayerwiseCastingHook(torch.float16, torch.float32, False),
    "cpu": lambda: hooks.CpuOffload("cpu"),
}  # fmt: skip


@probe("hooks:add_hook_to_module", "hooks:ModelHook", "hooks:SequentialHook", hook=HOOKS, call=list(CALLS))
def hooked_calls(hook, call):
    return CALLS[call](hooks.add_hook_to_module(Signed(), hook))


DEVICES = [None, "cpu", torch.device("cpu"), "nothing"]


@probe(
    "hooks:AlignDevicesHook", execution_device=DEVICES, offload=[False, True], io_same_device=[False, True],
    offload_buffers=[False, True], place_submodules=[False, True], skip_keys=[None, "x"],
)  # fmt: skip
def AlignDevicesHook(**given):
    model, hook = Block(), hooks.AlignDevicesHook(**given)
    before = fields(hook)
    hooks.add_hook_to_module(model, hook)
    after = hooked(model)
    found = model(torch.ones(1, 4))
    again = hooked(model)
    hooks.remove_hook_from_module(model)
    return before, after, found, again, hooked(model)


BLOCKS = [
    "cpu", None, {"": "cpu"}, {"blocks": "cpu"},
    {"shift": "cpu", "embed": "cpu", "blocks.0": "cpu", "blocks.1": "cpu", "norm": "cpu", "head": "cpu"},
    {"": "cpu", "head": "cpu"}, {"embed": "cpu", "blocks.0.first": "cpu"}, {}, {"nothing": "cpu"},
]  # fmt: skip


@probe(
    "hooks:attach_align_device_hook_on_blocks", device=BLOCKS,
    offload=[False, True, {"": True}, {"blocks": True}, {"embed": True, "blocks.0": False}, {}],
    preload=[None, ["Block"]],
)  # fmt: skip
def attach_on_blocks(device, offload, preload):
    model = Net()
    weights = {n: t.detach() + 1 for n, t in model.state_dict().items()}
    hooks.attach_align_device_hook_on_blocks(model, device, offload, weights, True, preload_module_classes=preload)
    return hooked(model), output(model)


@probe(
    "hooks:CpuOffload", "hooks:UserCpuOffloadHook", "big_modeling:cpu_offload_with_hook", device=DEVICES,
    previous=[None, "hook", "other", "text"], end=["forward", "offload", "remove"],
)  # fmt: skip
def CpuOffload(device, previous, end):
    first, handle = big_modeling.cpu_offload_with_hook(nn.Linear(3, 3), "cpu")
    before = {None: None, "hook": handle, "other": hooks.ModelHook(), "text": "hook"}[previous]
    model, hook = big_modeling.cpu_offload_with_hook(nn.Linear(3, 3), device, prev_module_hook=before)
    kinds = (
        type(hook).__name__, type(hook.hook).__name__, hook.model is model, hook.hook.prev_module_hook is before,
        hook.hook.execution_device,
    )  # fmt: skip
    found = output(model)
    getattr(hook, end, lambda: None)()
    return kinds, found, "_hf_hook" in model.__dict__, [p.device.type for p in model.parameters()]


@probe(
    "big_modeling:attach_layerwise_casting_hooks",
    model={n: MODELS[n] for n in ("net", "linear", "convolutions", "attention", "empty", "tied")},
    pattern=[None, (), "norm", ("head", "first"), ".*", "(", ["blocks.0"]],
    classes=[None, (), (nn.Linear,), (Block,), (nn.Embedding, nn.Conv2d)],
)
def attach_layerwise_casting_hooks(model, pattern, classes):
    result = big_modeling.attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32, pattern, classes)
    return (
        result, {name: t.dtype for name, (_, t) in state(model).items()},
        [n for n, m in model.named_modules() if "_hf_hook" in m.__dict__],
    )  # fmt: skip
