"""Pipelines, what FSDP shards, and its checkpoints."""

import torch
from torch import nn

from accelerate import Accelerator, inference
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils
from interop.differential.core import call, probe, short
from interop.differential.probes.modeling import MODELS, NOT_MODELS, Net, named, one_parent, shared, two_ties

short(
    "generate_device_map", lambda **given: named(given["model"], inference.generate_device_map(**given))[1],
    "inference:generate_device_map", model={**MODELS, **NOT_MODELS}, num_processes=[1, 2, 3, 0, -1],
    max_memory=[None, {"cpu": 10**6}],
)  # fmt: skip
ARGS = [
    None, (), (torch.ones(3, 2),), (torch.tensor(1.0), torch.ones(2)), ("text", 5, torch.ones(4)),
    ([torch.ones(5, 1)],), ({"a": torch.ones(6)},), (None, (torch.zeros(0, 2),)), torch.ones(7, 2), 5,
]  # fmt: skip
KWARGS = [
    None, {}, {"x": torch.ones(8)}, {"x": 5, "y": [torch.ones(9)]}, {"x": {"y": torch.ones(2, 1)}},
    {"x": torch.tensor(1)},
]  # fmt: skip
call("inference:find_pippy_batch_size", args=ARGS, kwargs=KWARGS)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 2))


@probe(
    "inference:prepare_pippy", "inference:build_pipeline", "inference:pippy_forward", processes=2,
    split_points=[["1"], ["2"], ["3"]], chunks=[None, 2],
)  # fmt: skip
def prepare_pippy(split_points, chunks):
    """What 1.15.0 does on CPUs: no gathering, which fails over gloo, and no mistakes, where ranks would wait for ever."""
    Accelerator(cpu=True)
    model = layers().eval()
    expected = model(torch.ones(4, 3))
    made = inference.prepare_pippy(model, split_points, example_args=(torch.ones(2, 3),), num_chunks=chunks)
    with torch.no_grad():
        found = made(torch.ones(2 * (chunks or 2), 3))
    return (
        made is model, model.hf_split_points, found if found is None else found.shape,
        None if found is None else torch.allclose(found[:2], expected[:2]),
    )  # fmt: skip


BY_NAME = [None, "", "blocks", r"blocks\.0", r".*first", "head|norm", "(", 5, []]


@probe(
    "utils.fsdp_utils:get_parameters_from_modules", modules=BY_NAME,
    device=["cpu", torch.device("cpu"), "meta", None, "nothing"],
)  # fmt: skip
def get_parameters_from_modules(modules, device):
    model = Net()
    found = fsdp_utils.get_parameters_from_modules(modules, model, device)
    return sorted(name for name, p in model.named_parameters() if any(p is q for q in found)), type(found)


NAMES = [
    {}, {"a.b": 1}, {"_orig_mod.a": 1}, {"_orig_mod.a._checkpoint_wrapped_module.b": 1},
    {"a._checkpoint_wrapped_module._orig_mod.b": 2}, {"_fsdp_wrapped_module.a": 1}, {"module.a": 1}, {"_orig_mod": 1},
    {"a._orig_mod": 3}, {"x_orig_mod.a": 1}, {"_orig_mod._orig_mod.a": 1},
    {"base_layer._fsdp_wrapped_module._checkpoint_wrapped_module.w": 1}, None,
]  # fmt: skip
call("utils.fsdp_utils:fsdp2_canonicalize_names", named_params=NAMES)


@probe(
    "utils.fsdp_utils:ensure_weights_retied",
    model={n: MODELS[n] for n in ("net", "tied", "shared", "empty")} | {
        "two": two_ties, "one parent": one_parent, "shared again": shared,
    }, device=[torch.device("cpu"), "cpu"], root=[True, False],
)  # fmt: skip
def ensure_weights_retied(model, device, root):
    def fill(module):
        return module.to_empty(device=torch.device(device), recurse=False)

    made = fsdp_utils.ensure_weights_retied(fill, model, device)
    for module in model.modules():
        if root or module is not model:
            made(module)
    groups = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(f"{name} {parameter.device.type}")
    return list(groups.values())


POLICIES = [
    {}, {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, {"auto_wrap_policy": "size_based_wrap", "min_num_params": 20},
    {"auto_wrap_policy": "NO_WRAP"}, {"auto_wrap_policy": "SIZE_BASED_WRAP"},
    {"auto_wrap_policy": "size_based_wrap", "min_num_params": 0},
]  # fmt: skip


@probe(
    "utils.fsdp_utils:fsdp2_prepare_auto_wrap_policy", given=POLICIES,
    classes=[None, ["Block"], "Block", ["Block", "Embedding"], ["nothing"], []], version=[1, 2],
    declared=[None, ["Block"], "Linear"],
)  # fmt: skip
def fsdp2_prepare_auto_wrap_policy(given, classes, version, declared):
    model = Net()
    if declared is not None:
        model._no_split_modules = declared
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, transformer_cls_names_to_wrap=classes, **given)
    policy = fsdp_utils.fsdp2_prepare_auto_wrap_policy(plugin, model)
    return policy if policy is None else [name for name, module in model.named_modules() if policy(module)]


@probe(
    "utils.fsdp_utils:fsdp2_switch_optimizer_parameters", known=["all", "some", "none", "addresses", "more"],
    groups=[1, 2],
)  # fmt: skip
def fsdp2_switch_optimizer_parameters(known, groups):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters if groups == 1 else [{"params": [p]} for p in parameters], lr=0.1)
    pairs = list(zip(parameters, other.parameters(), strict=True))
    mapping = {
        "all": dict(pairs), "some": dict(pairs[:1]), "none": {}, "addresses": {p.data_ptr(): q for p, q in pairs}, "more": {**{p.data_ptr(): q for p, q in pairs}, 5: None},
    }[known]  # fmt: skip
    result = fsdp_utils.fsdp2_switch_optimizer_parameters(optimizer, mapping)
    return result, [
        [next((n for n, q in other.named_parameters() if q is p), None) for p in group["params"]]
        for group in optimizer.param_groups
    ]
