"""One record for each strategy: all that the package knows of it by name.

The launcher's features and options, the plugins that choose a strategy, its abilities, its wrappers and its classes are read from
here. A strategy of the core is one row of `_CORE`, one of an extension is in `Spec.strategies`. A strategy of another package is a
`StrategySpec` under the entry-point group `accelerate.backends`; nothing else has to change. Put that record into a module that
imports nothing heavy, too.

This module imports nothing heavy, because the command line reads it. Classes are named by strings, and imported on first use.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from accelerate import extension
from accelerate.config.enums import DistributedType

GROUP = "accelerate.backends"


@dataclass(frozen=True)
class Traits:
    """The abilities of one way of cooperating; the defaults are those of data parallelism through torch.

    Attributes:
        custom_device_placement: The strategy moves models to the device itself.
        scales_loss: The loss is divided by the accumulation steps before `backward`.
        clips_by_value: Gradients can be clipped element by element.
        joins_uneven_inputs: Ranks may run out of batches at different steps.
        places_batches: Prepared loaders move batches to the device.
        reduces_on_step: Gradients are reduced in `optimizer.step`, not during `backward`.
        distributed: More than one process may cooperate.
        torch_distributed: The processes cooperate through `torch.distributed`.
        needs_group: A single process needs a process group, too.
        xla: Steps are traced by torch_xla.
        sharded: Each rank holds shards of the parameters.
        deepspeed: DeepSpeed's engine trains.
        megatron: Megatron core's engine trains.
    """

    custom_device_placement: bool = False
    scales_loss: bool = True
    clips_by_value: bool = True
    joins_uneven_inputs: bool = False
    places_batches: bool = True
    reduces_on_step: bool = False
    distributed: bool = True
    torch_distributed: bool = True
    needs_group: bool = False
    xla: bool = False
    sharded: bool = False
    deepspeed: bool = False
    megatron: bool = False


@dataclass(frozen=True)
class StrategySpec:
    """One strategy.

    Attributes:
        name: Its name in checkpoints, messages and `load`.
        strategy: ``"module:Class"`` of its `strategies.base.Strategy`: what happens at prepare and in a step.
        state_io: ``"module:Class"`` of its `strategies.state_io.StateIO`: what a checkpoint has of it.
        kinds: The distributed types of the states that it serves. The first one is set where its plugin is given.
        matches: Says of an AcceleratorState whether the strategy serves it; None compares `kinds` alone.
        traits: Its abilities, which are those of all its `kinds`.
        title: Its name for people, where it can be asked for.
        switch: The launcher's option that asks for it.
        feature: The launcher's feature; its options have no effect without `switch`.
        section: The mapping of a configuration file that holds its options.
        options: Rows for the launcher's option table, of a strategy of another package.
        runner: The module of `launch.runners` that starts its processes if its `starts` returns True.
        plugin: The attribute of the state that keeps its plugin; only for strategies of this package.
        plugin_class: ``"module:Class"`` of the plugin, which reads the launcher's settings.
        has_model: Says of a model that `model_io` gives and takes its state, whichever run asks.
        model_io: ``"module:Class"`` of the `checkpoint.model_io.ModelIO` of such models.
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
    has_model: Callable[[Any], bool] | None = None
    model_io: str = ""
    wrappers: tuple[tuple[str, str], ...] = ()
    order: int = 50


def _is_fsdp2(state: Any) -> bool:
    return getattr(state, "is_fsdp2", False)


def is_fsdp1(model: Any) -> bool:
    """Say whether a model is, or contains, a FullyShardedDataParallel. Not a collective."""
    # While the module is not imported there is no such model, and importing it is slow.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in model.modules())


REPLICAS = tuple(kind for kind in DistributedType if kind.value.startswith("MULTI_"))
_ENGINE = {"custom_device_placement": True, "scales_loss": False, "clips_by_value": False}
_FSDP = {
    "kinds": (DistributedType.FSDP,),
    "traits": Traits(custom_device_placement=True, clips_by_value=False, sharded=True),
    "title": "FSDP",
    "switch": "use_fsdp",
    "feature": "fsdp",
    "section": "fsdp_config",
    "plugin": "fsdp_plugin",
    "plugin_class": "accelerate.config.fsdp:FullyShardedDataParallelPlugin",
}

