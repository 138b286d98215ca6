"""Construction of an Accelerator: arguments and environment become settings, once, in numbered steps."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from accelerate import extension
from accelerate.base._warn import warn_user
from accelerate.config import env
from accelerate.config.enums import RNGType
from accelerate.config.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    TorchDynamoPlugin,
)
from accelerate.config.options import BY_NAME
from accelerate.config.options.schema import to_int
from accelerate.config.project import DataLoaderConfiguration, ProjectConfiguration
from accelerate.config.strategies import engines
from accelerate.extension import imported
from accelerate.runtime import storage

# Which attribute of the Accelerator each kind of handler becomes; those of extensions are in `Spec.handlers`.
HANDLERS: dict[type, str] = {
    DistributedDataParallelKwargs: "ddp_handler",
    GradScalerKwargs: "scaler_handler",
    InitProcessGroupKwargs: "init_handler",
    AutocastKwargs: "autocast_handler",
}


def project(config: ProjectConfiguration | None, folder: str | os.PathLike[str] | None) -> ProjectConfiguration:
    """Return the project configuration, with the folder given next to it."""
    config = config if config is not None else ProjectConfiguration(project_dir=folder)
    if folder is None:
        return config
    if config.project_dir is None:
        config.set_directories(folder)
    elif os.fspath(folder) != os.fspath(config.project_dir):
        warn_user(
            f"project_dir={os.fspath(folder)!r} is not used, because project_config.project_dir is "
            f"{os.fspath(config.project_dir)!r}. Set it in one of the two places."
        )
    return config


def sort_handlers(handlers: Iterable[KwargsHandler] | None) -> dict[str, KwargsHandler | None]:
    """Return each handler under the attribute it becomes; TypeError for others, ValueError for two of a kind."""
    addresses = {name: address for spec in extension.all_specs() for name, address in spec.handlers.items()}
    found: dict[str, KwargsHandler | None] = dict.fromkeys([*HANDLERS.values(), *addresses])
    kinds = (
        HANDLERS | {extension.imported(address): name for name, address in addresses.items()} if handlers else HANDLERS
    )
    for handler in handlers or ():
        # The most derived kind wins: the general fp8 recipe derives from two others.
        name = next((kinds[kind] for kind in type(handler).__mro__ if kind in kinds), None)
        if name is None:
            raise TypeError(
                f"kwargs_handlers got {handler!r} ({type(handler).__name__}). Pass objects of these classes, or derived from them: "
                f"{[kind.__name__ for kind in kinds]}; a plugin has its own argument."
            )
        if found[name] is not None:
            raise ValueError(f"kwargs_handlers got two {type(handler).__name__}; pass one.")
        found[name] = handler
    return found


def plugins(deepspeed: Any, fsdp: Any, megatron: Any, dynamo: Any, dynamo_backend: Any) -> dict[str, Any]:
    """Return the plugins that are arguments of ``AcceleratorState``, which builds those of the environment."""
    if dynamo is not None and dynamo_backend is not None:
        raise ValueError("Pass either dynamo_plugin or dynamo_backend, not both: the plugin has a `backend` field.")
    if dynamo_backend is not None:
        dynamo = TorchDynamoPlugin(backend=dynamo_backend)
    given = {
        "deepspeed_plugin": deepspeed if deepspeed != {} else None,
        "fsdp_plugin": fsdp,
        "megatron_lm_plugin": megatron,
        "dynamo_plugin": dynamo,
    }
    classes = {spec.plugin.replace("plugins", "plugin"): spec.plugin_class for spec in engines().values()}
    classes["dynamo_plugin"] = "accelerate.config.handlers:TorchDynamoPlugin"
    for name, value in given.items():
        if value is not None and name not in classes:
            raise ValueError(f"{name}={value!r} was given, and the extension with its strategy is not installed.")
        for plugin in value.values() if isinstance(value, dict) else [value]:
            if plugin is not None and not isinstance(plugin, kind := imported(classes[name])):
                raise TypeError(f"{name}={plugin!r} is a {type(plugin).__name__}; pass a {kind.__name__}.")
    return given


def accumulation(plugin: GradientAccumulationPlugin | None, steps: int) -> GradientAccumulationPlugin:
    """Return the accumulation plugin; without one, or where it has no steps, those given or set in the environment."""
    option = BY_NAME["gradient_accumulation_steps"]
    variable = str(option.env)
    if plugin is not None and plugin.num_steps is not None:
        if steps != 1:
            raise ValueError(
                f"Pass either {option.name} (got {steps}) or gradient_accumulation_plugin, not both: the plugin has a "
                "`num_steps` field."
            )
        return plugin
    for source, value in ((option.name, steps), (variable, os.environ.get(variable, "").strip() or steps)):
        steps = to_int(value, source)
        if steps < 1:
            raise ValueError(f"{source}={steps!r} is not a positive integer; 1 accumulates nothing.")
    return GradientAccumulationPlugin(num_steps=steps) if plugin is None else replace(plugin, num_steps=steps)


def loaders(config: DataLoaderConfiguration | None, split_batches: bool | None) -> DataLoaderConfiguration:
    """Return the loader settings; ``split_batches`` next to them is the old spelling."""
    config = config if config is not None else DataLoaderConfiguration()
    if split_batches is not None:
        if config.split_batches and not split_batches:
            raise ValueError(
                "split_batches=False and dataloader_config.split_batches=True were both given; set it in the config alone."
            )
        warn_user(
            "Accelerator(split_batches=...) is deprecated: use dataloader_config=DataLoaderConfiguration(split_batches=...).",
            FutureWarning,
        )
        config.split_batches = split_batches
    return config


def rng_types(given: list[str | RNGType] | None) -> list[str | RNGType]:
    """Return which generators are synchronised at the start of an epoch; ValueError for an unknown one."""
    kinds: list[str | RNGType] = ["generator"] if given is None else list(given)
    known = [member.value for member in RNGType]
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ValueError(f"rng_types got {unknown[0]!r}; choose among {known}.")
    return kinds


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
    """Return the layout of the device mesh: the one given, or what `make` builds if the launcher asked for one."""
    if given is not None and not hasattr(given, "get_device_mesh"):
        raise TypeError(f"parallelism_config={given!r} is a {type(given).__name__}; pass a ParallelismConfig.")
    if given is None and env.value_of("use_parallelism_config"):
        given = make()
    if tensor_parallel is None:
        return given
    wanted = tensor_parallel.tp_size
    if given is None:
        warn_user(
            f"torch_tp_plugin is superseded: pass parallelism_config=ParallelismConfig(tp_size={wanted}).",
            FutureWarning,
        )
        return make(tp_size=wanted)
    if wanted > 1 and given.tp_size != wanted:
        raise ValueError(
            f"torch_tp_plugin.tp_size={wanted} and parallelism_config.tp_size={given.tp_size} disagree. Leave the plugin away; "
            "the configuration replaces it."
        )
    return given
