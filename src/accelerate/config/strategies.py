"""One record for each strategy: all that the package knows of it by name.

The launcher's features and options, the plugins that choose a strategy, its abilities, its wrappers and its classes are read from
here. A strategy of the core is one row of `_CORE`, one of an extension is in `Spec.strategies`. A strategy of another package is a
`StrategySpec` under the entry-point group `accelerate.backends`; nothing else has to change. Put that record into a module that
imports nothing heavy, too.

This module imports nothing heavy, because the command line reads it. Classes are named by strings, and imported on first use.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from accelerate import extension
from accelerate.config.enums import DistributedType

GROUP = "accelerate.backends"


@dataclass(frozen=True)
class Traits:
    """The abilities of a distributed type; the defaults are those of data parallelism through torch.

    Attributes:
        custom_device_placement: The strategy moves models to the device itself.
        scales_loss: The loss is divided by the accumulation steps before `backward`.
        clips_by_value: Gradients can be clipped element by element.
        joins_uneven_inputs: Ranks may run out of batches at different steps.
        places_batches: Prepared loaders move batches to the device.
        distributed: More than one process may cooperate.
        torch_distributed: The processes cooperate through `torch.distributed`.
        needs_group: Even a single process needs a process group.
        traced: Operations are recorded, and run when the graph ends.
        sharded: Each rank holds shards of the parameters.
        own_groups: Its engine keeps separate process groups: no mesh is built for it, and the groups last as long as the process.
        casts_itself: Its engine casts as its plugin says, so that autocast has no effect.
        steps_in_backward: Its engine steps in `backward`.
    """

    custom_device_placement: bool = False
    scales_loss: bool = True
    clips_by_value: bool = True
    joins_uneven_inputs: bool = False
    places_batches: bool = True
    distributed: bool = True
    torch_distributed: bool = True
    needs_group: bool = False
    traced: bool = False
    sharded: bool = False
    own_groups: bool = False
    casts_itself: bool = False
    steps_in_backward: bool = False


@dataclass(frozen=True)
class StrategySpec:
    """One strategy.

    Attributes:
        name: Its name in checkpoints, messages and `load`.
        strategy: ``"module:Class"`` of its `strategies.base.Strategy`, which acts at prepare and in a step.
        state_io: ``"module:Class"`` of its `strategies.state_io.StateIO`, which saves and loads its states.
        kinds: The distributed types of the states that it serves. The first one is set if its plugin is passed.
        matches: Says of an AcceleratorState whether the strategy serves it; None compares only `kinds`.
        traits: Its abilities, which are those of all its `kinds`.
        title: Its name for people, where it can be asked for.
        switch: The launcher's option that asks for it.
        feature: The launcher's feature; its options have no effect without `switch`.
        section: The mapping of a configuration file that holds its options.
        options: Rows for the launcher's option table, of a strategy of another package.
        runner: The module of `launch.runners` that starts its processes if its `starts` returns True.
        joins: ``"module:function"`` that lets its library communicate; called with the backend, the type of the device and the local
            rank once the ranks have met.
        plugin: The attribute of the state that keeps its plugin; only for strategies of this package.
        plugin_class: ``"module:Class"`` of the plugin, which reads the launcher's settings.
        plugin_set: ``"module:function"`` called with a new state and its plugin, instead of the plugin's
            ``set_mixed_precision``.
        plugin_again: ``"module:function"`` called with a state and the plugin of a later Accelerator. It raises if they
            contradict each other. Without it, the later plugin is ignored with a warning.
        sets_switch: The variable of `switch` is set in a run whose plugin was given, for libraries that read it.
        has_model: Says of a model that `model_io` reads and sets its state, whichever run asks.
        model_io: ``"module:Class"`` of the `checkpoint.model_io.ModelIO` of such models.
        communicator: ``"module:Class"`` of the `comm.base.Communicator` of processes that do not meet through `torch.distributed`.
        loader: ``"module:function"`` that returns the class of loaders that move batches to the device; by default `DataLoaderShard`.
        layout: ``"module:Class"`` of the `checkpoint.layouts.EngineLayout` of files that only its library writes.
        wrappers: Module and class of each wrapper that keeps the model under ``.module``. A strategy that wraps models lists its
            wrapper here, so that optimizer states have the names of the model inside.
        order: Records with a smaller number are asked first; of equal ones, those of the core.
    """

    name: str
    strategy: str
    state_io: str = "accelerate.strategies.state_io:StateIO"
    kinds: tuple[DistributedType, ...] = ()
    matches: Callable[[Any], bool] | None = None
    traits: Traits = field(default_factory=Traits)
    title: str = ""
    switch: str = ""
    feature: str = ""
    section: str = ""
    options: Sequence[Any] = ()
    runner: str = ""
    plugin: str = ""
    plugin_class: str = ""
    joins: str = ""
    plugin_set: str = ""
    plugin_again: str = ""
    sets_switch: bool = False
    has_model: Callable[[Any], bool] | None = None
    model_io: str = ""
    communicator: str = ""
    loader: str = ""
    layout: str = ""
    wrappers: tuple[tuple[str, str], ...] = ()
    order: int = 50


def _is_fsdp2(state: Any) -> bool:
    return getattr(state, "is_fsdp2", False)


REPLICAS = tuple(kind for kind in DistributedType if kind.value.startswith("MULTI_"))
# The abilities of FSDP, in either version.
SHARDED = Traits(custom_device_placement=True, clips_by_value=False, sharded=True)

_CORE = (
    StrategySpec(
        "fsdp2",
        "accelerate.strategies.sharded:FSDP2",
        "accelerate.strategies.sharded_io:FSDP2IO",
        kinds=(DistributedType.FSDP,),
        matches=_is_fsdp2,
        traits=SHARDED,
        title="FSDP",
        switch="use_fsdp",
        feature="fsdp",
        section="fsdp_config",
        plugin="fsdp_plugin",
        plugin_class="accelerate.config.fsdp:FullyShardedDataParallelPlugin",
    ),
    StrategySpec(
        "single",
        "accelerate.strategies.base:SingleProcess",
        kinds=(DistributedType.NO,),
        traits=Traits(distributed=False, torch_distributed=False),
    ),
    StrategySpec(
        "ddp",
        "accelerate.strategies.ddp:DataParallel",
        kinds=REPLICAS,
        traits=Traits(joins_uneven_inputs=True),
        wrappers=(
            ("torch.nn.parallel.distributed", "DistributedDataParallel"),
            ("torch.nn.parallel.data_parallel", "DataParallel"),
        ),
    ),
)


@cache
def specs() -> list[StrategySpec]:
    """Return the records of the core and of its extensions, to which `register` adds. The first one that serves a state is used."""
    added = [record for spec in extension.specs() for record in spec.strategies]
    return sorted([*_CORE, *added], key=lambda record: record.order)


def register(spec: StrategySpec, before: str | None = None) -> None:
    """Add a strategy, in front of the one it refines.

    Not a collective.

    Args:
        spec: The strategy; it is asked before those behind it.
        before: Name of the strategy it goes in front of; None puts it first.

    Raises:
        ValueError: ``before`` names no strategy, and the message lists the known ones; or the record has a plugin, which only
            the constructor of the Accelerator takes.
    """
    if spec.plugin:
        raise ValueError(
            f"The strategy {spec.name!r} has plugin={spec.plugin!r}, which no Accelerator takes. Read its settings from variables."
        )
    names = [registered.name for registered in specs()]
    if before is not None and before not in names:
        raise ValueError(f"before={before!r} is no registered strategy. Known: {names}.")
    specs().insert(0 if before is None else names.index(before), spec)
    for cached in (wrappers, record_of, traits_of):
        cached.cache_clear()


@cache
def third_parties() -> tuple[StrategySpec, ...]:
    """Register the strategies of other packages, once, and return them; ImportError names one that cannot be imported."""
    added: tuple[StrategySpec, ...] = extension.of_other_packages(GROUP, "strategy")
    for spec in added:
        register(spec)
    return added


def plugin_record(name: str) -> StrategySpec:
    """Return the record of a plugin, by the attribute of the state that keeps it; ValueError if its extension is not installed."""
    if (spec := engines().get(name)) is None:
        raise ValueError(
            f"{name} was given, and no extension that is installed has the strategy for it. Known: {list(engines())}."
        )
    return spec


def engines() -> dict[str, StrategySpec]:
    """Return the strategies that a plugin chooses, by the attribute of the state that keeps the plugin."""
    chosen: dict[str, StrategySpec] = {}
    for spec in specs():
        if spec.plugin:
            chosen.setdefault(spec.plugin, spec)
    return chosen


def serving(state: Any) -> StrategySpec | None:
    """Return the record of the strategy that serves a state now; None without one. ValueError if the run asked for one behind it.

    A record in front that looks at the state itself, or serves the type that the later one's plugin sets, is there on purpose: pipelines
    have stages that FSDP2 shards.
    """
    able = [spec for spec in specs() if _serves(spec, state)]
    for spec in able[1:] if able and able[0].matches is None else ():
        if spec.switch and spec.matches is not None and state.distributed_type not in spec.kinds:
            raise ValueError(
                f"--{spec.switch} asks for the strategy {spec.name!r}, but the run gets {able[0].name!r}, whose record comes first. Give the "
                f"record of {spec.name!r} an `order` below {able[0].order}."
            )
    return able[0] if able else None


def _serves(spec: StrategySpec, state: Any) -> bool:
    return state.distributed_type in spec.kinds if spec.matches is None else spec.matches(state)


@cache
def wrappers() -> tuple[tuple[str, str], ...]:
    """Return module and class of each wrapper that keeps the model under ``.module``."""
    return tuple([pair for spec in specs() for pair in spec.wrappers])


@cache
def record_of(distributed_type: DistributedType | str) -> StrategySpec:
    """Return the first record of a way of cooperating, a member or its name; ValueError lists the known ones."""
    kind = DistributedType(distributed_type)
    for spec in specs():
        if kind in spec.kinds:
            return spec
    served = sorted({member.value for spec in specs() for member in spec.kinds})
    raise ValueError(f"No strategy serves {kind.value!r}: its extension is not installed. Known: {served}.")


@cache
def traits_of(distributed_type: DistributedType | str) -> Traits:
    """Return the abilities of a way of cooperating, a member or its name; ValueError lists the known ones."""
    return record_of(distributed_type).traits
