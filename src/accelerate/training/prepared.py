"""What an Accelerator has prepared: an identity registry that detects a second ``prepare``.

Every prepared object is remembered with the objects it was made from (the module inside a wrapper, the module inside a
compiled one, the optimizer inside a prepared optimizer). References are weak, and objects are compared with ``is``
only: tensors, modules and lists define ``==`` as they like, and two models with the same weights are two models.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accelerate.modules.optimizer_remap import MovedParameters

_LIVE: "weakref.WeakSet[PreparedObjects]" = weakref.WeakSet()


def reference(obj: Any) -> Any:
    """Return a weak reference to an object, or what returns it where its class allows none."""
    try:
        return weakref.ref(obj)
    except TypeError:  # it has slots, and is held, as the Accelerator's own lists hold it
        return lambda: obj


@dataclass(eq=False)
class Entry:
    """One prepared object: weak references to what ``prepare`` returned, and to what it was made from.

    Attributes:
        kind: ``"model"``, ``"optimizer"``, ``"loader"`` or ``"scheduler"``.
        evaluation: Whether it was prepared for evaluation alone, so not wrapped for training.
        frozen: Whether no parameter of a model was trainable then, so that it was not wrapped either.
        settings: Those of the Accelerator that prepared it, as text.
    """

    kind: str
    outer: Any
    inners: list[Any] = field(default_factory=list)
    evaluation: bool = False
    frozen: bool = False
    settings: dict[str, str] = field(default_factory=dict)

    def objects(self) -> Iterator[Any]:
        """Yield the outer object and then the inner ones, as far as they are alive."""
        for reference in (self.outer, *self.inners):
            if (obj := reference()) is not None:
                yield obj


class PreparedObjects:
    """The `runtime.run.Prepared` of one Accelerator: its objects by identity, and replaced parameters."""

    def __init__(self) -> None:
        self.engines: list[Any] = []
        self.logged: set[str] = set()
        self.moved = MovedParameters()
        self.admitted: set[int] = set()  # of objects that a running `prepare` has checked, by id
        # By the identity of each object that belongs to one, which another object may have once it is gone.
        self._entries: dict[int, Entry] = {}
        _LIVE.add(self)

    def __getstate__(self) -> dict[str, Any]:
        # Weak references belong to this process; a copy starts with what the Accelerator's lists hold.
        kept = {key: value for key, value in self.__dict__.items() if key not in ("_entries", "moved")}
        return {key: list(value) if isinstance(value, list) else value for key, value in kept.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        PreparedObjects.__init__(self)
        self.__dict__.update(state)

    def record(self, kind: str, outer: Any, inners: Iterable[Any] = (), **details: Any) -> Entry:
        """Remember a prepared object and what it was made from; a former entry of the same objects becomes part of it."""
        objects = {id(obj): obj for obj in (outer, *inners)}
        for obj in list(objects.values()):
            if (former := self.find(obj)) is not None:
                objects = {id(part): part for part in former.objects()} | objects
        references = [reference(obj) for key, obj in objects.items() if key != id(outer)]
        entry = Entry(kind, reference(outer), references, **details)
        self._entries = {key: other for key, other in self._entries.items() if other.outer() is not None}
        self._entries.update(dict.fromkeys(objects, entry))
        _LIVE.add(self)
        return entry

    def include(self, entry: Entry, inner: Any) -> None:
        """Remember one more object that a prepared one was made from."""
        entry.inners.append(reference(inner))
        self._entries[id(inner)] = entry

    def find(self, obj: Any) -> Entry | None:
        """Return the entry that an object belongs to, as the outer or as an inner one; None once the outer one is gone."""
        entry = self._entries.get(id(obj))
        if entry is None or (outer := entry.outer()) is None:
            return None
        if obj is outer:
            return entry
        for inner in entry.inners:
            if inner() is obj:
                return entry
        return None

    def clear(self) -> None:
        """Drop every prepared object: the next ``prepare`` of any object is a first one."""
        self.engines.clear()
        self._entries.clear()
        self.moved.clear()
        _LIVE.discard(self)  # its training is over until something is prepared again

    def alive(self, kind: str) -> list[Any]:
        """Return the prepared objects of a kind that are alive."""
        entries = dict.fromkeys(self._entries.values())
        return [outer for entry in entries if entry.kind == kind and (outer := entry.outer()) is not None]


def find_elsewhere(registry: PreparedObjects, obj: Any) -> Entry | None:
    """Return the entry that an object has in the registry of another live Accelerator."""
    for other in list(_LIVE):
        if other is not registry and (entry := other.find(obj)) is not None:
            return entry
    return None


def others_alive(registry: PreparedObjects) -> bool:
    """Return whether an Accelerator with another registry may still train."""
    gc.collect()  # one in a reference cycle is gone
    return any(other is not registry for other in list(_LIVE))


def histories(registry: PreparedObjects) -> list[MovedParameters]:
    """Return what became of replaced parameters: of an Accelerator first, then of the other live ones."""
    return [registry.moved] + [other.moved for other in list(_LIVE) if other is not registry]


def optimizers() -> list[torch.optim.Optimizer]:
    """Return torch's own optimizers inside the prepared ones that are alive, of all live Accelerators."""
    inside = [getattr(outer, "optimizer", None) for other in list(_LIVE) for outer in other.alive("optimizer")]
    return [optimizer for optimizer in inside if isinstance(optimizer, torch.optim.Optimizer)]


def check_optimizers(objects: Sequence[Any]) -> None:
    """Refuse an optimizer of a model as it was before its parameters were replaced manually: its steps change nothing.

    An optimizer of anything but a prepared model is not refused, unless it has the same shapes.
    """
    models = [model for registry in list(_LIVE) for model in registry.alive("model")]
    trained = {id(parameter) for model in models for parameter in model.parameters()}
    optimizers = [item for item in objects if isinstance(item, torch.optim.Optimizer)]
    groups = [[parameter for group in item.param_groups for parameter in group["params"]] for item in optimizers]
    updated = {id(parameter) for parameters in groups for parameter in parameters}
    for optimizer, parameters in zip(optimizers, groups, strict=True):
        if not trained.isdisjoint(map(id, parameters)):
            continue
        shapes = Counter(parameter.shape for parameter in parameters)
        for model in objects:
            # A model that has its optimizer here is not the one that this optimizer has lost.
            if not isinstance(model, nn.Module) or not updated.isdisjoint(map(id, model.parameters())):
                continue
            if shapes in (
                Counter(parameter.shape for parameter in model.parameters()),
                Counter(parameter.shape for parameter in model.parameters() if parameter.requires_grad),
            ):
                raise ValueError(
                    f"The optimizer ({type(getattr(optimizer, 'optimizer', optimizer)).__name__}) holds none of the prepared models' parameters, but "
                    f"{len(parameters)} of the same shapes as those of {type(model).__name__}: they were replaced after the optimizer was "
                    "made (`model.to(device)` does that on some devices), and a step would change nothing. Make the optimizer "
                    "from `model.parameters()` of the model as it is now."
                )
