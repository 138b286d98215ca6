"""Budgets, device maps, random models, and contexts of precision."""

import copy
import functools
import itertools

import torch

import placement_samples as samples
from accelerate.utils import modeling
from interop.differential.core import call, probe
from interop.differential.probes.modeling import MODELS, NOT_MODELS, SOME, TIED, named, said

BUDGETS = [
    {}, {"cpu": 10**6}, {"cpu": "1MB"}, {0: 0, "cpu": 10**6}, {0: 100, "cpu": 300}, {0: 300, 1: 300, "cpu": 10**6},
    {0: 200, 1: 200, "cpu": 200}, {1: 300, 0: 300}, {0: "1KB", "disk": 10**6}, {0: 10**9},
    {"disk": 10**6, "cpu": 200, 0: 200}, {0: 500, 1: 0, 2: 500}, {"mps": 10**6}, {0: 300, "mps": 300}, {0: "lots"},
    {0: -1, "cpu": 10**6}, {"gpu": 5}, {"CPU": 5}, {0: None, "cpu": 10**6}, {0.0: 100, "cpu": 10**6}, {"0": 100},
    {None: 5}, [1], "1GB", 5,
]  # fmt: skip


@probe("utils.modeling:get_max_memory", max_memory=[*BUDGETS, {0: 1.5}, {"cpu": "1GiB", 3: "1MiB"}, {True: 5}])
def get_max_memory(max_memory):
    return said(lambda: modeling.get_max_memory(max_memory))["value"]


call("utils.modeling:get_balanced_memory", model=SOME, max_memory=BUDGETS, low_zero=[False, True])


@probe("utils.modeling:infer_auto_device_map", model={**MODELS, **NOT_MODELS}, max_memory=BUDGETS)
def infer_auto_device_map(**given):
    return named(given["model"], modeling.infer_auto_device_map(clean_result=False, **given))


@probe(
    "utils.modeling:fallback_allocate", model=TIED, size_limit=[0, 60, 10**6, -1, 12.5], no_split=[None, ["Block"]],
    ties=[None, True],
)  # fmt: skip
def fallback_allocate(model, size_limit, no_split, ties):
    modules, sizes = list(model.named_children()), modeling.compute_module_sizes(model)
    tied = sorted(modeling.find_tied_parameters(model)) if ties else None
    name, module, rest = modeling.fallback_allocate(modules, sizes, size_limit, no_split, tied)
    return name, type(module), [(name, type(item)) for name, item in rest]


MAPS = [
    {}, {"": 0}, {"a": 0}, {"a": 0, "b": 0}, {"a": 0, "b": 1}, {"a.b": 0, "a.c": 0}, {"a.b": 0, "a.c": 0, "d": 1},
    {"a.b": 0, "a.c": "cpu", "d": "cpu"}, {"a.b.c": 0, "a.b.d": 0, "a.e": 0, "f": "disk"}, {"a": 0, "a.b": 0},
    {"a": 0, "a.b": 1}, {"ab.c": 0, "a.c": 0, "a.d": 0}, {"": 0, "a": 0}, {"": 0, "a": 1},
    {"0.weight": 0, "0.bias": 0, "1": 1}, {"a": "cpu", "b": torch.device("cpu")}, {"a": None, "b": None},
    {"ä.ö": 0, "ä.ü": 0}, None, ["a"],
]  # fmt: skip


@probe("utils.modeling:clean_device_map", device_map=MAPS, module_name=["", "a", "a.b", "d", "nothing", None])
def clean_device_map(device_map, module_name):
    found = modeling.clean_device_map(device_map, module_name)
    return dict(found), found is device_map


GIVEN = [
    {}, {"": "cpu"}, {"": 0, "nothing": 1}, {"0": 0, "2": 1}, {"0": 0},
    {"shift": 0, "embed": 0, "blocks": 0, "norm": 0, "head": 0},
    {"shift": 0, "embed": 0, "blocks.0": 0, "blocks.1": "disk", "norm": 0, "head": 0, "lm": 1},
    {"embed": 0, "head": 0}, {"weight": 0, "bias": 0}, {"weight": 0}, {"conv": 0, "norm": 0, "flat": 0, "out": 0},
    {"conv": 0, "norm.weight": 0, "norm.bias": 0, "out": 0}, None, [], "auto",
]  # fmt: skip


