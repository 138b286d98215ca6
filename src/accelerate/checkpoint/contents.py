"""What a checkpoint brings back: read in full first, then applied, so that a bad one changes nothing."""

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accelerate.checkpoint import files, formats, loaders, names, rng
from accelerate.checkpoint.plan import copied

# Where a rank's file keeps the positions of its loaders. Other readers of the file look only for keys they know.
POSITIONS = "dataloader_positions"


@dataclass
class Contents:
    """The states of a checkpoint, each with the object it belongs to.

    Attributes:
        folder: Where it was read from, for messages.
        models: Modules and their state dicts.
        optimizers: Optimizers and their states.
        schedulers: Schedulers and their states.
        dataloaders: Loaders and their states.
        custom: Registered objects and their states.
        scaler: The gradient scaler and its state, or None.
        random: Random states of this rank and its step count, or None.
        first_rank: Random states of the first rank, where this rank has none; its own are derived from them.
        positions: Where the loaders stood.
        process_index: This rank.
        undoing: What gives objects back what they had, where reading has changed them already.
    """

    folder: str
    models: list[tuple[nn.Module, dict[str, Any]]] = field(default_factory=list)
    optimizers: list[tuple[Any, Any]] = field(default_factory=list)
    schedulers: list[tuple[Any, Any]] = field(default_factory=list)
    dataloaders: list[tuple[Any, Any]] = field(default_factory=list)
    custom: list[tuple[Any, Any]] = field(default_factory=list)
    scaler: tuple[Any, Any] | None = None
    random: dict[str, Any] | None = None
    first_rank: dict[str, Any] | None = None
    positions: list[Any] = field(default_factory=list)
    process_index: int = 0
    undoing: list[Callable[[], Any]] = field(default_factory=list)

    def apply(self, **load_model_kwargs: Any) -> dict[str, Any]:
        """Give every object its state, or none of them. Any rank, alone.

        Args:
            **load_model_kwargs: Passed to ``load_state_dict`` of the models.

        Returns:
            Attributes that the Accelerator takes over: ``step``, when the checkpoint has it.
        """
        return self.begin(**load_model_kwargs).complete()

    def begin(self, **load_model_kwargs: Any) -> "Restoring":
        """Give their state to all objects whose own code might refuse it; undo that if one does. Any rank, alone.

        Args:
            **load_model_kwargs: Passed to ``load_state_dict`` of the models.

        Returns:
            What is still to be done, and can be undone.
        """
        restoring = Restoring(self, load_model_kwargs)
        try:
            restoring.load_fallible()
        except BaseException:
            restoring.undo()
            raise
        return restoring

    def _apply_random(self) -> dict[str, Any]:
        file = names.random_states_file(self.process_index)
        if self.random is None and self.first_rank is not None:
            rng.derive(self.first_rank, self.process_index, f"{self.folder} has no {file}")
            return {"step": self.first_rank["step"]} if "step" in self.first_rank else {}
        if self.random is None:
            rng.logger.warning(
                "%s has no %s, so the random states of rank %d stay as they are and it draws other numbers than an "
                "uninterrupted run. The checkpoint was saved by fewer processes, or not by all of them.",
                self.folder,
                file,
                self.process_index,
            )
            return {}
        states = dict(self.random)
        overrides = {"step": states.pop("step")} if "step" in states else {}
        rng.restore(states, f"{self.folder}/{file}")
        return overrides


