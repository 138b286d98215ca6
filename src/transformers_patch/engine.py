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


@dataclass(frozen=True)
class Status:
    """What one patch is doing in this process.

    Attributes:
        name: the patch.
        target: what it patches.
        package: whose it is.
        version: the installed release; None when the package is not installed.
        versions: the releases it was written for.
        applied: the strategy in force, "checkpoints" or "losses" for what belongs to them, or None while it is not applied.
        verdict: "applied", "can be applied", "not needed", "not supported" or "not installed".
        detail: why, in words.
        part: what it belongs to: "state", "checkpoints" or "losses".
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


class _Engine:
    # `base` is what apply() has asked for, `blocks` are the `with` blocks that are open. They may overlap in several
    # threads, so each block takes away its own entry and the patches stay while anybody uses them.

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.base: _Use | None = None
        self.blocks: list[_Use] = []
        self.undo: dict[str, ExitStack] = {}

    @property
    def use(self) -> _Use | None:
        return self.blocks[-1] if self.blocks else self.base

    def strategy(self, default: Strategy = "preserve") -> Strategy:
        use = self.use
        return default if use is None else use.strategy

    def install(self, use: _Use) -> None:
        wanted = [entry for entry in ENTRIES if entry.part in use.parts and entry.name not in self.undo]
        checked = [(entry, entry.check()) for entry in wanted]
        with ExitStack() as all_or_nothing:
            for entry, finding in checked:
                if not finding.needed:
                    warnings.warn(
                        f"{entry.package} {entry.version()}: the patch of {entry.target} is not needed any more, and nothing "
                        "was changed. Remove the call.",
                        UserWarning,
                        stacklevel=3,
                    )
                    continue
                undo = ExitStack()
                all_or_nothing.callback(self.remove, entry.name)
                self.undo[entry.name] = undo
                entry.patch().install(entry.import_target(), self.strategy, undo)
            all_or_nothing.pop_all()

    def remove(self, name: str) -> None:
        self.undo.pop(name).close()

    def settle(self) -> None:
        used = {part for use in (self.base, *self.blocks) if use is not None for part in use.parts}
        for entry in ENTRIES:
            if entry.name in self.undo and entry.part not in used:
                self.remove(entry.name)


_engine = _Engine()


def strategy_of_classes() -> Strategy:
    """Return the strategy for classes that have the flag themselves: the applied one, else "flag"."""
    return _engine.strategy("flag")


def saves_in_background() -> bool:
    """Return whether the last one that asked for checkpoints wants them to be published beside the training."""
    uses = [use for use in (_engine.base, *_engine.blocks) if use is not None and "checkpoints" in use.parts]
    return bool(uses) and uses[-1].in_background


def _asked(strategy: str, checkpoints: bool | str, losses: bool) -> _Use:
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is not known. Choose one of {', '.join(map(repr, STRATEGIES))}.")
    if checkpoints not in (False, True, "async"):
        raise ValueError(f"checkpoints={checkpoints!r} is not known. Pass True, False or 'async'.")
    parts = ["state"]
    if checkpoints and trainer_checkpoints.usable(depth=4):
        parts.append("checkpoints")
    if losses:
        parts.append("losses")
    return _Use(strategy, tuple(parts), checkpoints == "async")  # type: ignore[arg-type]


def apply(strategy: Strategy = "preserve", checkpoints: bool | Literal["async"] = False, losses: bool = False) -> None:
    """Patch the installed transformers in place, so that training arguments keep a shared accelerator state.

    Every subclass of `TrainingArguments` inherits it, those of TRL and sentence-transformers too, whether they were
    imported before or after. Calling it again changes the strategy. Call it on every rank, before the arguments are built.

    Args:
        strategy: "preserve" keeps every existing state; "flag" lets each arguments object decide with
            `preserve_accelerator_state`, whose default is True; "conditional" keeps a state that was made outside of
            training arguments, and lets them reset what other arguments have made.
        checkpoints: whether a Trainer's checkpoints are whole or not there, too; they need this fork's accelerate. Beside
            upstream's a warning says so, and the Trainer's checkpoints stay as they are. "async" lets the training go on once the
            files are written, while they are hashed, brought to the disk and published.
        losses: whether a Trainer's loss and norm of gradients on several ranks are those of one process, too. Then call it before
            models are loaded.

    Raises:
        ImportError: transformers is not installed.
        ValueError: the strategy is not known.
        UnsupportedVersion: the installed release has not the shape that the patch relies on; nothing was changed.

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
    with _engine.lock:
        _engine.install(use)
        _engine.base = use
        _engine.settle()


def revert() -> None:
    """Restore the installed classes exactly; without a patch in force it does nothing.

    Arguments objects that exist keep the device and the state they have.
    """
    with _engine.lock:
        _engine.base = None
        _engine.blocks.clear()
        _engine.settle()


@contextmanager
def applied(
    strategy: Strategy = "preserve", checkpoints: bool | Literal["async"] = False, losses: bool = False
) -> Iterator[None]:
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
    with _engine.lock:
        _engine.install(use)
        _engine.blocks.append(use)
    try:
        yield
    finally:
        with _engine.lock:
            _engine.blocks = [other for other in _engine.blocks if other is not use]
            _engine.settle()


def status() -> list[Status]:
    """Say of every patch whether it is applied, could be, is not needed or is not supported; nothing is changed.

    Example:
        >>> import transformers_patch
        >>> [patch.name for patch in transformers_patch.status()][:4]
        ['training_args', 'save_checkpoint', 'build', 'train', 'last_checkpoint']
    """
    with _engine.lock:
        return [_status(entry) for entry in ENTRIES]


def _status(entry: Entry) -> Status:
    version, strategy = None, None
    if entry.name in _engine.undo:
        version, verdict, detail = entry.version(), "applied", entry.reason
        strategy = _engine.strategy() if entry.part == "state" else entry.part
    else:
        try:
            entry.import_target()
            version = entry.version()
            if entry.part == "checkpoints" and not trainer_checkpoints.available():
                raise ImportError("it needs this fork's accelerate, and another one is installed")
            needed = entry.check().needed
            verdict = "can be applied" if needed else "not needed"
            detail = entry.reason if needed else "this release does not reset the state"
        except UnsupportedVersion as error:
            version, verdict, detail = entry.version(), "not supported", str(error)
        except ImportError as error:
            verdict, detail = "not installed", str(error)
    return Status(
        entry.name, entry.target, entry.package, version, entry.versions, strategy, verdict, detail, entry.part
    )
