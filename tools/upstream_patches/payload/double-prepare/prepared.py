"""Which objects an `Accelerator` has prepared, so that preparing one of them again does not wrap it again.

Objects are compared with `is` and held by weak references: tensors, modules and lists define `==` as they like, two models
with equal weights are two models, and what the user releases must not live on here.
"""

import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_CONTAINERS = {
    "model": "_models",
    "optimizer": "_optimizers",
    "scheduler": "_schedulers",
    "data_loader": "_dataloaders",
}
_WOULD_HAVE = {
    "model": (
        "Preparing it again would have nested a second distributed wrapper around the first (`module.module.` keys) or "
        "registered the model twice, so that every checkpoint costs twice as much and does not load into a model that "
        "was prepared once"
    ),
    "optimizer": "Preparing it again would have unscaled and stepped the same parameters twice, and saved their state twice",
    "scheduler": "Preparing it again would have advanced the schedule twice for each step, and saved its state twice",
    "data_loader": "Preparing it again would have sharded the data twice, so that each process loses part of its batches",
}
_live: "weakref.WeakSet[PreparedObjects]" = weakref.WeakSet()
# The `forward`s that `prepare_model` has put over a model's own one; a copy of the model shares the function.
_autocast_forwards: "weakref.WeakSet[Any]" = weakref.WeakSet()


@dataclass(eq=False)
class Entry:
    """One prepared object.

    Attributes:
        kind: `"model"`, `"optimizer"`, `"scheduler"` or `"data_loader"`.
        outer: Weak reference to what was returned to the user.
        inners: Weak references to what it was made from; the first one is the object that was given.
        listed: Weak reference to what stands in the `Accelerator`'s own list: for a distributed model the inner module.
        trained: Whether a model can be trained as it is; not when it was prepared for evaluation, or with all of it frozen.
        settings: How a model was prepared.
        call: The number of the `prepare` call that made it.
    """

    kind: str
    outer: Callable[[], Any]
    inners: list[Callable[[], Any]]
    listed: Callable[[], Any]
    trained: bool
    settings: dict[str, str]
    call: int

    def objects(self) -> Iterator[Any]:
        """Yield the outer object and what it was made from, as far as they are alive."""
        for reference in (self.outer, *self.inners):
            obj = reference()
            if obj is not None:
                yield obj


class PreparedObjects:
    """The objects that one `Accelerator` has prepared."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.call = 0
        _live.add(self)

    def begin_call(self) -> None:
        """Start a new `prepare` call: within one call an object may pass through several stages without a warning."""
        self.call += 1

    def find(self, obj: Any) -> Entry | None:
        """Return the entry that `obj` belongs to, as the outer object or an inner one."""
        for entry in self.entries:
            if entry.outer() is not None and any(obj is known for known in entry.objects()):
                return entry
        return None

    def clear(self) -> None:
        """Forget everything: whatever is prepared next is prepared again."""
        self.entries.clear()

    def record(self, kind: str, given: Any, result: Any, listed: Any, trained: bool, settings: dict[str, str]) -> None:
        """Remember that `given` was prepared as `result`; replaces what was known about either of them."""
        made_from = [given, *_inside(given), *_inside(result)]
        # A prepared optimizer or scheduler that was released is given as it is; the bare one is inside it.
        made_from += [getattr(result, kind)] if kind in ("optimizer", "scheduler") else []
        former = (self.find(given), self.find(result))
        self.entries = [entry for entry in self.entries if entry.outer() is not None and entry not in former]
        inners = [weakref.ref(inner) for inner in made_from]
        self.entries.append(
            Entry(kind, weakref.ref(result), inners, weakref.ref(listed), trained, settings, self.call)
        )

    def __getstate__(self) -> list[tuple[Any, ...]]:
        # Weak references cannot be pickled; the objects can, since the `Accelerator` that is pickled lists them as well.
        return [
            (entry.kind, outer, listed, entry.trained, entry.settings)
            for entry in self.entries
            if (outer := entry.outer()) is not None and (listed := entry.listed()) is not None
        ]

    def __setstate__(self, state: list[tuple[Any, ...]]) -> None:
        self.__init__()
        for kind, outer, listed, trained, settings in state:
            self.record(kind, listed, outer, listed, trained, settings)


def remember(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `prepare_model` and its siblings, so that what they prepare is known afterwards."""
    kind = method.__name__.removeprefix("prepare_")
    signature = inspect.signature(method)

    @functools.wraps(method)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs).arguments
        given = list(arguments.values())[1]
        _remember(self, kind, given, result, arguments.get("evaluation_mode", False))
        return result

    return prepare


