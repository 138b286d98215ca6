"""Tied parameters: finding them, tying them again, and what they weigh together."""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.modules.unwrap import extract_model_from_parallel
from accelerate.offload.tensors import tensor_at

logger = logging.getLogger("accelerate.utils.modeling")

# How many groups of tied parameters a warning spells out.
_SHOWN = 5


def is_peft_model(model: nn.Module) -> bool:
    """Say whether a model, taken out of its parallel wrappers, is a ``PeftModel``. Does not import peft.

    Args:
        model: Any module.
    """
    # Where peft was never imported nobody can have made a PeftModel.
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(extract_model_from_parallel(model), peft.PeftModel)


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the groups of names under which one and the same parameter is reachable.

    Call it before weights move between devices: a move makes a new parameter out of each name.

    Args:
        model: The model to search.
        **kwargs: Accepted for callers of older versions; has no effect.

    Returns:
        Groups of two or more names, each sorted; groups in the order of ``model.named_parameters()``.

    Example:
        >>> model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        >>> model["b"].weight = model["a"].weight
        >>> find_tied_parameters(model)
        [['a.weight', 'b.weight']]
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Make the names of each group refer to one parameter again, the first of them that holds data.

    A group whose parameters are all on the meta device stays as it is: there is nothing yet to share.

    Args:
        model: The model, changed in place.
        tied_params: Groups of names, as `find_tied_parameters` returned them.

    Raises:
        AttributeError: A name does not exist in the model.
    """
    for group in tied_params:
        owners = [tensor_at(model, name) for name in group]
        parameters = [getattr(owner, last) for owner, last in owners]
        shared = next((p for p in parameters if p.device.type != "meta"), None)
        if shared is not None:
            for owner, last in owners:
                setattr(owner, last, shared)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Say whether a transformers model declares tied weights, in its configuration or by a ``_tie_weights`` method.

    Args:
        model: Any module; other libraries' models declare nothing and give False.
    """
    # A model can only be a PreTrainedModel if that class was imported; importing it here would take seconds.
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if base is None or not isinstance(model, base):
        return False
    config = getattr(model, "config", None)
    if config is not None:
        words = getattr(config.get_text_config(decoder=True), "tie_word_embeddings", False)
        if words and model.get_output_embeddings() is not None:
            return True
        if getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False):
            return True
    return any(hasattr(module, "_tie_weights") for module in model.modules())


def device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    """Return the device that a device map gives to a parameter: that of the longest entry it lies under.

    Args:
        name: Dotted name of a parameter, buffer or module.
        device_map: Module or tensor names to devices; ``""`` stands for everything.

    Raises:
        ValueError: No entry covers the name.
    """
    part = name
    while part not in device_map:
        if not part:
            raise ValueError(
                f"The `device_map` gives no device for {name!r}. Add it, a parent module, or '' (the rest)."
            )
        part = part.rpartition(".")[0]
    return device_map[part]


def check_tied_parameters_on_same_device(tied_params: Sequence[Sequence[str]], device_map: Mapping[str, Any]) -> None:
    """Warn, once, where a device map puts the names of a tied parameter on several devices, which duplicates it.

    Args:
        tied_params: As `find_tied_parameters` returns it.
        device_map: Module names to devices.

    Raises:
        ValueError: The map does not cover a tied parameter.
    """
    apart = []
    for group in tied_params:
        placed = {name: device_of(name, device_map) for name in group}
        if len(set(placed.values())) > 1:
            apart.append(placed)
    if apart:
        more = f" and {len(apart) - _SHOWN} more groups" if len(apart) > _SHOWN else ""
        logger.warning(
            "Tied parameters are on different devices: %s%s. Each device gets a copy of its own; put these modules on "
            "one device, or use `device_map='auto'`.",
            ", ".join(map(str, apart[:_SHOWN])),
            more,
        )


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, nn.Module | torch.Tensor]],
) -> tuple[int, list[str], list[nn.Module | torch.Tensor]]:
    """Return what a module weighs together with the waiting modules that its parameters are tied to.

    Args:
        tied_params: Names of parameters outside the module that are tied to parameters inside it.
        module_size: Bytes of the module.
        module_sizes: As `compute_module_sizes` returns it; a tied parameter counts in it only once.
        modules_to_treat: The modules not yet placed. A tied parameter in none of them is left out.

    Returns:
        The bytes of all of them, the names of the tied modules and the modules themselves.
    """
    total = module_size
    order = {name: index for index, (name, _) in reversed(list(enumerate(modules_to_treat)))}
    found: dict[str, nn.Module | torch.Tensor] = {}
    for parameter in tied_params:
        holders = [order[part] for part in name_and_parents(parameter) if part in order]
        if not holders:
            continue
        name, module = modules_to_treat[min(holders)]
        if name not in found:
            found[name] = module
            # The shared parameter itself is in one of the two sizes already, or in both.
            total += module_sizes.get(name, 0) - module_sizes.get(parameter, 0)
    return total, list(found), list(found.values())