class Restoring:
    """A restore that has begun.

    What can fail is done first, and how to undo it is kept. Plain modules, whose names and shapes have been compared, and
    generators, of which each is set or warned about, come last: copying into them does not fail.

    Args:
        contents: What is restored.
        load_model_kwargs: Passed to ``load_state_dict`` of the models.
    """

    def __init__(self, contents: Contents, load_model_kwargs: dict[str, Any]) -> None:
        self._contents = contents
        self._options = load_model_kwargs
        self._undoing: list[Callable[[], Any]] = list(contents.undoing)
        # Optimizers that hold tensors of a file, the addresses of those, and the tensors that they had before.
        self._mapped: list[tuple[Any, set[int], dict[Any, dict[str, Any]]]] = []

    def load_fallible(self) -> None:
        """Restore everything that may fail."""
        contents = self._contents
        self._check_options()
        for index, (obj, state) in enumerate(contents.custom):
            self._load(obj, state, names.custom_file(index))
        for index, (scheduler, state) in enumerate(contents.schedulers):
            self._load(scheduler, state, names.scheduler_file(index))
        if contents.scaler is not None:
            self._load(*contents.scaler, names.scaler_file())
        for index, (optimizer, state) in enumerate(contents.optimizers):
            # torch's optimizers replace the tensors of their state, so the former ones need no copy.
            replaces = _replaces_state(optimizer)
            with self._naming(optimizer, names.optimizer_file(index)):
                if replaces and not _has_hooks(optimizer):
                    self._mapped.append((_inner(optimizer), formats.storages(state), _tensors_of(optimizer)))
                else:
                    state = formats.in_memory(state)
            self._load(optimizer, state, names.optimizer_file(index), copies=not replaces)
        positions = contents.positions
        for index, (loader, state) in enumerate(contents.dataloaders):
            self._undoing.append(loaders.undoing(loader))
            loaders.restore(loader, state, positions[index] if index < len(positions) else None)
        for model, state in contents.models:
            if not files.loads_by_name(model):
                self._undoing.append(undoing(model))
                # Its own code may keep what it gets.
                model.load_state_dict(formats.in_memory(state), **self._options)

    def _check_options(self) -> None:
        """Refuse what the models' `load_state_dict` would refuse, before anything has changed."""
        for model, state in self._contents.models:
            try:
                inspect.signature(model.load_state_dict).bind(state, **self._options)
            except TypeError as error:
                raise TypeError(
                    f"load_state got {sorted(self._options)} for {type(model).__name__}.load_state_dict, which does not take "
                    f"that: {error}. Nothing was loaded."
                ) from None

    def _load(self, obj: Any, state: Any, file: str, copies: bool = True) -> None:
        former = obj.state_dict()
        if copies:
            former = copied(former)
        self._undoing.append(lambda: obj.load_state_dict(former))
        with self._naming(obj, file):
            obj.load_state_dict(state)

    @contextlib.contextmanager
    def _naming(self, obj: Any, file: str) -> Iterator[None]:
        """Let an error tell whose state it is, and where it was."""
        try:
            yield
        except (ValueError, TypeError, RuntimeError, LookupError, AttributeError) as error:
            if type(error).__module__ != "builtins":  # a program may wait for an error of its own
                raise
            kind = ValueError if type(error) is ValueError else RuntimeError
            raise kind(
                f"{type(obj).__name__} refuses its state in {os.path.join(self._contents.folder, file)!r}; nothing was "
                f"loaded. {type(error).__name__}: {error}"
            ) from error

    def undo(self) -> None:
        """Give back what the objects had before."""
        self._mapped.clear()
        while self._undoing:
            try:
                self._undoing.pop()()
            except Exception as error:  # the others are still to be undone
                rng.logger.error("A former state could not be given back: %s: %s", type(error).__name__, error)

    def complete(self) -> dict[str, Any]:
        """Restore the rest, and return the attributes that the Accelerator takes over."""
        self._undoing.clear()
        while self._mapped:
            _take_over(*self._mapped.pop())
        for model, state in self._contents.models:
            if files.loads_by_name(model):
                # Assigned tensors stay as they are.
                assigned = formats.in_memory(state) if self._options.get("assign") else state
                model.load_state_dict(assigned, **self._options)
        return self._contents._apply_random()


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _tensors_of(optimizer: Any) -> dict[Any, dict[str, Any]]:
    return {parameter: dict(state) for parameter, state in _inner(optimizer).state.items()}