def find_prepared(accelerator: Any, obj: Any, first_pass: bool, device_placement: bool | None = None) -> Any:
    """Return what stands for an object that is prepared already, or None when it has to be prepared.

    Args:
        accelerator: The `Accelerator` that is asked to prepare the object.
        obj: The object.
        first_pass: Which of the two passes of `prepare` this is; models, optimizers and loaders belong to the first one.
        device_placement: Passed on when a model that was prepared for evaluation is now prepared for training.
    """
    if isinstance(obj, (nn.Module, torch.optim.Optimizer, torch.utils.data.DataLoader)) != first_pass:
        return None
    registry = accelerator._prepared_objects
    entry = registry.find(obj)
    if entry is not None:
        outer = entry.outer()
        if not entry.trained and _is_trainable(outer):
            return _upgrade(accelerator, entry, device_placement)
        # Tensor parallelism hands the optimizer, loader and scheduler on to the later stages of the same call.
        if entry.kind == "model" or entry.call != registry.call or obj is not outer:
            _warn_prepared(obj, outer, entry.kind)
        _enlist(accelerator, entry)
        return outer
    for other in list(_live):
        entry = other.find(obj)
        if entry is not None and _is_adoptable(accelerator, entry, obj):
            return _adopt(accelerator, entry)
    return _new_model(accelerator, obj) if isinstance(obj, nn.Module) else None


def _new_model(accelerator: Any, model: nn.Module) -> nn.Module | None:
    shared = _shared_part(accelerator._prepared_objects, model)
    if shared is not None:
        _warn(
            f"This model ({type(model).__name__}) is prepared, but {shared}. The shared parameters get their gradients "
            "through two preparations, and are saved twice. Prepare the whole model once and reach its parts through "
            "`accelerator.unwrap_model`."
        )
    wrapper = next((module for module in (model, *_inside(model)) if _is_wrapper(module)), None)
    if wrapper is not None and (_is_marked(model) or _is_marked(wrapper)):
        # Prepared once and release, or a copy of a prepared model: wrapped as it should be, so it is used as it is.
        ddp = isinstance(wrapper, nn.parallel.DistributedDataParallel)
        listed = wrapper.module if ddp else wrapper
        trained, settings = _is_trainable(model), _settings(accelerator)
        accelerator._prepared_objects.record("model", model, model, listed, trained, settings)
        _enlist(accelerator, accelerator._prepared_objects.entries[-1])
        return model
    _undo(model, keep_forward=shared is not None)
    return None


def _remember(accelerator: Any, kind: str, given: Any, result: Any, evaluation: bool) -> None:
    registry = accelerator._prepared_objects
    known = registry.find(given)
    container = getattr(accelerator, _CONTAINERS[kind])
    inside = [result, given, *_inside(given), *_inside(result)]
    listed = next((obj for obj in inside if _holds(container, obj)), result)
    if kind == "model":
        # Without this, a model whose wrapper is gone would be listed a second time, and saved twice.
        first = next((index for index, model in enumerate(container) if model is listed), 0)
        container[:] = [model for index, model in enumerate(container) if index == first or model is not listed]
        if accelerator.native_amp:
            _autocast_forwards.update(filter(None, map(_autocast_forward, inside)))
    # An evaluation of a model that is in training does not end its training.
    trained = kind != "model" or (not evaluation and _is_trainable(result))
    if known is not None and (known.outer() is result or (evaluation and known.trained)):
        known.trained = known.trained or trained
        return
    result._is_accelerate_prepared = True
    settings = _settings(accelerator) if kind == "model" else {}
    registry.record(kind, given, result, listed, trained, settings)


def _upgrade(accelerator: Any, entry: Entry, device_placement: bool | None) -> nn.Module:
    """Prepare for training what was prepared for evaluation, in its place."""
    former, before = entry.listed(), list(accelerator._models)
    given = entry.inners[0]()
    if given is None:
        given = entry.outer()
    _undo(given)
    result = accelerator.prepare_model(given, device_placement=device_placement)
    upgraded = accelerator._prepared_objects.find(result)
    accelerator._models[:] = [upgraded.listed() if model is former else model for model in before]
    _enlist(accelerator, upgraded)
    return result


def _is_adoptable(accelerator: Any, entry: Entry, obj: Any) -> bool:
    outer = entry.outer()
    if entry.kind != "model":
        return obj is outer  # two Accelerators may well wrap one inner optimizer or loader, each in its own way
    if not entry.trained and _is_trainable(outer):
        return False
    # What was prepared for a single process must not be taken for a model that synchronises its gradients.
    same = entry.settings["distributed_type"] == _settings(accelerator)["distributed_type"]
    return same or not accelerator.use_distributed


