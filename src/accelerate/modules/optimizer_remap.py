"""Parameters that preparing replaced, and the optimizers that must follow them.

Sharding replaces the parameters that an optimizer was made with, and so does moving a model to some devices. A prepared
optimizer follows by name: the name of a parameter before is the name of its replacement afterwards.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from accelerate.modules.unwrap import canonical_name
from accelerate.runtime import torch_private

# Every parameter that something took the place of, by its name: its Accelerator may be gone.
_REPLACED = WeakTensorKeyDictionary()


class MovedParameters:
    """The replacements of parameters, by the replaced parameter."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all of them."""
        self._new = WeakTensorKeyDictionary()  # the parameter in its place, and whether it has the same elements

    def record(self, name: str, old: nn.Parameter, new: nn.Parameter, same_elements: bool = False) -> None:
        """Remember a replacement; `same_elements` means that an optimizer's state still fits."""
        self._new[old], _REPLACED[old] = (new, same_elements), name
        # The number of parameters it replaces: FSDP1 flattens those of a unit into one. An attribute, because another parameter
        # may have its id later, and because torch does not move a parallel model that weak references point to.
        new._accelerate_members = getattr(new, "_accelerate_members", 0) + 1  # type: ignore[attr-defined]

    def resolve(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the replacement of a parameter, through any number of replacements; itself if it was never replaced."""
        return self._resolve(parameter)[0]

    def _resolve(self, parameter: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return the replacement of a parameter, and whether all its replacements have the same elements."""
        same_elements = True
        while (replaced := self._new.get(parameter)) is not None:
            parameter, same_elements = replaced[0], same_elements and replaced[1]
        return parameter, same_elements

    def follow(self, optimizer: torch.optim.Optimizer) -> bool:
        """Let torch's own optimizer update what took its parameters' place, all or none; return whether it changed.

        ValueError: it has stepped already, or one flat parameter stands for parameters of several groups.
        """
        if not len(self._new):
            return False
        groups = [[(old, self.resolve(old)) for old in group["params"]] for group in optimizer.param_groups]
        moved = [(old, new) for group in groups for old, new in group if new is not old]
        if not moved:
            return False
        stateful = [(old, new) for old, new in moved if optimizer.state.get(old)]
        if stuck := [_REPLACED[old] for old, _ in stateful if not self._resolve(old)[1]]:
            raise ValueError(
                f"The optimizer ({type(optimizer).__name__}) has a state for {stuck[0]!r} as it was before the model was sharded. "
                "Prepare model and optimizer together before the first step, and load its state afterwards with "
                "`accelerator.load_state`."
            )
        self._check_flat(groups)
        for group, pairs in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = list({id(new): new for _, new in pairs}.values())
        for old, new in stateful:
            optimizer.state[new] = optimizer.state.pop(old)
        if stateful:  # torch's own loading casts each entry to its parameter's device
            optimizer.load_state_dict(optimizer.state_dict())
        return True

    def _check_flat(self, groups: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> None:
        """Refuse a flat parameter of which a group has only a part: it has one learning rate."""
        for number, pairs in enumerate(groups):
            member_counts = Counter(id(new) for old, new in pairs if new is not old)
            for old, new in pairs:
                have, all_of_it = member_counts[id(new)], getattr(new, "_accelerate_members", 1)
                if new is not old and have < all_of_it:
                    raise ValueError(
                        f"Group {number} of the optimizer has {have} of the {all_of_it} parameters that FSDP flattened into one "
                        f"({_REPLACED[old]!r} is one of them), and one flat parameter can have one set of options only. Pass "
                        "FullyShardedDataParallelPlugin(use_orig_params=True), or use fsdp_version=2, for groups within a layer."
                    )


def remap_optimizer(optimizer: torch.optim.Optimizer, histories: Sequence[MovedParameters]) -> None:
    """Let torch's own optimizer follow, whichever Accelerator replaced its parameters; ValueError if none knows."""
    while any(history.follow(optimizer) for history in histories):
        pass  # one Accelerator may have replaced the replacement of another one
    for group in optimizer.param_groups:
        if len(set(map(type, group["params"]))) > 1 and group.get("foreach", True) is None and not group.get("fused"):
            spread = {torch_private.local_part(parameter) is not parameter for parameter in group["params"]}
            if len(spread) > 1:
                group["foreach"] = False  # torch's default on GPUs takes no list of DTensors and others
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if lost := [_REPLACED[parameter] for parameter in parameters if parameter in _REPLACED]:
        raise ValueError(
            f"The optimizer ({type(optimizer).__name__}) has {len(lost)} parameters as they were before a model was prepared, "
            f"{lost[0]!r} for one, and their replacements are unknown: the model has no parameter of that name any more, or the "
            "Accelerator has released it (`free_memory`), so a step would change nothing. Make the optimizer from "
            "`model.parameters()` of the model as it is now."
        )


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters by all the names that they have, without the parts that wrappers put in."""
    return {canonical_name(name): value for name, value in model.named_parameters(remove_duplicate=False)}


@contextlib.contextmanager
def remapping(accelerator: Any, model: nn.Module, same_elements: bool = False) -> Iterator[None]:
    """Let optimizers, prepared and to come, follow parameters that are replaced inside, as `remap_optimizers`; ties stay."""
    before, tied = dict(model.named_parameters(remove_duplicate=False)), ties(model)
    yield
    if tied:
        tie(model, tied)
    after = dict(model.named_parameters(remove_duplicate=False))
    if [*map(id, before.values())] != [*map(id, after.values())]:
        remap_optimizers(
            accelerator, model, {canonical_name(name): value for name, value in before.items()}, same_elements
        )


def ties(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """Return the parameters that have several names, with these."""
    names_of: dict[int, tuple[nn.Parameter, list[str]]] = {}  # by id: tensors are slow to hash
    for name, value in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(value), (value, []))[1].append(name)
    return [(value, names) for value, names in names_of.values() if len(names) > 1]


def tie(model: nn.Module, before: list[tuple[nn.Parameter, list[str]]]) -> None:
    """Give names that meant one parameter one parameter again: the old one if it still has one of them."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for old, names in before:
        owners = [(modules.get(owner), entry) for owner, _, entry in (name.rpartition(".") for name in names)]
        places = [(owner._parameters, entry) for owner, entry in owners if entry in getattr(owner, "_parameters", ())]
        values = [parameters[entry] for parameters, entry in places]
        for parameters, entry in places:
            parameters[entry] = old if any(value is old for value in values) else values[0]


def remap_optimizers(
    accelerator: Any, model: nn.Module, before: Mapping[str, nn.Parameter], same_elements: bool = False
) -> None:
    """Let prepared and future optimizers follow the replaced parameters of a model.

    `before` is the result of `named` for the former model; `same_elements` as in `record`. ValueError: as
    `MovedParameters.follow`.
    """
    moved: MovedParameters = accelerator.prepared.moved
    after = named(model)
    kept = {id(parameter) for parameter in after.values()}
    seen: set[int] = set()
    for name, old in before.items():
        new = after.get(name)
        if new is not None and new is not old and id(old) not in seen:
            seen.add(id(old))
            moved.record(name, old, new, same_elements)
        elif new is None and old.requires_grad and id(old) not in kept:
            _REPLACED[old] = name
    for optimizer in accelerator._optimizers:
        moved.follow(optimizer.optimizer)