def _has_hooks(optimizer: Any) -> bool:
    inner = _inner(optimizer)
    return bool(inner._optimizer_load_state_dict_pre_hooks or inner._optimizer_load_state_dict_post_hooks)


def _take_over(optimizer: Any, mapped: set[int], former: dict[Any, dict[str, Any]]) -> None:
    """Give an optimizer memory of its own for what is a file's: that of the tensors it had, where they are alike."""
    for parameter, state in optimizer.state.items():
        replaced = former.pop(parameter, {})
        for name, value in state.items():
            if type(value) is torch.Tensor and value.untyped_storage().data_ptr() in mapped:
                before = replaced.pop(name, None)
                state[name] = before.copy_(value) if _alike(before, value) else value.clone()


def _alike(before: Any, value: torch.Tensor) -> bool:
    return (
        type(before) is torch.Tensor
        and all(getattr(before, about) == getattr(value, about) for about in ("shape", "dtype", "device"))
        and before.stride() == value.stride()
    )


def undoing(model: nn.Module) -> Callable[[], None]:
    """Return what gives a module the values back that its parameters and buffers have now.

    Args:
        model: The module inside all wrappers.
    """
    former = [(tensor, tensor.detach().clone()) for tensor in (*model.parameters(), *model.buffers())]

    def undo() -> None:
        with torch.no_grad():
            for tensor, values in former:
                tensor.copy_(values)

    return undo


def _replaces_state(optimizer: Any) -> bool:
    return type(_inner(optimizer)).load_state_dict is torch.optim.Optimizer.load_state_dict


def read_common(
    folder: str,
    schedulers: list[Any],
    dataloaders: list[Any],
    custom: list[Any],
    scaler: Any | None,
    process_index: int,
    load_kwargs: dict[str, Any] | None = None,
) -> Contents:
    """Read what every strategy saves alike: all but models and optimizers. Any rank, alone.

    Args:
        folder: The checkpoint's folder.
        schedulers: In the order in which they were saved.
        dataloaders: In the order in which they were saved.
        custom: Registered objects, in the order in which they were saved.
        scaler: The gradient scaler, or None.
        process_index: This rank.
        load_kwargs: Passed to ``torch.load``.

    Raises:
        FileNotFoundError: The folder lacks a file; the message names it.
    """
    contents = Contents(folder, process_index=process_index)
    contents.schedulers = [
        (scheduler, files.read_scheduler(folder, index, load_kwargs)) for index, scheduler in enumerate(schedulers)
    ]
    contents.dataloaders = [
        (loader, loaders.read(loader, folder, index, process_index, load_kwargs))
        for index, loader in enumerate(dataloaders)
    ]
    contents.custom = [(obj, files.read_custom(folder, index, load_kwargs)) for index, obj in enumerate(custom)]
    if scaler is not None:
        state = files.read_scaler(folder)
        if state is None:
            rng.logger.warning(
                "%s has no %s: it was saved without gradient scaling, and the loss scale starts anew.",
                folder,
                names.scaler_file(),
            )
        else:
            contents.scaler = (scaler, state)
    contents.random = _own_states(folder, process_index)
    # A rank that was not there when the checkpoint was saved must draw the same epoch as the others.
    own = contents.random if contents.random is not None else _own_states(folder, 0)
    contents.positions = (own or {}).pop(POSITIONS, None) or []
    for index, (loader, position) in enumerate(zip(dataloaders, contents.positions, strict=False)):
        loaders.check(loader, position, index)
    if contents.random is None and own is not None:
        contents.first_rank = own
    return contents


def _own_states(folder: str, process_index: int) -> dict[str, Any] | None:
    """What a rank kept for itself; its generators from the file without pickle where there is one."""
    states = files.read_random_states(folder, process_index)
    generators = files.read_generators(folder, process_index)
    return states if generators is None else {**(states or {}), **generators}
