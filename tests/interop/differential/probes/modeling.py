"""Sizes, budgets, device maps and ties; and the models that other probes of big models use, too."""

import collections
import logging
import warnings

import torch
from torch import nn

from accelerate.utils import CustomDtype, modeling
from interop.differential.core import call, probe, short


class Block(nn.Module):
    def __init__(self, size=4):
        super().__init__()
        self.first = nn.Linear(size, size)
        self.second = nn.Linear(size, size, bias=False)
        self.register_buffer("scale", torch.full((size,), 2.0))
        self.register_buffer("mask", torch.ones(size, dtype=torch.bool), persistent=False)

    def forward(self, x):
        return x + self.second(self.first(x) * self.scale) * self.mask


class Net(nn.Module):
    def __init__(self, blocks=2, size=4, tied=False):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(size))
        self.embed = nn.Embedding(6, size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(blocks))
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Bare(nn.Module):
    """Holds what it is given: tensors become parameters, or buffers where they are no floating-point numbers."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                part = nn.Parameter(part, requires_grad=part.is_floating_point() and part.requires_grad)
            setattr(self, name, part)


def shared():
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.ReLU(), layer)


def on_meta(make=Net):
    with torch.device("meta"):
        return make()


def partly_meta():
    model = Net()
    model.blocks[1].to("meta")
    return model


MIXED = {
    torch.float64: 3, torch.float16: 5, torch.bfloat16: 7, torch.int8: 11, torch.int64: 2, torch.bool: 13,
    torch.complex64: 2, torch.float8_e4m3fn: 9,
}  # fmt: skip


def mixed():
    return Bare(**{str(dtype)[6:]: torch.zeros(count, dtype=dtype) for dtype, count in MIXED.items()})


def convolutions():
    return nn.Sequential(
        collections.OrderedDict(
            conv=nn.Conv2d(1, 2, 3), norm=nn.BatchNorm2d(2), flat=nn.Flatten(), out=nn.Linear(8, 2)
        )
    )


MODELS = {
    "linear": lambda: nn.Linear(3, 4), "no bias": lambda: nn.Linear(3, 4, bias=False), "empty": nn.Module,
    "relu": nn.ReLU, "sequence": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), "net": Net,
    "tied": lambda: Net(tied=True), "deep": lambda: Net(blocks=4, size=3), "half": lambda: Net().half(),
    "meta": on_meta, "partly meta": partly_meta, "shared": shared, "mixed": mixed,
    "scalar": lambda: Bare(a=torch.tensor(1.0), none=torch.zeros(0)), "convolutions": convolutions,
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 1)),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
}  # fmt: skip
NOT_MODELS = {"None": lambda: None, "text": lambda: "model", "dict": lambda: {"a": torch.ones(2)}}
SOME = {name: MODELS[name] for name in ("sequence", "net", "tied", "mixed", "convolutions")}


def named(model, device_map):
    """Return a device map without entries for buffers, which 1.15.0 forgets where a module is split."""
    buffers = {name for name, _ in model.named_buffers()}
    return type(device_map), {name: device for name, device in device_map.items() if name not in buffers}


def said(call):
    """Return what a call returns, the kinds of warnings and the levels of lines in the log."""
    levels = set()
    handler = logging.Handler()
    handler.emit = lambda record: levels.add(record.levelname)
    logger = logging.getLogger("accelerate")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = call()
    finally:
        logger.removeHandler(handler)
    levels -= {"DEBUG", "INFO"}
    return {"value": value, "warned": sorted({w.category.__name__ for w in caught} | levels)}


DTYPES = [None, torch.float32, torch.float16, torch.int8, torch.bool, torch.float64, CustomDtype.INT4, CustomDtype.FP8]
SPECIAL = {
    "none": lambda: None, "empty": dict, "of no tensor": lambda: {"nothing": torch.float16},
    "weights": lambda: dict.fromkeys(("0.weight", "head.weight", "float16", "conv.weight"), torch.float64),
    "by name": lambda: {"0.weight": "int8", "norm.weight": "torch.float16", "blocks.0.scale": "float64"},
    "a module": lambda: {"0": torch.float64, "blocks": torch.float16},
    "wrong": lambda: {"0.weight": "fp16", "norm.weight": 16},
}  # fmt: skip


@probe("utils.modeling:compute_module_sizes", model=MODELS, dtype=DTYPES, buffers_only=[False, True])
def compute_module_sizes(**given):
    return dict(modeling.compute_module_sizes(**given))


call(
    "utils.modeling:compute_module_total_buffer_size", model={**SOME, **NOT_MODELS},
    dtype=[None, "float16", torch.int8], special_dtypes=SPECIAL,
)  # fmt: skip


@probe(
    "utils.modeling:calculate_maximum_sizes", model={**MODELS, **NOT_MODELS},
    no_split=[None, [], ["Block"], ["Linear", "Net"], "Block"],
)  # fmt: skip
def calculate_maximum_sizes(model, no_split):
    if no_split is not None and isinstance(model, nn.Module):
        model._no_split_modules = no_split
    return modeling.calculate_maximum_sizes(model)


SIZES = [
    "5GB", "5gb", "5Gb", "5GiB", "5gib", "1KB", "1kb", "1Kb", "1KiB", "2MB", "2mb", "2MiB", "0MB", "1.5GB", "1.5GiB",
    ".5MB", "1.", "1e3MB", " 5GB", "5 GB", "5GB ", "", "GB", "5", "5B", "5TB", "5TiB", "-1GB", "-1", "five GB", "5G",
    "5GBB", "٥GB", "1_000MB", "0.0000001KB", 0, 1, 10**15, -1, 1.5, 0.0, -0.5, float("inf"), float("nan"), None, True,
    False, [], (1, "GB"), b"5GB", torch.tensor(5),
]  # fmt: skip
call("utils.modeling:convert_file_size_to_int", size=SIZES)
short(
    "named_module_tensors", lambda model,
    **given: [(name, t.shape, t.dtype, t.device.type) for name, t in modeling.named_module_tensors(model, **given)],
    "utils.modeling:named_module_tensors", model=MODELS, include_buffers=[True, False], recurse=[True, False],
    remove_non_persistent=[True, False],
)  # fmt: skip
call(
    "utils.modeling:get_non_persistent_buffers", module={**MODELS, **NOT_MODELS}, recurse=[True, False],
    fqns=[True, False],
)  # fmt: skip


def twice_tied():
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "zab"})
    model["z"].weight = model["a"].weight = model["b"].weight
    return model


def two_ties():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight, model[1].bias = model[0].weight, model[0].bias
    return model


def one_parent():
    value = nn.Parameter(torch.ones(2))
    return Bare(a=value, b=value)


TIED = {
    **MODELS, "twice": twice_tied, "two ties": two_ties, "one parent": one_parent,
    "meta tied": lambda: on_meta(lambda: Net(tied=True)),
}  # fmt: skip
GROUPS = [
    [], [[]], [["head.weight", "embed.weight"]], [["a.weight", "b.weight", "z.weight"]],
    [["0.weight", "1.weight"], ["0.bias", "1.bias"]], [["a", "b"]], [["weight"]], [["nothing", "head.weight"]],
    [["no.such", "head.weight"]], [["shift", "norm.bias"]], None, ["ab"], [[""]],
]  # fmt: skip
PLACES = [
    {}, {"": 0}, {"": "cpu"}, {"a": 0, "b": 0, "z": 0}, {"a": 0, "b": 1, "z": 0},
    {"a.weight": 0, "b": "cpu", "z": "disk"}, {"0": 0, "1": 1}, {"embed": 0, "head": 0}, {"embed": 0, "head": "cpu"},
    {"embed": 0, "head.weight": 1, "": 1}, {"shift": 0, "norm": "disk"}, {"a": 0}, None,
]  # fmt: skip


@probe("utils.modeling:check_tied_parameters_on_same_device", tied_params=GROUPS, device_map=PLACES)
def check_tied_parameters_on_same_device(tied_params, device_map):
    return said(lambda: modeling.check_tied_parameters_on_same_device(tied_params, device_map))


@probe(
    "utils.modeling:get_module_size_with_ties",
    model={n: TIED[n] for n in ("net", "tied", "twice", "two ties", "shared", "empty")},
    tied=[[], ["head.weight"], ["a.weight"], ["a.weight", "z.bias"], ["1.weight"], ["nothing"], None], size=[0, 100],
    taken=[0, 1],
)  # fmt: skip
def get_module_size_with_ties(model, tied, size, taken):
    sizes = modeling.compute_module_sizes(model)
    total, names, found = modeling.get_module_size_with_ties(tied, size, sizes, list(model.named_children())[taken:])
    return total, names, [type(module) for module in found]
