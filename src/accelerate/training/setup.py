"""Construction of an Accelerator: arguments and environment become settings, once, in numbered steps."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from accelerate.config.deepspeed import DeepSpeedPlugin
from accelerate.config.enums import DynamoBackend, RNGType
from accelerate.config.fp8 import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.config.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    TorchDynamoPlugin,
)
from accelerate.config.megatron import MegatronLMPlugin
from accelerate.config.project import DataLoaderConfiguration, ProjectConfiguration
from accelerate.config.values import to_int
from accelerate.runtime import storage
from accelerate.state import asked_for
from accelerate.training.prepared import models, warn_caller
from accelerate.utils.environment import parse_flag_from_env

# Which attribute of the Accelerator each kind of handler becomes.
HANDLERS: dict[type, str] = {
    DistributedDataParallelKwargs: "ddp_handler",
    GradScalerKwargs: "scaler_handler",
    InitProcessGroupKwargs: "init_handler",
    FP8RecipeKwargs: "fp8_recipe_handler",
    AutocastKwargs: "autocast_handler",
    ProfileKwargs: "profile_handler",
    AORecipeKwargs: "ao_recipe_handler",
    TERecipeKwargs: "te_recipe_handler",
    MSAMPRecipeKwargs: "msamp_recipe_handler",
}


@dataclass(frozen=True)
class Plugins:
    """The strategy plugins that a run asks for, from arguments or environment.

    Attributes:
        deepspeed: One plugin, a dict of them by name, or None.
        fsdp: The FSDP plugin or None.
        megatron: The Megatron-LM plugin or None.
        dynamo: The compilation plugin; its backend may be ``NO``.
    """

    deepspeed: Any
    fsdp: FullyShardedDataParallelPlugin | None
    megatron: MegatronLMPlugin | None
    dynamo: TorchDynamoPlugin


def project(config: ProjectConfiguration | None, folder: str | os.PathLike | None) -> ProjectConfiguration:
    """Return the project configuration, with the folder given beside it."""
    config = config if config is not None else ProjectConfiguration(project_dir=folder)
    if folder is not None and config.project_dir is None:
        config.set_directories(folder)
    elif folder is not None and os.fspath(folder) != os.fspath(config.project_dir):
        warn_caller(
            f"project_dir={os.fspath(folder)!r} is not used, because project_config.project_dir is "
            f"{os.fspath(config.project_dir)!r}. Set it in one of the two places."
        )
    return config


def sort_handlers(handlers: Iterable[KwargsHandler] | None) -> dict[str, KwargsHandler | None]:
    """Return each handler under the attribute it becomes.

    Raises:
        TypeError: Something that is not a handler was given, or a handler no setting belongs to.
        ValueError: Two of one kind were given.
    """
    found: dict[str, KwargsHandler | None] = dict.fromkeys(HANDLERS.values())
    for handler in handlers or ():
        if not isinstance(handler, KwargsHandler):
            raise TypeError(
                f"kwargs_handlers got {handler!r} ({type(handler).__name__}); pass objects derived from "
                f"`accelerate.utils.KwargsHandler`: {[kind.__name__ for kind in HANDLERS]}."
            )
        # The most derived kind wins: the general fp8 recipe derives from two others.
        name = next((HANDLERS[kind] for kind in type(handler).__mro__ if kind in HANDLERS), None)
        if name is None:
            raise TypeError(
                f"kwargs_handlers got a {type(handler).__name__}, which has an argument of its own. Handlers are: "
                f"{[kind.__name__ for kind in HANDLERS]}."
            )
        if found[name] is not None:
            raise ValueError(f"kwargs_handlers got two {type(handler).__name__}; pass one.")
        found[name] = handler
    return found


def plugins(deepspeed: Any, fsdp: Any, megatron: Any, dynamo: Any, dynamo_backend: Any) -> Plugins:
    """Settle the strategy plugins: what was given wins, then what the environment asks for.

    Raises:
        TypeError: A plugin is of another class than its argument asks for.
        ValueError: ``dynamo_plugin`` and ``dynamo_backend`` were both given.
    """
    if dynamo is not None and dynamo_backend is not None:
        raise ValueError("Pass either dynamo_plugin or dynamo_backend, not both: the plugin has a `backend` field.")
    if dynamo is None:
        dynamo = TorchDynamoPlugin(backend=dynamo_backend) if dynamo_backend is not None else TorchDynamoPlugin()
    deepspeed = None if deepspeed == {} else deepspeed
    if deepspeed is None and parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        deepspeed = DeepSpeedPlugin()
    if fsdp is None and asked_for("fsdp_plugin"):
        fsdp = FullyShardedDataParallelPlugin()
    if megatron is None and parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM"):
        megatron = MegatronLMPlugin()
    wanted = (
        ("fsdp_plugin", fsdp, FullyShardedDataParallelPlugin),
        ("megatron_lm_plugin", megatron, MegatronLMPlugin),
        ("dynamo_plugin", dynamo, TorchDynamoPlugin),
        *(("deepspeed_plugin", item, DeepSpeedPlugin) for item in _each(deepspeed)),
    )
    for name, value, kind in wanted:
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}; pass a {kind.__name__}.")
    return Plugins(deepspeed, fsdp, megatron, dynamo)


def _each(deepspeed: Any) -> list[Any]:
    return list(deepspeed.values()) if isinstance(deepspeed, dict) else [deepspeed]


def accumulation(plugin: GradientAccumulationPlugin | None, steps: int) -> GradientAccumulationPlugin:
    """Return the accumulation plugin; without one, or where it has no steps, those given or set in the environment.

    Raises:
        ValueError: Both were given, or the number of steps is not positive.
    """
    if plugin is not None and plugin.num_steps is not None:
        if steps != 1:
            raise ValueError(
                f"Pass either gradient_accumulation_steps (got {steps}) or gradient_accumulation_plugin, not both: the "
                "plugin has a `num_steps` field."
            )
        return plugin
    variable = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    told = os.environ.get(variable, "").strip()
    for name, value in {"gradient_accumulation_steps": steps, variable: told or steps}.items():
        steps = to_int(value, name)
        if steps < 1:
            raise ValueError(f"{name}={steps!r} is not a positive integer; 1 accumulates nothing.")
    return GradientAccumulationPlugin(num_steps=steps) if plugin is None else replace(plugin, num_steps=steps)


def announce_steps(plugin: GradientAccumulationPlugin) -> None:
    """Say so when a new Accelerator changes the accumulation of one that is training: they share one window."""
    live = storage.gradient.current.get("plugin_kwargs")
    before = plugin.num_steps if live is None else live.get("num_steps", 1)
    if before != plugin.num_steps and any(True for _ in models()):
        warn_caller(
            f"This Accelerator sets gradient_accumulation_steps={plugin.num_steps}, and with it those of the other live "
            f"Accelerator, which had {before}: all of a process share one accumulation state. Build them with the same "
            "number, or call `free_memory()` on the other one if it is done."
        )


def loaders(config: DataLoaderConfiguration | None, split_batches: bool | None) -> DataLoaderConfiguration:
    """Return the loader settings; ``split_batches`` beside them is the old spelling.

    Raises:
        ValueError: ``split_batches`` was given in both places with different values.
    """
    config = config if config is not None else DataLoaderConfiguration()
    if split_batches is not None:
        if config.split_batches and not split_batches:
            raise ValueError(
                "split_batches=False and dataloader_config.split_batches=True were both given; set it in the config alone."
            )
        warnings.warn(
            "Accelerator(split_batches=...) is deprecated: use dataloader_config=DataLoaderConfiguration(split_batches=...).",
            FutureWarning,
            stacklevel=3,
        )
        config.split_batches = split_batches
    return config


def rng_types(given: list[str | RNGType] | None) -> list[str | RNGType]:
    """Return which generators are synchronised at the start of an epoch.

    Raises:
        ValueError: One of them is unknown.
    """
    kinds = ["generator"] if given is None else given
    for kind in kinds:
        try:
            RNGType(kind)
        except ValueError:
            raise ValueError(f"rng_types got {kind!r}; choose among {[member.value for member in RNGType]}.") from None
    return list(kinds)


@contextlib.contextmanager
def undone_if_refused() -> Iterator[None]:
    """Forget the states built inside when the run is refused, so that the next Accelerator can ask for another one."""
    built = [slot for slot in (storage.accelerator, storage.process) if not slot.current]
    try:
        yield
    except BaseException:
        for slot in built:
            slot.renew()
        raise


def mesh(given: Any, make: Callable[..., Any], tensor_parallel: Any) -> Any:
    """Return the layout of the device mesh: the one given, or the one that the launcher asked for.

    Args:
        given: The ParallelismConfig that was passed, or None.
        make: Builds one, from the environment where it gets no sizes.
        tensor_parallel: The superseded ``torch_tp_plugin``.

    Raises:
        TypeError: ``given`` is no configuration.
        ValueError: The superseded plugin and the configuration disagree.
    """
    if given is not None and not hasattr(given, "get_device_mesh"):
        raise TypeError(f"parallelism_config={given!r} is a {type(given).__name__}; pass a ParallelismConfig.")
    wanted = getattr(tensor_parallel, "tp_size", 1)
    if given is None and parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG"):
        given = make()
    if tensor_parallel is not None and given is None:
        warnings.warn(
            f"torch_tp_plugin is superseded: pass parallelism_config=ParallelismConfig(tp_size={wanted}).",
            FutureWarning,
            stacklevel=3,
        )
        return make(tp_size=wanted)
    if wanted > 1 and given.tp_size != wanted:
        raise ValueError(
            f"torch_tp_plugin.tp_size={wanted} and parallelism_config.tp_size={given.tp_size} disagree. Leave the plugin away; "
            "the configuration replaces it."
        )
    return given


def is_compiling(plugin: TorchDynamoPlugin) -> bool:
    """Whether models are compiled at prepare."""
    return plugin.backend != DynamoBackend.NO
