"""Random models and random budgets for device maps, the same for every package that is installed: plain torch."""

import random
from typing import Any

import torch
from torch import nn

# No name is part of another one (or of "weight") or comes twice, since 1.15.0 finds names inside names.
_SAFE = [f"{first}{second}{third}" for first in "bcdf" for second in "hjklmn" for third in "pqrstvwxz"]
_CONFUSING = ["m", "m0", "m00", "mm", "0", "00", "m0m", "weight", "a", "aa", "am"]
_DTYPES = [torch.float32, torch.float32, torch.float32, torch.float16, torch.int8, torch.float64, torch.bool]


class BlockA(nn.Module):
    """A container with a separate class name."""


class BlockB(nn.Module):
    """Another one."""


class BlockC(nn.Module):
    """And a third one."""


class Leaf(nn.Module):
    """Holds tensors of its own and no modules, unless some are added."""


CONTAINERS = [BlockA, BlockB, BlockC]


class Names:
    """Where the names of a model come from.

    Args:
        chance: Decides.
        confusing: Names that are parts of each other, and come again in other places.
    """

    def __init__(self, chance: random.Random, confusing: bool) -> None:
        self.chance = chance
        self.pool = None if confusing else chance.sample(_SAFE, len(_SAFE))

    def some(self, count: int) -> list[str]:
        """Return names for the children of one module."""
        if self.pool is None:
            return self.chance.sample(_CONFUSING, count)
        return [self.pool.pop() for _ in range(count)]


def tensors(chance: random.Random, module: nn.Module, most: int, names: Names) -> None:
    """Give a module up to so many parameters and buffers of its own."""
    free = [name for name in names.some(most + 3) if name not in module._modules]
    for name in free[: chance.randint(0, most)]:
        dtype = chance.choice(_DTYPES)
        shape = chance.choice([(), (chance.randint(1, 40),), (chance.randint(1, 9), chance.randint(1, 9))])
        value = torch.zeros(shape, dtype=dtype)
        if chance.random() < 0.6:
            module.register_parameter(name, nn.Parameter(value, requires_grad=False))
        else:
            module.register_buffer(name, value, persistent=chance.random() < 0.7)


def leaf(chance: random.Random, names: Names) -> nn.Module:
    """Return a module without submodules."""
    kind = chance.randrange(8)
    wide, long = chance.randint(1, 12), chance.randint(1, 12)
    if kind < 3:
        return nn.Linear(wide, long, bias=chance.random() < 0.7)
    if kind == 3:
        return nn.Embedding(wide, long)
    if kind == 4:
        return nn.BatchNorm1d(wide, affine=chance.random() < 0.8)
    if kind == 5:
        return nn.LayerNorm(wide)
    if kind == 6:
        return nn.ReLU()
    module = Leaf()
    tensors(chance, module, 3, names)
    return module


def model(seed: int, confusing: bool = False) -> nn.Module:
    """Return a random nested model, with ties, shared modules, buffers and tensors at every level.

    Args:
        seed: The same seed gives the same model.
        confusing: Names that are parts of each other.
    """
    chance = random.Random(seed)
    names = Names(chance, confusing)
    made = [0]

    def fill(module: nn.Module, depth: int) -> nn.Module:
        for name in names.some(chance.randint(1, 4)):
            made[0] += 1
            if depth < 4 and chance.random() < (0.75, 0.55, 0.4, 0.25)[depth] and made[0] < 40:
                child = fill(chance.choice(CONTAINERS)(), depth + 1)
            else:
                child = leaf(chance, names)
            module.add_module(name, child)
        if chance.random() < 0.3:
            tensors(chance, module, 2, names)
        return module

    root = fill(BlockA(), 0)
    modules = [module for module in root.modules() if module is not root]
    owners = [module for module in root.modules() if any(p is not None for p in module._parameters.values())]
    for _ in range(chance.choice([0, 0, 1, 1, 2, 4]) if owners else 0):
        source, target = chance.choice(owners), chance.choice(owners)
        parameter = chance.choice([p for p in source._parameters.values() if p is not None])
        target._parameters[chance.choice([n for n, p in target._parameters.items() if p is not None])] = parameter
    if chance.random() < 0.1:  # a module that is in two places
        shared = leaf(chance, names)
        for owner in (root, chance.choice([root, *modules])):
            owner.add_module(next(name for name in names.some(6) if not hasattr(owner, name)), shared)
    return root


def _budget(chance: random.Random, total: int) -> int | str | float:
    kind = chance.randrange(12)
    if kind == 0:
        return 0
    if kind == 1:
        return chance.randint(0, 64)
    if kind == 2:
        return "1KB"
    if kind == 3:
        return total * chance.random()
    if kind == 4:
        return total * 10
    return int(total * chance.choice([0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.3]) * (0.6 + 0.8 * chance.random()))


def arguments(seed: int, module: nn.Module) -> dict[str, Any]:
    """Return random arguments of `infer_auto_device_map` for a model."""
    chance = random.Random(f"arguments {seed}")
    total = sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))
    devices: list[int | str] = chance.choice([[], [0], [0], [0, 1], [0, 1], [0, 1, 2], [1, 3], [0, 1, 2, 3]])
    devices = [*devices, *(name for name, odds in (("cpu", 0.75), ("disk", 0.2)) if chance.random() < odds)]
    if chance.random() < 0.05:
        devices = ["mps", *(name for name in devices if isinstance(name, str))]
    if not devices:
        devices = ["cpu"]
    chance.shuffle(devices)
    named = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
    special = chance.sample(named, min(len(named), 3)) if chance.random() < 0.3 else []
    classes = ["BlockA", "BlockB", "BlockC", "Linear", "Leaf"]
    return {
        "max_memory": {device: _budget(chance, total) for device in devices},
        "no_split_module_classes": chance.choice([None, [], "BlockB", ["BlockC"], chance.sample(classes, 2)]),
        "dtype": chance.choice([None, None, None, "float16", torch.bfloat16, torch.float32, torch.int8]),
        "special_dtypes": {name: chance.choice([torch.float16, "float32", torch.int8]) for name in special} or None,
        "clean_result": False,
        "offload_buffers": chance.random() < 0.4,
        "fallback_allocation": chance.random() < 0.4,
    }