_CORE = (
    StrategySpec(
        "deepspeed",
        "accelerate.strategies.deepspeed.engine:DeepSpeed",
        "accelerate.strategies.deepspeed.state_io:DeepSpeedIO",
        kinds=(DistributedType.DEEPSPEED,),
        traits=Traits(**_ENGINE, deepspeed=True, needs_group=True),
        title="DeepSpeed",
        switch="use_deepspeed",
        feature="deepspeed",
        section="deepspeed_config",
        runner="deepspeed",
        plugin="deepspeed_plugins",
        plugin_class="accelerate.config.deepspeed:DeepSpeedPlugin",
        wrappers=(("deepspeed.runtime.engine", "DeepSpeedEngine"),),
    ),
    StrategySpec(
        "fsdp2",
        "accelerate.strategies.sharded:FSDP2",
        "accelerate.strategies.sharded_io:FSDP2IO",
        matches=_is_fsdp2,
        **_FSDP,
    ),
    StrategySpec(
        "fsdp1",
        "accelerate.strategies.fsdp1:FSDP1",
        "accelerate.strategies.fsdp1_io:FSDP1IO",
        **_FSDP,
        has_model=is_fsdp1,
        model_io="accelerate.strategies.fsdp1_io:FSDP1Models",
        wrappers=(("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),),
    ),
    StrategySpec(
        "megatron",
        "accelerate.strategies.megatron.strategy:MegatronLM",
        "accelerate.strategies.megatron.checkpoint:MegatronIO",
        kinds=(DistributedType.MEGATRON_LM,),
        traits=Traits(**_ENGINE, places_batches=False, megatron=True),
        title="Megatron-LM",
        switch="use_megatron_lm",
        feature="megatron",
        section="megatron_lm_config",
        plugin="megatron_lm_plugin",
        plugin_class="accelerate.config.megatron:MegatronLMPlugin",
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
    StrategySpec(
        "xla",
        "accelerate.strategies.ddp:XLA",
        kinds=(DistributedType.XLA,),
        traits=Traits(reduces_on_step=True, torch_distributed=False, xla=True),
        wrappers=(
            ("torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel", "XlaFullyShardedDataParallel"),
            ("torch_xla.experimental.spmd_fully_sharded_data_parallel", "SpmdFullyShardedDataParallel"),
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
    names = [known.name for known in specs()]
    if before is not None and before not in names:
        raise ValueError(f"before={before!r} is no registered strategy. Known: {names}.")
    specs().insert(0 if before is None else names.index(before), spec)
    wrappers.cache_clear()
    traits_of.cache_clear()


@cache
def third_parties() -> tuple[StrategySpec, ...]:
    """Register the strategies of other packages, once, and return them; ImportError names one that cannot be imported."""
    added = tuple(_imported(point) for point in entry_points(group=GROUP))
    for spec in added:
        register(spec)
    return added


def _imported(point: EntryPoint) -> StrategySpec:
    try:
        return point.load()
    except Exception as error:
        raise ImportError(
            f"The strategy {point.name!r} of another package ({point.value}, entry points {GROUP!r}) cannot be imported: "
            f"{type(error).__name__}: {error}. Repair or uninstall that package."
        ) from error


def engines() -> dict[str, StrategySpec]:
    """Return the strategies that a plugin chooses, by the attribute of the state that keeps the plugin."""
    chosen: dict[str, StrategySpec] = {}
    for spec in specs():
        if spec.plugin:
            chosen.setdefault(spec.plugin, spec)
    return chosen


def serving(state: Any) -> StrategySpec | None:
    """Return the record of the strategy that serves a state now; None without one."""
    for spec in specs():
        if state.distributed_type in spec.kinds if spec.matches is None else spec.matches(state):
            return spec
    return None


@cache
def wrappers() -> tuple[tuple[str, str], ...]:
    """Return module and class of each wrapper that keeps the model under ``.module``."""
    return tuple([pair for spec in specs() for pair in spec.wrappers])


@cache
def traits_of(distributed_type: DistributedType | str) -> Traits:
    """Return the abilities of a way of cooperating, a member or its name; ValueError lists the known ones."""
    kind = DistributedType(distributed_type)
    for spec in specs():
        if kind in spec.kinds:
            return spec.traits
    known = [member.value for spec in specs() for member in spec.kinds]
    raise ValueError(f"No strategy serves {kind.value!r}: its extension is not installed. Known: {known}.")
