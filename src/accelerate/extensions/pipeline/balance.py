"""The division of a model into stages of about equal size or cost, in the order of its modules."""

import bisect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.extensions.big_models.tensors import compute_module_sizes


@dataclass
class Unit:
    """An indivisible part of a stage: a module with weights, and loose tensors and modules before it; size in bytes, or cost."""

    module: str
    names: list[str]
    size: int


def units_of(model: nn.Module, no_split: Collection[str]) -> list[Unit]:
    """The modules of a model in the order of their definition, as fine as they may be cut."""
    sizes = compute_module_sizes(model)
    units: list[Unit] = []
    loose: list[str] = []

    def collect(module: nn.Module, name: str) -> None:
        prefix = f"{name}." if name else ""
        children = list(module.named_children())
        if name and (not children or type(module).__name__ in no_split):
            if sizes.get(name, 0):
                units.append(Unit(name, [*loose, name], sizes[name]))
                loose.clear()
            else:  # begins no stage: it may be one that forward never calls
                (units[-1].names if units else loose).append(name)
            return
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        loose.extend(prefix + tensor for tensor, _ in tensors)
        for child, part in children:
            collect(part, prefix + child)

    collect(model, "")
    if units:
        units[-1].names.extend(loose)
    return units


def even_stages(model: nn.Module, stages: int, no_split: Collection[str] | None) -> list[list[Unit]]:
    """Cut a model's modules, in order, so that the largest stage is as small as can be."""
    units = units_of(model, (getattr(model, "_no_split_modules", None) or ()) if no_split is None else no_split)
    return _evenly(model, units, stages, "modules with weights")


def _evenly(model: nn.Module, units: Sequence[Unit], stages: int, kind: str) -> list[list[Unit]]:
    if len(units) < stages:
        raise ValueError(
            f"{type(model).__name__} cannot be cut into {stages} stages: it has {len(units)} {kind} "
            f"({', '.join(unit.module for unit in units[:5])}{', ...' if len(units) > 5 else ''}). Use fewer processes."
        )
    limits = range(max(unit.size for unit in units), sum(unit.size for unit in units))
    fitting = bisect.bisect_left(limits, True, key=lambda limit: len(_filled(units, stages, limit)) <= stages)
    return _filled(units, stages, limits.start + fitting)


def _filled(units: Sequence[Unit], stages: int, limit: int) -> list[list[Unit]]:
    """Fill one stage after the other up to a limit, and keep one unit for each later stage."""
    cut: list[list[Unit]] = [[]]
    size = 0
    for position, unit in enumerate(units):
        if cut[-1] and (size + unit.size > limit or len(units) - position <= stages - len(cut)):
            cut.append([])
            size = 0
        cut[-1].append(unit)
        size += unit.size
    return cut


def costly_stages(model: nn.Module, stages: int, run: Callable[[], Any]) -> list[str]:
    """Return the first blocks of the stages, so that the most expensive stage is as cheap as possible.

    Blocks are those of the largest list of one class that has enough of them. The cost is the count of `FlopCounterMode` in
    `run`, a forward pass. Operations before the first block belong to the first stage, the rest to the last one. A model
    without such a list is cut by its sizes (`even_stages`).
    """
    lists = [
        (name, list(module.named_children()))
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len({type(part) for part in module}) == 1
    ]

    # By weights first: each layer of a mixture of experts has a list that may be longer than that of the layers.
    def weight(blocks: list[tuple[str, nn.Module]]) -> int:
        return sum(tensor.numel() for _, block in blocks for tensor in block.parameters())

    enough = [blocks_of for blocks_of in lists if len(blocks_of[1]) >= stages]
    path, blocks = max(enough, key=lambda blocks_of: (weight(blocks_of[1]), len(blocks_of[1])), default=("", []))
    if not blocks:
        return [units[0].module for units in even_stages(model, stages, None)[1:]]
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:
        run()
    counts = {name: sum(operations.values()) for name, operations in counter.get_flop_counts().items()}
    prefix = f"{path}." if path else ""
    units = []
    for name, block in blocks:
        count = counts.get(f"{type(model).__name__}.{prefix}{name}", 0)
        # Without matrix products, the number of parameters is the cost.
        units.append(Unit(prefix + name, [], count or sum(weight.numel() for weight in block.parameters())))
    rest = counter.get_total_flops() - sum(unit.size for unit in units)
    # The outer modules do not tell which operations run before and after the blocks. The operations after them, a head, are nearly always more.
    units[-1].size += max(rest, 0)
    return [group[0].module for group in _evenly(model, units, stages, "blocks")[1:]]