def _adopt(accelerator: Any, entry: Entry) -> Any:
    outer = entry.outer()
    if entry.kind == "model":
        then, now = entry.settings, _settings(accelerator)
        change = [f"{name} was {then[name]}, is {now[name]}" for name in now if then[name] != now[name]]
        if change:
            _warn(
                f"Another live Accelerator prepared this model ({type(outer).__name__}) with other settings: "
                f"{'; '.join(change)}. It is used as it was prepared. Call `free_memory()` on the other Accelerator "
                "first if it shall be prepared with the new ones."
            )
    accelerator._prepared_objects.entries.append(entry)
    _enlist(accelerator, entry)
    return outer


def _enlist(accelerator: Any, entry: Entry) -> None:
    container, listed = getattr(accelerator, _CONTAINERS[entry.kind]), entry.listed()
    if listed is not None and not _holds(container, listed):
        container.append(listed)


def _holds(container: list[Any], obj: Any) -> bool:
    return any(obj is item for item in container)


def _settings(accelerator: Any) -> dict[str, str]:
    handler = accelerator.ddp_handler
    return {
        "distributed_type": str(accelerator.distributed_type),
        "mixed_precision": str(accelerator.mixed_precision),
        "device": str(accelerator.device),
        "dynamo_backend": str(accelerator.state.dynamo_plugin.backend),
        "DistributedDataParallelKwargs": repr(handler.to_kwargs()) if handler is not None else "none",
    }


def _is_trainable(model: Any) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _is_wrapper(module: nn.Module) -> bool:
    # Nothing can be an instance of a class whose module was never imported.
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    return isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel, fsdp))


def _inside(model: Any) -> list[nn.Module]:
    """Return the modules inside a model's distributed wrappers and compiled shells, the outermost first."""
    found: list[nn.Module] = []
    while isinstance(model, nn.Module):
        if _is_wrapper(model):
            model = model.module
        else:
            # Not `getattr`, which adapters forward to the model that they contain.
            state = vars(model)
            model = state.get("_orig_mod", state.get("_modules", {}).get("_orig_mod"))
        if model is not None:
            found.append(model)
    return found


def _is_marked(module: nn.Module) -> bool:
    return bool(vars(module).get("_is_accelerate_prepared", False))


def _autocast_forward(module: Any) -> Any:
    if isinstance(module, nn.Module) and "_original_forward" in vars(module):
        forward = vars(module).get("forward")
        return getattr(forward, "__func__", forward)
    return None


def _undo(model: nn.Module, keep_forward: bool = False) -> None:
    """Take the traces of a former preparation off a model that is prepared again."""
    for module in (model, *_inside(model)):
        # The mark says that somebody prepared it at some time, for whatever use; copies and adapters show it too.
        if getattr(module, "_is_accelerate_prepared", False):
            module._is_accelerate_prepared = False
        forward = _autocast_forward(module)
        if not keep_forward and forward is not None and forward in _autocast_forwards:
            module.forward = vars(module).pop("_original_forward")


def _shared_part(registry: PreparedObjects, model: nn.Module) -> str | None:
    """Return which part a new model shares with one that is prepared already."""
    prepared = [list(entry.objects()) for entry in registry.entries if entry.kind == "model"]
    # The entry of this very model is left when its wrapper is gone; that is no sharing.
    prepared = [objects for objects in prepared if not _holds(objects, model)]
    known = {id(module) for objects in prepared for module in objects}
    # What has no parameters, an activation for example, shares nothing that is trained.
    parts = {id(module) for module in model.modules() if next(module.parameters(), None) is not None}
    for name, module in model.named_modules():
        if name and id(module) in known & parts:
            return f"its submodule {name!r} ({type(module).__name__}) is prepared already"
    for objects in prepared:
        for whole in objects[-1:]:  # the innermost one, whose names are the user's own
            for name, module in whole.named_modules():
                if id(module) in parts:
                    return f"it shares {name!r} ({type(module).__name__}) with the prepared {type(whole).__name__}"
    return None


def _warn_prepared(obj: Any, outer: Any, kind: str) -> None:
    what = f"This {kind} ({type(obj).__name__}) was already prepared by this Accelerator"
    if obj is not outer:
        what += f" as a {type(outer).__name__}, which is returned in its place"
    _warn(
        f"{what}. {_WOULD_HAVE[kind]}. Call `prepare` once and use what it returns; to prepare it again, call "
        "`accelerator.free_memory()` first."
    )


def _warn(message: str) -> None:
    """Warn at the first line outside this package: the user's own."""
    package = __name__.partition(".")[0]
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
