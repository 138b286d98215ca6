"""Extensions: features that the core does not know by name, and that can be deleted.

An extension is a folder of `accelerate.extensions`, or a module of another package. Its `Spec` is plain data: it says when a run has the
extension, and which methods of the Accelerator come from it. Its code is imported when it is needed. The core calls it through the hooks of
`Extension`. `Extensions` keeps a tuple of bound methods for each hook, so an empty hook costs a look at an empty tuple.
"""

import contextlib
import importlib
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar, TypeVar

GROUP = "accelerate.extensions"
_NOTHING = contextlib.nullcontext()


class Extension:
    """A feature of one run. Override the hooks that it needs; an instance holds the state of the feature.

    Attributes:
        order: Extensions with a smaller number are called first.

    Example:
        >>> from accelerate import Accelerator
        >>> class CountSteps(Extension):
        ...     steps = 0
        ...     def step_ends(self, optimizer):
        ...         self.steps += 1
        >>> accelerator = Accelerator(cpu=True)
        >>> counter = accelerator.extensions.add(CountSteps(accelerator))
        >>> import torch
        >>> model = torch.nn.Linear(1, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> optimizer.step()
        >>> counter.steps
        1
    """

    order: ClassVar[int] = 50

    def __init__(self, run: Any) -> None:
        self._run = weakref.ref(run)

    @property
    def run(self) -> Any:
        """The Accelerator, which owns its extensions and so is alive in every hook."""
        return self._run()

    @property
    def serves(self) -> tuple[str, ...]:
        """Settings that the extension puts into effect on new models, such as ``("tp_size",)``."""
        return ()

    @classmethod
    def attach(cls, run: Any) -> "Extension | None":
        """Return the extension of a run whose `Spec.attaches` is true, or None; raise ValueError for wrong settings.

        Collective: call on every rank.
        """
        return cls(run)

    def arrives(self, models: list[Any], evaluation: bool) -> None:
        """Follow a layout that new models bring along, or refuse it, before the strategy checks them.

        Collective: call on every rank.
        """

    def convert(self, model: Any, evaluation: bool) -> Any:
        """Return a new model with its layers changed, before it is moved to the device and wrapped; the device mesh is built.

        Collective: call on every rank.
        """
        return model

    def convert_optimizer(self, optimizer: Any) -> None:
        """Change a new torch optimizer before it is wrapped.

        Collective: call on every rank.
        """

    def sharding(self, model: Any, ignored: Collection[Any], policies: dict[Any, Any], units: set[Any]) -> None:
        """Refuse a model that `fully_shard` cannot shard, or choose the precision of its modules.

        Collective: call on every rank.

        Args:
            model: The model, before it is sharded.
            ignored: Its parameters that stay unsharded.
            policies: To be filled with the `MixedPrecisionPolicy` of each module that has another one than the model.
            units: To be filled with the modules that have to be sharded by themselves.
        """

    def sharded(self, model: Any) -> None:
        """Act on a model that `fully_shard` has sharded.

        Collective: call on every rank.
        """

    def unsharded_gradients(self, model: Any) -> None:
        """Act before a sharded model of the run adds up unsharded gradients for the first time, in ``no_sync``.

        Collective: call on every rank.
        """

    def registered(self, kind: str, prepared: Any, evaluation: bool) -> None:
        """Do what a newly prepared object needs, such as registering torch's hooks on it.

        Collective: call on every rank.

        Args:
            kind: ``"model"``, ``"optimizer"``, ``"loader"`` or ``"scheduler"``.
            prepared: What ``prepare`` returns.
            evaluation: Whether a model was prepared for evaluation only.
        """

    def phase_begins(self, phase: str, loss: Any) -> None:
        """Note that a call of the Accelerator begins.

        Not a collective. A rank may make a call alone.

        Args:
            phase: ``"backward"``, ``"save_state"``, ``"load_state"``, ``"gather"`` or ``"reduce"``.
            loss: The loss of a backward pass, as the caller gave it; else None.
        """

    def phase_ends(self, phase: str) -> None:
        """Note that a call of the Accelerator ends, by an error or not. Not a collective."""

    def backward_done(self) -> None:
        """Act after a backward pass without an error.

        Collective: call on every rank.
        """

    def step_begins(self, optimizer: Any) -> None:
        """Act before the step of a prepared optimizer that ends an accumulation step; the gradients are still scaled.

        Collective: call on every rank.
        """

    def step_ends(self, optimizer: Any) -> None:
        """Act after such a step, one that the gradient scaler has skipped included.

        Collective: call on every rank.
        """

    def starting_workers(self, loader: Any) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which a prepared loader starts the workers of its torch loader, which is given.

        Not a collective. Ranks that only receive batches start no workers.
        """
        return _NOTHING

    def between_batches(self, loader: Any) -> None:
        """Act before a prepared loader begins an epoch, and before it reads each later batch; may raise SystemExit.

        Collective: call on every rank.
        """

    def first_batches(self, loader: Any, batches: Iterator[Any]) -> Iterable[Any]:
        """Yield the first batches of an epoch of a prepared loader, which are read from `batches`; the loader yields the others.

        Not a collective. A rank may have no batch.
        """
        return ()

    def saving(self, plan: Any) -> None:
        """Refuse a checkpoint, of which nothing is written yet, or add files to the `checkpoint.save.SavePlan`.

        Collective: call on every rank.
        """

    def loading(self, folder: str) -> None:
        """Refuse a checkpoint, which is verified, before any object is changed.

        Collective: call on every rank.
        """

    def released(self) -> None:
        """Release what belongs to prepared objects: ``free_memory`` was called. The run no longer has the extension if it removes itself.

        Collective: call on every rank.
        """

    def ended(self) -> None:
        """Finish: ``end_training`` was called.

        Collective: call on every rank.
        """


E = TypeVar("E", bound=Extension)


@dataclass(frozen=True)
class Command:
    """A subcommand of ``accelerate``. Its module is imported when the command runs.

    Attributes:
        module: Dotted name of the module.
        parser: Function of the module that returns the argument parser; it takes the result of ``add_subparsers``, or nothing.
        help: One line for ``accelerate --help``.
    """

    module: str
    parser: str
    help: str


@dataclass(frozen=True)
class Spec:
    """What the core knows of an extension: plain data, so that reading it imports nothing.

    Attributes:
        name: Its name, which is that of its folder.
        extension: ``"module:Class"`` of its `Extension`; an empty text if it only has methods.
        attaches: Says whether an Accelerator has it, from the settings of the run and the environment. It is asked when the Accelerator
            is made, and again once its state has changed.
        late: Whether `attaches` is asked before each new model, too, since it looks at settings that are not in the state.
        arrives: Says whether new models bring what the extension handles; a run without it then attaches it, before the hook `arrives`.
        needs: A module without which no model brings that; `arrives` is asked only if the module is imported.
        methods: Methods that an Accelerator gets, each with the ``"module:function"`` whose first argument is the Accelerator, or with a
            ``staticmethod`` of the module.
        attributes: The same for read-only attributes.
        handlers: ``"module:Class"`` of each class of ``kwargs_handlers``, by the attribute of the Accelerator that it becomes.
        strategies: Records (`StrategySpec`) for `config.strategies`, which sorts them by their `order`. Not in other packages.
        options: The module of its rows in the launcher's option table, see `config.options`. Not in other packages.
        commands: The subcommands of ``accelerate``, by name.
        runners: Ways of starting processes for the launcher, see `launch.runners`: ``"module"`` by name.
        schedulers: Modules that read what a scheduler says of a run, see `runtime.ranks.schedulers`: by each variable that it sets.
        started: ``"module:function"`` that each process, a single one too, calls with its state, once it has its rank and device: by the
            option that asks for it.
        process: ``"module:Class"`` of a `runtime.peers.ProcessExtension`, for processes that work together with others.
        tensor_kinds: ``"module:Class"`` of each `modules.tensor_kinds.TensorKind`.
        dimensions: ``"module:Class"`` of the settings of a parallel dimension, the ``tp_handler`` of a ``ParallelismConfig``, by its name, ``"tp"``.
        devices: ``"module:ROWS"`` of kinds of devices, `devices.device.Device`, that are looked for before the core's. Not in other packages.
        storage: ``"module:Class"`` of a `checkpoint.storage.CheckpointStorage` for locations that are URLs.
        operation_checks: A module that finds out whether the ranks call the same operation. Its ``CheckedCommunicator`` takes the place of
            `comm.torch_dist.TorchCommunicator`, and collectives call its ``compare_arguments`` first in debug mode.
        background_save: ``"module:function"`` that takes an Accelerator and a `checkpoint.save.Save` whose state is collected, for
            ``save_state(blocking=False)``: it copies the state, and finishes the save while the training continues.
        dispatch: ``"module:Class"`` of a `data.reading.Dispatched`, for loaders that rank 0 reads for all ranks.
    """

    name: str
    extension: str = ""
    attaches: Callable[[Any], bool] | None = None
    late: bool = True
    arrives: Callable[[list[Any]], bool] | None = None
    needs: str = ""
    methods: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, str] = field(default_factory=dict)
    handlers: Mapping[str, str] = field(default_factory=dict)
    strategies: tuple[Any, ...] = ()
    options: str = ""
    commands: Mapping[str, Command] = field(default_factory=dict)
    runners: Mapping[str, str] = field(default_factory=dict)
    schedulers: Mapping[str, str] = field(default_factory=dict)
    started: Mapping[str, str] = field(default_factory=dict)
    process: str = ""
    tensor_kinds: tuple[str, ...] = ()
    dimensions: Mapping[str, str] = field(default_factory=dict)
    devices: str = ""
    storage: str = ""
    operation_checks: str = ""
    background_save: str = ""
    dispatch: str = ""

    def install(self, owner: type) -> None:
        """Give a class the methods and attributes of the extension; ValueError if it has one of these names.

        Not a collective.
        """
        for name, address in (*self.methods.items(), *self.attributes.items()):
            if hasattr(owner, name):
                raise ValueError(
                    f"The extension {self.name!r} has the method {name!r}, which {owner.__name__} has already."
                )
            setattr(owner, name, Method(address) if name in self.methods else Attribute(address))


class Method:
    """A method whose function is imported when it is looked up."""

    def __init__(self, address: str) -> None:
        self.address = address

    def __get__(self, run: Any, owner: type | None = None) -> Any:
        return imported(self.address).__get__(run, owner)  # as that of a method in the class


class Attribute(Method):
    """A read-only attribute whose function is imported when it is read."""

    def __get__(self, run: Any, owner: type | None = None) -> Any:
        return self if run is None else imported(self.address)(run)

    def __set__(self, run: Any, value: Any) -> None:
        raise AttributeError(f"{self.address.partition(':')[2]!r} is read-only; got {value!r}.")


@cache
def imported(address: str) -> Any:
    """Return what a ``"module:name"`` stands for."""
    module, _, name = address.partition(":")
    return getattr(importlib.import_module(module), name)


@cache
def specs() -> tuple[Spec, ...]:
    """Return the specs of the extensions in this package, in the order of their table."""
    package = importlib.import_module("accelerate.extensions")
    return tuple(importlib.import_module(f"{package.__name__}.{name}").SPEC for name in package.TABLE)


@cache
def third_parties() -> tuple[Spec, ...]:
    """Return the specs of other packages, the entry points of the group `GROUP`; ImportError names one that cannot be imported."""
    added: tuple[Spec, ...] = of_other_packages(GROUP, "extension")
    for spec in added:
        for field_name in ("strategies", "options", "devices"):
            if getattr(spec, field_name):
                raise ValueError(
                    f"The extension {spec.name!r} of another package has {field_name}, which only folders of accelerate.extensions may have. "
                    "Register a strategy and its options under the entry points 'accelerate.backends', a device by `accelerate.devices.register`."
                )
    return added


def all_specs() -> tuple[Spec, ...]:
    """Return the specs of this package, then those of other packages."""
    return (*specs(), *third_parties())


def of_other_packages(group: str, what: str) -> tuple[Any, ...]:
    """Return what the entry points of a group stand for; ImportError names one that cannot be imported, and says what it is."""
    found = []
    for point in _entry_points().select(group=group):
        try:
            found.append(point.load())
        except Exception as error:
            raise ImportError(
                f"The {what} {point.name!r} of another package ({point.value}, entry points {group!r}) cannot be imported: "
                f"{type(error).__name__}: {error}. Fix or uninstall that package."
            ) from error
    return tuple(found)


@cache
def _entry_points() -> Any:
    return entry_points()  # of all groups, since it reads a file of each installed package


@cache
def _attachable() -> tuple[Spec, ...]:
    return tuple(spec for spec in all_specs() if spec.extension)


class Extensions:
    """The extensions of one run. For each hook there is a tuple of the methods of those that override it, by order.

    A copy of it, in another process or in a copied Accelerator, is empty: an extension belongs to its process.

    Attributes:
        former_problem: Why earlier work failed, which the save or load that now begins raises on all ranks, once its arguments are
            checked. An extension sets it in `phase_begins`, and resets it in `phase_ends`.
    """

    def __init__(self) -> None:
        self.attached: list[Extension] = []
        self.former_problem: BaseException | None = None
        self._asked: set[str] = set()  # names of specs whose `attach` was called
        self._state: dict[str, Any] | None = None  # that of the run, as it was when the specs were asked
        self._update()

    def __reduce__(self) -> tuple[Any, ...]:
        return Extensions, ()

    @classmethod
    def of(cls, run: Any) -> "Extensions":
        """Return the extensions of a new Accelerator.

        Collective: call on every rank.
        """
        extensions = cls()
        extensions.attach(run)
        return extensions

    def attach(self, run: Any, models: Sequence[Any] = ()) -> bool:
        """Add the extensions that the run's settings, or new models, call for and that it does not have yet.

        Collective: call on every rank.

        Returns:
            Whether the state of the run has changed since the last call, so that another strategy may serve it.
        """
        state = dict(vars(run.state))
        changed = state != self._state
        for spec in _attachable():
            if spec.name in self._asked:
                continue
            is_called_for = bool(spec.attaches and (changed or (spec.late and models)) and spec.attaches(run))
            if not is_called_for and spec.arrives and models and (not spec.needs or spec.needs in sys.modules):
                is_called_for = spec.arrives(list(models))
            if is_called_for:
                self._asked.add(spec.name)
                if (extension := imported(spec.extension).attach(run)) is not None:
                    self.add(extension)
        self._state = state
        return changed

    def require(self, settings: Iterable[str]) -> None:
        """Raise ValueError for a setting that no extension of the run serves, since its folder was deleted.

        Not a collective.
        """
        served = {setting for extension in self.attached for setting in extension.serves}
        if missing := [setting for setting in settings if setting not in served]:
            raise ValueError(
                f"{missing[0]} needs an extension that is not in this installation of accelerate. Remove the setting, or "
                "install the complete package."
            )

    def add(self, extension: E) -> E:
        """Add an extension to the run, and return it. Not a collective."""
        self.attached = sorted([*self.attached, extension], key=lambda each: each.order)
        self._update()
        return extension

    def remove(self, extension: Extension) -> None:
        """Remove an extension from the run, if it has it. Not a collective."""
        self.attached = [each for each in self.attached if each is not extension]
        self._update()

    def of_kind(self, kind: type[E]) -> list[E]:
        """Return the run's extensions of a class. Not a collective."""
        return [extension for extension in self.attached if isinstance(extension, kind)]

    def phase(self, phase: str, loss: Any = None) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a call of the Accelerator, which calls the hooks `phase_begins` and `phase_ends`.

        Collective: call on every rank.
        """
        return self._phase(phase, loss) if self.phase_begins or self.phase_ends else _NOTHING

    @contextlib.contextmanager
    def _phase(self, phase: str, loss: Any) -> Any:
        for begins in self.phase_begins:
            begins(phase, loss)
        try:
            yield
        finally:
            for ends in self.phase_ends:
                ends(phase)

    def _update(self) -> None:
        def overriding(hook: str) -> tuple[Any, ...]:
            default = getattr(Extension, hook)
            return tuple(getattr(each, hook) for each in self.attached if getattr(type(each), hook) is not default)

        self.arrives = overriding("arrives")
        self.convert = overriding("convert")
        self.convert_optimizer = overriding("convert_optimizer")
        self.sharding = overriding("sharding")
        self.sharded = overriding("sharded")
        self.unsharded_gradients = overriding("unsharded_gradients")
        self.registered = overriding("registered")
        self.phase_begins = overriding("phase_begins")
        self.phase_ends = overriding("phase_ends")
        self.backward_done = overriding("backward_done")
        self.step_begins = overriding("step_begins")
        self.step_ends = overriding("step_ends")
        self.starting_workers = overriding("starting_workers")
        self.between_batches = overriding("between_batches")
        self.first_batches = overriding("first_batches")
        self.saving = overriding("saving")
        self.loading = overriding("loading")
        self.released = overriding("released")
        self.ended = overriding("ended")


# Of objects that no Accelerator has prepared.
NO_EXTENSIONS = Extensions()
