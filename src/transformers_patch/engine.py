"""Applies the patches of the registry to the installed packages, and takes them back."""

import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from transformers_patch import checkpoints as trainer_checkpoints
from transformers_patch.errors import UnsupportedVersion
from transformers_patch.registry import ENTRIES, Entry
from transformers_patch.training_args import STRATEGIES, Strategy

Checkpoints = bool | Literal["async"]


@dataclass(frozen=True)
class Status:
    """The state of one patch in this process.

    Attributes:
        name: the patch.
        target: the patched symbol.
        package: its distribution.
        version: the installed release; None when the package is not installed.
        versions: the releases it was written for.
        applied: the strategy in force, "checkpoints" or "losses" for patches of these parts, or None if it is not applied.
        verdict: "applied", "can be applied", "not needed", "not supported" or "not installed".
        detail: why, in words.
        part: its part: "state", "checkpoints" or "losses".
    """

    name: str
    target: str
    package: str
    version: str | None
    versions: str
    applied: str | None
    verdict: str
    detail: str
    part: str


@dataclass(eq=False)
class _Use:
    strategy: Strategy
    parts: tuple[str, ...]
    in_background: bool


_lock = threading.RLock()
# The requests of apply(), and of open `with` blocks. Blocks may overlap in several threads, so each block removes its own
# entry, and the patches stay while any entry is left.
_base: list[_Use] = []
_blocks: list[_Use] = []
_undo: dict[str, ExitStack] = {}


def _strategy(default: Strategy = "preserve") -> Strategy:
    uses = [*_base, *_blocks]
    return uses[-1].strategy if uses else default


def _install(use: _Use) -> None:
    entries = [entry for entry in ENTRIES if entry.part in use.parts and entry.name not in _undo]
    checked = [(entry, entry.check()) for entry in entries]
    with ExitStack() as all_or_nothing:
        for entry, finding in checked:
            if not finding.needed:
                message = f"{entry.package} {entry.version()}: the patch of {entry.target} is not needed any more, and nothing was changed."
                warnings.warn(f"{message} Remove the call.", UserWarning, stacklevel=3)
                continue
            undo = _undo[entry.name] = ExitStack()
            all_or_nothing.callback(_remove, entry.name)
            entry.patch().install(entry.import_target(), _strategy, undo)
        all_or_nothing.pop_all()


def _remove(name: str) -> None:
    _undo.pop(name).close()


def _remove_unused() -> None:
    used = {part for use in (*_base, *_blocks) for part in use.parts}
    for name in [entry.name for entry in ENTRIES if entry.name in _undo and entry.part not in used]:
        _remove(name)


def strategy_of_classes() -> Strategy:
    """Return the strategy for classes that have the flag themselves: the applied one, else "flag"."""
    return _strategy("flag")


def saves_in_background() -> bool:
    """Return whether the last request for checkpoints wants them published in the background."""
    asked = [use.in_background for use in (*_base, *_blocks) if "checkpoints" in use.parts]
    return bool(asked) and asked[-1]


def _asked(strategy: str, checkpoints: bool | str, losses: bool) -> _Use:
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is not known. Choose one of {', '.join(map(repr, STRATEGIES))}.")
    if checkpoints not in (False, True, "async"):
        raise ValueError(f"checkpoints={checkpoints!r} is not known. Pass True, False or 'async'.")
    checkpoints = bool(checkpoints) and trainer_checkpoints.usable(depth=4) and checkpoints
    asked = {"state": True, "checkpoints": checkpoints, "losses": losses}
    parts = tuple(part for part, is_asked in asked.items() if is_asked)
    return _Use(strategy, parts, checkpoints == "async")  # type: ignore[arg-type]


