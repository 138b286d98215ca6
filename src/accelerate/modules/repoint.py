"""Parameters that a strategy replaced, and the optimizers that must follow them.

Sharding puts new parameters in the place of those that an optimizer was made with. A prepared optimizer follows by name: what a
model called a parameter before, it calls its replacement afterwards.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from accelerate.modules.named import canonical_name

# Every parameter that something took the place of, by its name: its Accelerator may be gone.
_REPLACED = WeakTensorKeyDictionary()


class MovedParameters:
    """What became of the parameters that were replaced, whoever still holds the old ones."""

    def __init__(self) -> None:
        self._new = WeakTensorKeyDictionary()
        self._names = WeakTensorKeyDictionary()

    def clear(self) -> None:
        """Forget all of them."""
        self.__init__()

    def record(self, name: str, old: nn.Parameter, new: nn.Parameter) -> None:
        """Remember one replacement.

        Args:
            name: What the model calls both.
            old: The parameter as it was.
            new: What is in its place.
        """
        self._new[old], self._names[old], _REPLACED[old] = new, name, name
        # For how many it stands: FSDP1 flattens those of a unit into one. Kept on it, because another parameter may have its id
        # later, and because torch does not move a parallel model that weak references point to.
        new._accelerate_members = getattr(new, "_accelerate_members", 0) + 1  # type: ignore[attr-defined]

    def now(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return what a parameter has become, through any number of replacements; itself if it was never replaced.

        Args:
            parameter: Of an optimizer, say.
        """
        while (new := self._new.get(parameter)) is not None:
            parameter = new
        return parameter

    def follow(self, optimizer: torch.optim.Optimizer) -> bool:
        """Let an optimizer update the parameters that took the place of those it has; all of them or, on an error, none.

        Args:
            optimizer: Torch's own, out of its wrapper.

        Returns:
            Whether it was changed.

        Raises:
            ValueError: It has stepped already, or one flat parameter stands for parameters of several groups.
        """
        groups = [[(old, self.now(old)) for old in group["params"]] for group in optimizer.param_groups]
        moved = [(old, new) for group in groups for old, new in group if new is not old]
        if not moved:
            return False
        if any(optimizer.state.get(old) for old, _ in moved):
            name = next(self._names[old] for old, _ in moved if optimizer.state.get(old))
            raise ValueError(
                f"The optimizer ({type(optimizer).__name__}) has a state for {name!r} as it was before the model was sharded. "
                "Prepare model and optimizer together before the first step, and load its state afterwards with "
                "`accelerator.load_state`."
            )
        self._check_flat(groups)
        for group, pairs in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = list({id(new): new for _, new in pairs}.values())
        return True

    def _check_flat(self, groups: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> None:
        """Refuse a flat parameter of which a group has a part only: it has one learning rate."""
        for number, pairs in enumerate(groups):
            here = Counter(id(new) for old, new in pairs if new is not old)
            for old, new in pairs:
                have, all_of_it = here[id(new)], getattr(new, "_accelerate_members", 1)
                if new is not old and have < all_of_it:
                    raise ValueError(
                        f"Group {number} of the optimizer has {have} of the {all_of_it} parameters that FSDP flattened into one "
                        f"({self._names[old]!r} is one of them), and one flat parameter can have one set of options only. Pass "
                        "FullyShardedDataParallelPlugin(use_orig_params=True), or use fsdp_version=2, for groups within a layer."
                    )


def follow_any(optimizer: torch.optim.Optimizer, histories: Iterable[MovedParameters]) -> None:
    """Let an optimizer follow its parameters, whichever Accelerator replaced them.

    Args:
        optimizer: Torch's own, out of its wrapper.
        histories: Of the Accelerator that prepares it, and of those that may have prepared its model.

    Raises:
        ValueError: As `MovedParameters.follow`; or a parameter was replaced, and nobody knows by what any more.
    """
    for history in histories:
        history.follow(optimizer)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if lost := [_REPLACED[parameter] for parameter in held if parameter in _REPLACED]:
        raise ValueError(
            f"The optimizer ({type(optimizer).__name__}) has {len(lost)} parameters as they were before a model was sharded, "
            f"{lost[0]!r} for one, and the Accelerator that sharded it has let go of it (`free_memory`): a step would change "
            "nothing. Make the optimizer from `model.parameters()` of the model as it is now."
        )


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters by all the names that they have, without the parts that wrappers put in.

    Args:
        model: Any module. A tied parameter is there under each of its names.
    """
    return {canonical_name(name): value for name, value in model.named_parameters(remove_duplicate=False)}


def repoint(accelerator: Any, model: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Let optimizers follow the parameters of a model that were replaced: those prepared already, and those that come.

    Args:
        accelerator: Its registry remembers the replacements.
        model: As it is now.
        before: `named` of the model as it was.

    Raises:
        ValueError: As `MovedParameters.follow`.
    """
    moved: MovedParameters = accelerator._registry.moved
    after = named(model)
    seen: set[int] = set()
    for name, old in before.items():
        new = after.get(name)
        if new is not None and new is not old and id(old) not in seen:
            seen.add(id(old))
            moved.record(name, old, new)
    for optimizer in accelerator._optimizers:
        moved.follow(optimizer.optimizer)