@probe("utils.modeling:check_device_map", model={**MODELS, **NOT_MODELS}, device_map=GIVEN)
def check_device_map(**given):
    return said(lambda: modeling.check_device_map(**given))


class TieBroken(Exception):
    """A map gives several devices to one parameter."""


class CountedTwice(Exception):
    """A module that is tied by two weights counted twice, so that the map is another one."""


class NoDevice(Exception):
    """A map has no device for a tensor."""


@functools.lru_cache(maxsize=1)
def placed(seed):
    model = samples.model(seed)
    options = samples.arguments(seed, model)
    budgets, no_split = options.pop("max_memory"), options["no_split_module_classes"]
    numerics = {name: options[name] for name in ("dtype", "special_dtypes")}
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    find, weigh = modeling.find_tied_parameters, modeling.get_module_size_with_ties
    tied = sorted(find(model), key=lambda group: min(map(names.index, group)))
    sizes = modeling.compute_module_sizes(model, **numerics)
    indices = sorted(device for device in budgets if isinstance(device, int))
    holes = indices != list(range(len(indices))) or not all(budgets[i] for i in indices)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]

    def weighed(*args, **kwargs):
        found = weigh(*args, **kwargs)
        if len(set(found[1])) < len(found[1]):
            raise CountedTwice
        return found

    def device_map():
        # Ties in the order of the model, and a module that counts twice is noticed.
        modeling.find_tied_parameters, modeling.get_module_size_with_ties = lambda *_, **__: tied, weighed
        try:
            return modeling.infer_auto_device_map(model, **options, max_memory=dict(budgets))
        finally:
            modeling.find_tied_parameters, modeling.get_module_size_with_ties = find, weigh

    def device(name, found):
        parts = [*itertools.accumulate(name.split("."), "{}.{}".format)][::-1]
        return next((found[part] for part in [*parts, ""] if part in found), NoDevice)

    def whole(clean):
        found = device_map()
        if any(device(name, found) is NoDevice for name, _ in tensors):
            raise NoDevice
        return dict(sorted(modeling.clean_device_map(dict(found)).items())) if clean else sorted(found)

    def unbuffered():
        """Of entries for buffers, and for second names, there may be none."""
        found = device_map()
        if any(len({device(name, found) for name in group}) > 1 for group in tied):
            raise TieBroken
        first = {name for name, _ in [*model.named_modules(), *model.named_parameters()]}
        return {name: where for name, where in found.items() if name in first}

    queue = [*model.named_parameters(recurse=False), *model.named_children(), *model.named_buffers(recurse=False)]
    classes = [no_split] if isinstance(no_split, str) else no_split or []
    balance = {**numerics, "no_split_module_classes": no_split, "low_zero": seed % 3 == 0 and not holes}
    return {
        "map": unbuffered, "whole": lambda: whole(False), "clean": lambda: whole(True),
        "budgets": lambda: modeling.get_balanced_memory(model, dict(budgets), **balance), "sizes": lambda: dict(sizes),
        "buffers": lambda: dict(modeling.compute_module_sizes(model, **numerics, buffers_only=True)),
        "largest": lambda: modeling.get_max_layer_size(queue, copy.copy(sizes), classes), "tied": lambda: tied,
        "leaves": lambda: modeling.get_module_leaves(sizes),
    }  # fmt: skip


def placement(seed, what):
    return placed(seed)[what]()


for seeds, slow in ((range(30), False), (range(30, 600), True)):
    probe(
        "utils.modeling:infer_auto_device_map",
        "utils.modeling:clean_device_map",
        slow=slow,
        seed=list(seeds),
        what=["map", "whole", "clean", "budgets", "sizes", "buffers", "largest", "tied", "leaves"],
    )(placement)