def apply(strategy: Strategy = "preserve", checkpoints: Checkpoints = False, losses: bool = False) -> None:
    """Patch the installed transformers in place, so that training arguments keep a shared accelerator state.

    Every subclass of `TrainingArguments` inherits it, also those of TRL and sentence-transformers, whether they were imported
    before or after. Another call changes the strategy. Call it on every rank, before the arguments are built.

    Args:
        strategy: "preserve" keeps every existing state. "flag" lets each arguments object decide with
            `preserve_accelerator_state`, whose default is True. "conditional" keeps a state that was made outside of
            training arguments, and resets a state of other arguments.
        checkpoints: whether a Trainer's checkpoints are atomic: complete or absent. They need this fork's accelerate. With
            upstream's it warns, and the Trainer's checkpoints are not changed. "async" lets the training continue once
            the files are written, while they are hashed, synced to the disk and published.
        losses: whether a Trainer's loss and norm of gradients on several ranks equal those of one process. Then call it before
            models are loaded.

    Raises:
        ImportError: transformers is not installed.
        ValueError: the strategy is not known.
        UnsupportedVersion: the installed release lacks the shape that the patch needs; nothing was changed.

    Example:
        >>> import transformers_patch
        >>> from accelerate import Accelerator
        >>> from transformers import TrainingArguments
        >>> transformers_patch.apply()
        >>> accelerator = Accelerator(cpu=True)
        >>> arguments = TrainingArguments("out", use_cpu=True, report_to=[])
        >>> arguments.distributed_state.num_processes == accelerator.num_processes
        True
        >>> transformers_patch.revert()
    """
    use = _asked(strategy, checkpoints, losses)
    with _lock:
        _install(use)
        _base[:] = [use]
        _remove_unused()


def revert() -> None:
    """Restore the installed classes exactly; without a patch in force it does nothing.

    Arguments objects that exist keep the device and the state they have.
    """
    with _lock:
        _base.clear()
        _blocks.clear()
        _remove_unused()


@contextmanager
def applied(strategy: Strategy = "preserve", checkpoints: Checkpoints = False, losses: bool = False) -> Iterator[None]:
    """Patch for a `with` block; afterwards what held before it holds again.

    Args:
        strategy: as for `apply`.
        checkpoints: as for `apply`.
        losses: as for `apply`.

    Raises:
        ImportError, ValueError, UnsupportedVersion: as for `apply`.

    Example:
        >>> import transformers_patch
        >>> with transformers_patch.applied(strategy="flag"):
        ...     transformers_patch.status()[0].applied
        'flag'
        >>> transformers_patch.status()[0].applied is None
        True
    """
    use = _asked(strategy, checkpoints, losses)
    with _lock:
        _install(use)
        _blocks.append(use)
    try:
        yield
    finally:
        with _lock:
            _blocks[:] = [other for other in _blocks if other is not use]
            _remove_unused()


def status() -> list[Status]:
    """Say of every patch whether it is applied, could be, is not needed or is not supported; nothing is changed.

    Example:
        >>> import transformers_patch
        >>> [patch.name for patch in transformers_patch.status()][:5]
        ['training_args', 'save_checkpoint', 'build', 'train', 'last_checkpoint']
    """
    with _lock:
        return [_status(entry) for entry in ENTRIES]


def _status(entry: Entry) -> Status:
    version = applied = None
    try:
        entry.import_target()
        version, verdict, detail = entry.version(), "can be applied", entry.reason
        if entry.name in _undo:
            verdict, applied = "applied", _strategy() if entry.part == "state" else entry.part
        elif entry.part == "checkpoints" and not trainer_checkpoints.available():
            raise ImportError("it needs this fork's accelerate, and another one is installed")
        elif not entry.check().needed:
            verdict, detail = "not needed", "this release does not reset the state"
    except UnsupportedVersion as error:
        version, verdict, detail = entry.version(), "not supported", str(error)
    except ImportError as error:
        verdict, detail = "not installed", str(error)
    shown = (entry.name, entry.target, entry.package, version, entry.versions, applied, verdict, detail, entry.part)
    return Status(*shown)