def name_and_parents(name: str) -> Iterator[str]:
    """Yield a dotted name, and then those of the modules that it lies in, innermost first.

    Args:
        name: Name of a module or tensor; an empty one yields nothing.
    """
    while name:
        yield name
        name = name.rpartition(".")[0]


class Ties:
    """The groups of tied parameters, by every module that one of them lies in.

    Args:
        groups: Names of one parameter each.
        followed: Whether what is tied to a module that comes along comes along as well.
    """

    def __init__(self, groups: Sequence[Sequence[str]], followed: bool = False) -> None:
        self.groups = groups
        self.followed = followed
        self.settled: set[int] = set()  # groups that are on a device
        self.of: dict[str, list[int]] = {}
        for index, group in enumerate(groups):
            for name in group:
                while name:
                    known = self.of.setdefault(name, [])
                    if not known or known[-1] != index:
                        known.append(index)
                    name = name.rpartition(".")[0]


class Company:
    """The waiting items that have to go where one item goes, since they are tied to it.

    They are looked up one by one, and only as far as is needed.

    Args:
        name: The item.
        ties: The ties of the model.
        sizes: Bytes by name.
        holder: Returns the name of the item that holds a tensor and waits, other than the one given.
    """

    def __init__(
        self, name: str, ties: Ties, sizes: Mapping[str, int | float], holder: Callable[[str], str | None]
    ) -> None:
        self._name, self._ties, self._sizes, self._holder = name, ties, sizes, holder
        self._begin()

    def _begin(self) -> None:
        self.groups: dict[int, None] = {}
        self.size: int | float = 0
        self._tied: list[str] = []
        self._position = 0  # of the next tied tensor to look up
        self._splittable_from = 0
        self._members: dict[str, list[int]] = {}  # partner -> positions of the tensors that it holds
        self._calling: set[str] = set()  # partners through which others came
        self._call(self._name)

    def _call(self, name: str) -> bool:
        """Note what is tied to a module."""
        new = [g for g in self._ties.of.get(name, ()) if g not in self.groups and g not in self._ties.settled]
        for group in new:
            self.groups[group] = None
            self._tied += self._ties.groups[group]
        return bool(new)

    def _join(self, position: int) -> None:
        partner = self._holder(self._tied[position])
        if partner is None:
            return
        if partner not in self._members:
            self._members[partner] = []
            self.size += self._sizes.get(partner, 0)
            if self._ties.followed and self._call(partner):
                self._calling.add(partner)
        self._members[partner].append(position)

    def fits(self, room: float) -> bool:
        """Say whether all partners together fit into so many bytes."""
        while self.size <= room and self._position < len(self._tied):
            self._join(self._position)
            self._position += 1
        return self.size <= room

    def partners(self) -> list[str]:
        """Return the names of all partners, in the order of the tied tensors."""
        self.fits(float("inf"))
        return sorted(self._members, key=lambda partner: self._members[partner][0])

    def first_splittable(self, is_whole: Callable[[str], bool]) -> str | None:
        """Return the first partner that can be split.

        Args:
            is_whole: Says of a partner that it cannot.
        """
        while self._splittable_from < len(self._tied):
            if self._splittable_from == self._position:
                self._join(self._position)
                self._position += 1
            partner = self._holder(self._tied[self._splittable_from])
            if partner is not None and not is_whole(partner):
                return partner
            self._splittable_from += 1
        return None

    def opened(self, partner: str) -> None:
        """Take notice that the pieces of a partner wait in its place."""
        if partner in self._calling:
            # What came along because of it may be tied to none of the pieces that stay.
            self._begin()
            return
        self.size -= self._sizes.get(partner, 0)
        for position in self._members.pop(partner):
            self._join(position)
