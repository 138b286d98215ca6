"""The parameters and buffers of a module by name, and those that several names share: finding them, tying them again."""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.modules.unwrap import extract_model_from_parallel

logger = logging.getLogger("accelerate.utils.modeling")

# How many groups of tied parameters a warning spells out.
_SHOWN = 5


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of the buffers that a module keeps out of its state dict. The module is only read.

    Args:
        module: The module to look into.
        recurse: Also look into its submodules.
        fqns: With ``recurse``, return names as ``named_buffers`` writes them (``"block.mask"``); otherwise only the
            last part, without saying in which submodule.

    Example:
        >>> block = nn.Module()
        >>> block.register_buffer("mask", torch.ones(2), persistent=False)
        >>> get_non_persistent_buffers(nn.Sequential(block), recurse=True, fqns=True)
        {'0.mask'}
    """
    if not recurse:
        return set(module._non_persistent_buffers_set)
    names = set()
    for path, submodule in module.named_modules():
        prefix = f"{path}." if fqns and path else ""
        names.update(prefix + name for name in submodule._non_persistent_buffers_set)
    return names


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a module and then its buffers, with their names.

    Args:
        module: The module to read.
        include_buffers: Yield buffers as well.
        recurse: Include the tensors of submodules; a tensor reached twice comes once.
        remove_non_persistent: Leave out buffers that are not in the state dict.

    Example:
        >>> [name for name, _ in named_module_tensors(nn.Linear(2, 2))]
        ['weight', 'bias']
    """
    if not recurse or not module._modules:
        # Hooks ask this of every module of a model; the general way below costs ten times as much.
        yield from _direct(module._parameters)
        left_out = module._non_persistent_buffers_set if remove_non_persistent else ()
        if include_buffers:
            yield from (pair for pair in _direct(module._buffers) if pair[0] not in left_out)
        return
    yield from module.named_parameters(recurse=True)
    if include_buffers:
        left_out = get_non_persistent_buffers(module, recurse=True, fqns=True) if remove_non_persistent else ()
        for name, buffer in module.named_buffers(recurse=True):
            if name not in left_out:
                yield name, buffer


def _direct(table: dict[str, torch.Tensor | None]) -> list[tuple[str, torch.Tensor]]:
    """The tensors of one module's table; one that has two names comes once."""
    seen: set[int] = set()
    # A list, because who iterates replaces tensors meanwhile.
    return [(name, t) for name, t in table.items() if t is not None and not (id(t) in seen or seen.add(id(t)))]


def tensor_at(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that directly owns a tensor and the tensor's name in it.

    Args:
        module: The module that the name starts from.
        name: Dotted name of a parameter or buffer.

    Raises:
        AttributeError: A module on the way does not exist.
    """
    path, _, last = name.rpartition(".")
    return (module.get_submodule(path) if path else module), last


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
        self.of: dict[str, dict[int, None]] = {}
        for index, group in enumerate(groups):
            for name in group:
                for part in name_and_parents(name):
                    self.of.setdefault(part, {})[index] = None


class Company:
    """The waiting items that have to go where one item goes, since they are tied to it.

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
        self._gather()

    def _gather(self) -> None:
        self.groups: dict[int, None] = {}
        self.size: int | float = 0
        self._tied: list[str] = []
        self._position = 0  # tensors before it are held by partners that cannot be split
        self._held: dict[str, list[str]] = {}  # partner -> the tied tensors that it holds
        self._call(self._name)
        for tensor in self._tied:  # grows while ties are followed
            self._join(tensor)

    def _call(self, name: str) -> None:
        for group in self._ties.of.get(name, ()):
            if group not in self.groups and group not in self._ties.settled:
                self.groups[group] = None
                self._tied += self._ties.groups[group]

    def _join(self, tensor: str) -> None:
        partner = self._holder(tensor)
        if partner is None:
            return
        if partner not in self._held:
            self._held[partner] = []
            self.size += self._sizes.get(partner, 0)
            if self._ties.followed:
                self._call(partner)
        self._held[partner].append(tensor)

    def partners(self) -> list[str]:
        """Return the names of all partners, in the order of the tied tensors."""
        return [partner for partner in dict.fromkeys(map(self._holder, self._tied)) if partner is not None]

    def first_splittable(self, is_whole: Callable[[str], bool]) -> str | None:
        """Return the first partner that can be split; the caller opens it before it asks again."""
        while self._position < len(self._tied):
            partner = self._holder(self._tied[self._position])
            if partner is not None and not is_whole(partner):
                return partner
            self._position += 1
        return None

    def opened(self, partner: str) -> None:
        """Take notice that the pieces of a partner wait in its place."""
        if self._ties.followed:
            self._gather()  # what came along because of it may be tied to none of the pieces that stay
            return
        self.size -= self._sizes.get(partner, 0)
        for tensor in self._held.pop(partner):
            self._join(tensor)
