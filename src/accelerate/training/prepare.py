"""How objects are prepared: one pass of detection by identity, then what is new is wrapped and registered."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accelerate.base._warn import warn_user
from accelerate.config.enums import DynamoBackend
from accelerate.config.strategies import traits_of
from accelerate.data.loader import PreparedLoader, SkipDataLoader
from accelerate.devices.memory import release_memory
from accelerate.modules.optimizer_remap import remap_optimizer, remapping
from accelerate.modules.unwrap import ORIGINAL, is_compiled_module, loaded_wrappers, model_has_dtensor
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.precision import amp, scaling
from accelerate.precision.amp import precision
from accelerate.runtime import storage, torch_private
from accelerate.scheduler import AcceleratedScheduler
from accelerate.strategies import mesh as meshes
from accelerate.training import gradients, prepared
from accelerate.training.prepared import Entry
from accelerate.training.run import TrainingRun

T = TypeVar("T")
_PLAIN = (str, bytes, int, float, complex)
_CLASSES: dict[str, type | tuple[type, ...]] = {
    "loader": DataLoader,
    "model": nn.Module,
    "optimizer": torch.optim.Optimizer,
    "scheduler": (LRScheduler, AcceleratedScheduler),
}
_LISTS = {"model": "_models", "optimizer": "_optimizers", "scheduler": "_schedulers", "loader": "_dataloaders"}
_WOULD_HAVE = {
    "model": (
        "Wrapping it again would have nested one distributed wrapper in another (`module.module.` keys), doubled the cost "
        "of every checkpoint, and written checkpoints that do not load into the model prepared once"
    ),
    "optimizer": "Wrapping it again would have stepped and unscaled the same parameters twice, and saved their state twice",
    "loader": "Wrapping it again would have sharded the data a second time, so that each rank lost part of it",
    "scheduler": "Wrapping it again would have advanced the schedule several times for each step, and saved its state twice",
}


def kind_of(obj: Any) -> str | None:
    """Return which kind of preparable object this is, or None for something that passes through untouched.

    A class that derives from none of torch's, such as a placeholder for an engine's optimizer, names its kind in ``_prepared_as``.
    """
    for kind, classes in _CLASSES.items():
        if isinstance(obj, classes):
            return kind
    return getattr(type(obj), "_prepared_as", None)


def prepare(accelerator: TrainingRun, objects: Sequence[Any], device_placement: list[bool] | None) -> Any:
    """Check the arguments, let the strategy prepare them, and return them in their order."""
    _check_arguments(objects, device_placement)
    registry = accelerator.prepared
    _admit(accelerator, objects, evaluation=False)
    registry.admitted = set(map(id, objects))
    try:
        strategy = accelerator._strategy
        if strategy.prepares_together:
            if device_placement is not None:
                raise ValueError(
                    f"device_placement={device_placement} has no effect with {accelerator.distributed_type}, whose engine places the model. "
                    "Remove it."
                )
            result = getattr(accelerator, strategy.prepares_together)(*objects)
        else:
            result = in_order(accelerator, objects, device_placement)
            prepared.check_optimizers(result)
    finally:
        registry.admitted = set()
    return result if len(result) > 1 else result[0]


def _check_arguments(objects: Sequence[Any], device_placement: list[bool] | None) -> None:
    if not objects:
        raise ValueError("prepare() got no objects. Pass the model, optimizer, data loaders and schedulers.")
    for position, obj in enumerate(objects):
        if isinstance(obj, _PLAIN):
            raise TypeError(
                f"prepare() got {obj!r} ({type(obj).__name__}) as argument {position}, which cannot be prepared. "
                "Pass models, optimizers, data loaders and schedulers."
            )
        for item in obj.values() if isinstance(obj, dict) else obj if isinstance(obj, (list, tuple)) else ():
            if kind_of(item) is not None:
                warn_user(
                    f"prepare() got a {type(obj).__name__} as argument {position}, which it does not look into: the "
                    f"{type(item).__name__} in it is not prepared. Unpack it: `accelerator.prepare(*objects)`."
                )
                break
    if device_placement is not None and len(device_placement) != len(objects):
        raise ValueError(
            f"`device_placement` should be a list with {len(objects)} elements (the number of objects passed), got "
            f"{device_placement!r}."
        )


def _admit(accelerator: TrainingRun, objects: Sequence[Any], evaluation: bool) -> None:
    """Let extensions follow the layout of new models, and let them and the strategy refuse what they cannot prepare."""
    extensions, registry = accelerator.extensions, accelerator.prepared
    models = []
    for obj in objects:
        if isinstance(obj, nn.Module):
            entry = registry.find(obj)
            if entry is None or (entry.evaluation and not evaluation):
                models.append(obj)
    if extensions.attach(accelerator, models):
        vars(accelerator).pop("_strategy", None)  # resolved again when it is read
    if models:
        for hook in extensions.arrives:
            hook(models, evaluation)
        if extensions.attach(accelerator):  # models that arrive sharded choose the strategy
            vars(accelerator).pop("_strategy", None)
    if not evaluation:
        accelerator._strategy.check(accelerator, objects)


def in_order(
    accelerator: TrainingRun, objects: Sequence[Any], device_placement: Sequence[bool | None] | None = None
) -> tuple[Any, ...]:
    """Prepare models, then loaders and optimizers, which follow parameters, then schedulers, which seek optimizers."""
    placements = device_placement if device_placement is not None else [None] * len(objects)
    results = list(objects)
    for is_models_pass in (True, False):
        for position, item in enumerate(objects):
            if isinstance(item, nn.Module) is is_models_pass:
                results[position] = accelerator._prepare_one(
                    item, first_pass=True, device_placement=placements[position]
                )
    for position, item in enumerate(results):
        results[position] = accelerator._prepare_one(item, device_placement=placements[position])
    return tuple(results)


@contextlib.contextmanager
def own_states(accelerator: TrainingRun) -> Iterator[None]:
    """Let objects built inside bind the Accelerator's own states, also after a reset of the shared ones."""
    state, gradient = accelerator.state.__dict__, accelerator.gradient_state.__dict__
    if storage.accelerator.current is state and storage.gradient.current is gradient and storage.process.current:
        yield
        return
    with storage.process.kept(), storage.accelerator.kept(), storage.gradient.kept():
        storage.process.bind(state)
        storage.accelerator.bind(state)
        storage.gradient.bind(gradient)
        yield


def find_prepared(accelerator: TrainingRun, obj: Any, evaluation: bool = False) -> Any | None:
    """Return the registered object of what was prepared before, also by another Accelerator; None to prepare it."""
    entry = accelerator.prepared.find(obj)
    if entry is None:
        return _find_elsewhere(accelerator, obj, evaluation)
    outer = entry.outer()
    if entry.kind == "model" and not evaluation:
        # It would train unsynchronised: it was for evaluation, or all of it was frozen then.
        if entry.evaluation or (entry.frozen and accelerator._strategy.needs_wrapper(accelerator, outer)):
            return None
    what = f"This {entry.kind} ({type(obj).__name__}) was already prepared by this Accelerator"
    if obj is not outer:
        what = (
            f"This {entry.kind} ({type(obj).__name__}) is the inner object of one that this Accelerator already prepared "
            f"({type(outer).__name__}); the prepared one is returned"
        )
    warn_user(
        f"{what}. {_WOULD_HAVE[entry.kind]}. Call `prepare` once and use what it returned; to prepare it again, call "
        "`accelerator.free_memory()` first."
    )
    return outer


def _find_elsewhere(accelerator: TrainingRun, obj: Any, evaluation: bool) -> Any | None:
    """Return what another live Accelerator prepared, registered here too; warn of a model with other settings."""
    entry = prepared.find_elsewhere(accelerator.prepared, obj)
    if entry is None:
        return None
    outer, *inners = entry.objects()
    if entry.kind == "model":
        settings = settings_of(accelerator)
        changes = [
            f"{name}: {entry.settings[name]!r} then, {now!r} now"
            for name, now in settings.items()
            if entry.settings[name] != now
        ]
        # A model prepared where nothing is synchronised must not be taken for one that is.
        distributed = traits_of(accelerator.distributed_type).distributed
        if (entry.evaluation and not evaluation) or (
            distributed and entry.settings["distributed_type"] != settings["distributed_type"]
        ):
            return None
        if changes:
            warn_user(
                f"Another live Accelerator prepared this model ({type(outer).__name__}) with other settings ({', '.join(changes)}). "
                "It is used as it was prepared; call `free_memory()` on the other Accelerator and drop its model first "
                "if these settings shall hold."
            )
    elif obj is not outer:
        return None  # an inner optimizer or loader may serve another Accelerator in its own wrapper
    _enlist(
        accelerator,
        accelerator.prepared.record(entry.kind, outer, inners, evaluation=entry.evaluation, settings=entry.settings),
    )
    return outer


def _record(accelerator: TrainingRun, kind: str, outer: Any, inners: Iterable[Any], **details: Any) -> Entry:
    settings = settings_of(accelerator) if kind == "model" else {}
    return accelerator.prepared.record(kind, outer, inners, settings=settings, **details)


def _enlist(accelerator: TrainingRun, entry: Entry) -> None:
    """Add a prepared object to the Accelerator's list of its kind, in the position of what it was before, if it is there."""
    listed, objects = getattr(accelerator, _LISTS[entry.kind]), list(entry.objects())
    for position, item in enumerate(listed):
        if any(item is obj for obj in objects):
            listed[position] = objects[0]
            return
    listed.append(objects[0])


def register(accelerator: TrainingRun, kind: str, outer: T, *inners: Any, **details: Any) -> T:
    """Remember what was prepared, in the registry and in the Accelerator's list of its kind, and return it."""
    outer._is_accelerate_prepared = True  # type: ignore[attr-defined]  # new
    _enlist(accelerator, _record(accelerator, kind, outer, inners, **details))
    if kind in ("optimizer", "loader"):
        outer._extensions = accelerator.extensions  # type: ignore[attr-defined]
    for hook in accelerator.extensions.registered:
        hook(kind, outer, details.get("evaluation", False))
    return outer


def settings_of(accelerator: TrainingRun) -> dict[str, str]:
    """Return the settings under which this Accelerator prepares; two that differ here train a model differently."""
    handler = accelerator.ddp_handler
    return {
        "distributed_type": str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type)),
        "mixed_precision": str(accelerator.mixed_precision),
        "device": str(accelerator.device),
        "ddp": repr(handler.to_kwargs()) if handler is not None else "",
    }


def chain(model: nn.Module) -> list[nn.Module]:
    """Return the modules inside a model's wrappers and compiled shells, outermost first."""
    wrappers = loaded_wrappers()
    inside: list[nn.Module] = []
    while (compiled := is_compiled_module(model)) or isinstance(model, wrappers):
        model = getattr(model, "_orig_mod" if compiled else "module")
        inside.append(model)
    return inside


def prepare_model(
    accelerator: TrainingRun, model: nn.Module, device_placement: bool | None, evaluation: bool
) -> nn.Module:
    """Prepare a model in steps: find, admit, check, convert, place, wrap, compile and register it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"prepare_model() got model={model!r} ({type(model).__name__}); pass a torch.nn.Module.")
    registered: nn.Module | None = find_prepared(accelerator, model, evaluation)
    if registered is not None:
        return registered
    if id(model) not in accelerator.prepared.admitted:  # a direct call, without `prepare`
        _admit(accelerator, [model], evaluation)
    model = _untrained(accelerator, model)
    _check(accelerator, model, evaluation)
    model = _convert(accelerator, model, evaluation)
    originals = [model, *chain(model)]
    model = _place(accelerator, model, originals[-1], device_placement, evaluation)
    wrapped = model if evaluation else _wrap(accelerator, model)
    wrapped = compile_model(accelerator, wrapped)
    _move_optimizers(accelerator)
    inners = originals if wrapped is model else [*chain(wrapped), *originals]
    frozen = not any(parameter.requires_grad for parameter in model.parameters())
    return register(accelerator, "model", wrapped, *inners, evaluation=evaluation, frozen=frozen)


def _untrained(accelerator: TrainingRun, model: nn.Module) -> nn.Module:
    """Return the module of a model that was prepared for evaluation, or frozen, and is to train; a new model itself."""
    entry = accelerator.prepared.find(model)
    if entry is None:
        return model
    outer = entry.outer()
    bare: nn.Module = getattr(outer, ORIGINAL, outer)  # not compiled
    settings = [setting for extension in accelerator.extensions.attached for setting in extension.serves]
    if settings and not model_has_dtensor(bare):
        raise ValueError(
            f"{type(bare).__name__} was prepared with evaluation_mode=True, and {', '.join(settings)} changes models that are new "
            "alone. Call free_memory(), and prepare it to train at once."
        )
    return bare


def _check(accelerator: TrainingRun, model: nn.Module, evaluation: bool) -> None:
    """Refuse a layout of the mesh that this run cannot train."""
    layout = accelerator.parallelism_config
    if layout is None or traits_of(accelerator.distributed_type).own_groups:
        return
    if not evaluation or model_has_dtensor(model):
        sizes = {f"{axis}_size": getattr(layout, f"{axis}_size") for axis in ("tp", "ep", "cp", "sp", "pp")}
        accelerator.extensions.require(name for name, size in sizes.items() if size > 1)
        meshes.check_layout(accelerator)


def _convert(accelerator: TrainingRun, model: nn.Module, evaluation: bool) -> nn.Module:
    """Build the device mesh, and let extensions change the layers of a model."""
    if accelerator.parallelism_config is not None and not evaluation:
        accelerator._prepare_device_mesh()
    for hook in accelerator.extensions.convert:
        model = hook(model, evaluation)
    return model


def _place(
    accelerator: TrainingRun, model: nn.Module, inner: nn.Module, device_placement: bool | None, evaluation: bool
) -> nn.Module:
    """Let a model compute in mixed precision, and move it to the device; refuse weights that cannot train there."""
    amp.remember(inner)
    if not evaluation:
        amp.check_weights(model, accelerator.scaler)
    mapped = accelerator.verify_device_map(model)
    if device_placement is None:
        # An engine moves what it wraps, and does not wrap a model for evaluation.
        moved = not evaluation and traits_of(accelerator.distributed_type).custom_device_placement
        device_placement = accelerator.device_placement and not moved
    numerics = precision(accelerator.mixed_precision if accelerator.native_amp else "no")
    amp.wrap_forward(inner, accelerator.device.type, numerics, accelerator.autocast_handler)
    if device_placement and not mapped:
        # torch_xla puts new parameters in a model that it moves.
        with remapping(accelerator, model, same_elements=True):
            model = model.to(accelerator.device)
    return model


def _wrap(accelerator: TrainingRun, model: nn.Module) -> nn.Module:
    """Let the strategy wrap a model that it has checked."""
    wrapped = accelerator._strategy.wrap_model(accelerator, model)
    if accelerator.scaler is not None and traits_of(accelerator.distributed_type).sharded:
        scaling.register_sharded(accelerator.scaler, wrapped)
    return wrapped


def _move_optimizers(accelerator: TrainingRun) -> None:
    """Let optimizers that were prepared before a model follow its parameters, also those of other Accelerators."""
    registry = accelerator.prepared
    for optimizer in prepared.optimizers():
        registry.moved.follow(optimizer)
    if accelerator._optimizers:
        histories = prepared.histories(registry)
        for optimizer in accelerator._optimizers:
            remap_optimizer(optimizer.optimizer, histories)


def compile_model(accelerator: TrainingRun, model: nn.Module) -> nn.Module:
    """Compile a model, whole or by its repeated blocks, when the Accelerator's plugin asks for it."""
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend is DynamoBackend.NO or is_compiled_module(model):
        return model
    options = plugin.to_kwargs()
    if options.pop("use_regional_compilation", plugin.use_regional_compilation):
        # What shards finds its state by the modules themselves, so there they are compiled in place.
        return compile_by_regions(accelerator, model, traits_of(accelerator.distributed_type).sharded, options)
    return torch.compile(model, **options)  # type: ignore[return-value]  # a module


def compile_by_regions(
    accelerator: TrainingRun, model: nn.Module, in_place: bool, options: dict[str, Any]
) -> nn.Module:
    """Let the method of an extension compile the repeated blocks of a model; ValueError if it is not installed."""
    compile_regions = getattr(accelerator, "_compile_regions", None)
    if compile_regions is None:
        raise ValueError(
            "use_regional_compilation=True needs an extension that is not in this installation of accelerate. Set it to False to "
            "compile the full model, or install the complete package."
        )
    compiled: nn.Module = compile_regions(model, in_place, options)
    return compiled


def prepare_optimizer(
    accelerator: TrainingRun, optimizer: torch.optim.Optimizer, device_placement: bool | None
) -> AcceleratedOptimizer:
    """Wrap a new optimizer and register it."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"prepare_optimizer() got optimizer={optimizer!r} ({type(optimizer).__name__}); pass a torch.optim.Optimizer."
        )
    known: AcceleratedOptimizer | None = find_prepared(accelerator, optimizer)
    if known is not None:
        return known
    if device_placement is None:
        device_placement = accelerator.device_placement
    if isinstance(optimizer, AcceleratedOptimizer):  # its Accelerator release it; nothing is wrapped twice
        optimizer = optimizer.optimizer
    for hook in accelerator.extensions.convert_optimizer:
        hook(optimizer)
    with own_states(accelerator):
        remap_optimizer(optimizer, prepared.histories(accelerator.prepared))
        wrapped = AcceleratedOptimizer(optimizer, device_placement=device_placement, scaler=accelerator.scaler)
    return register(accelerator, "optimizer", wrapped, optimizer)


def prepare_scheduler(accelerator: TrainingRun, scheduler: Any) -> AcceleratedScheduler:
    """Wrap a new scheduler with the prepared optimizer it drives, and register it."""
    known: AcceleratedScheduler | None = find_prepared(accelerator, scheduler)
    if known is not None:
        return known
    if isinstance(scheduler, AcceleratedScheduler):
        scheduler = scheduler.scheduler
    driven, optimizers = getattr(scheduler, "optimizer", None), accelerator._optimizers
    own = [item for item in optimizers if driven is item or driven is getattr(item, "optimizer", None)]
    with own_states(accelerator):
        wrapped = AcceleratedScheduler(
            scheduler,
            own[0] if own else optimizers,
            step_with_optimizer=accelerator.step_scheduler_with_optimizer,
            split_batches=accelerator.split_batches,
        )
    return register(accelerator, "scheduler", wrapped, scheduler)


def prepare_data_loader(
    accelerator: TrainingRun, data_loader: Any, device_placement: bool | None, build: Any, slice_fn: Any
) -> Any:
    """Build a new prepared loader with the Accelerator's settings, and register it.

    Args:
        build: The ``prepare_data_loader`` function in force, looked up by the facade because users replace it there.
        slice_fn: Cuts a rank's part out of a dispatched batch, or None.
    """
    if (known := find_prepared(accelerator, data_loader)) is not None:
        return known
    if device_placement is None:
        device_placement = accelerator.device_placement and traits_of(accelerator.distributed_type).places_batches
    if isinstance(data_loader, PreparedLoader) and type(data_loader) is not SkipDataLoader:
        # Its Accelerator release it; nothing is sharded twice.
        return register(accelerator, "loader", data_loader)
    config = accelerator.dataloader_config
    meshes.build(accelerator)  # in a direct call, it may not be there yet
    # Passed only when it says something, because users put functions of upstream's signature in the place of `build`.
    usual = {"shard_iterable_dataset": True, "already_sharded": False}
    divided = {name: getattr(config, name, value) for name, value in usual.items()}
    divided = {name: value for name, value in divided.items() if value is not usual[name]}
    with own_states(accelerator):
        wrapped = build(
            accelerator._strategy.batches(accelerator, data_loader),
            accelerator.device,
            num_processes=accelerator.num_processes,
            process_index=accelerator.process_index,
            split_batches=accelerator.split_batches,
            put_on_device=device_placement,
            rng_types=list(accelerator.rng_types) if accelerator.rng_types is not None else None,
            dispatch_batches=accelerator.dispatch_batches,
            even_batches=accelerator.even_batches,
            slice_fn_for_dispatch=slice_fn,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=accelerator.non_blocking,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
            torch_device_mesh=accelerator.torch_device_mesh,
            **divided,
        )
    if not getattr(config, "continue_after_load", True) and isinstance(wrapped, PreparedLoader):
        wrapped.continue_after_load = False
    return register(accelerator, "loader", wrapped, data_loader)


def ensure_registered(accelerator: TrainingRun, kind: str, result: Any, given: Any) -> Any:
    """Register what a replaced ``prepare_*`` method returned, so that its second preparation is detected as well."""
    entry = accelerator.prepared.find(result)
    if entry is None:
        _record(accelerator, kind, result, [given])
    elif accelerator.prepared.find(given) is None:  # the replacement prepared another object in place of this one
        accelerator.prepared.include(entry, given)
    return result


def restore_registry(accelerator: TrainingRun) -> None:
    """Register what an unpickled Accelerator's own lists hold."""
    for kind, name in _LISTS.items():
        for item in getattr(accelerator, name):
            inside = chain(item) if kind == "model" else [] if kind == "loader" else [getattr(item, kind)]
            _record(accelerator, kind, item, inside)


def release(accelerator: TrainingRun, objects: tuple[Any, ...]) -> list[Any]:
    """Release everything prepared, so that the next ``prepare`` is a first one, and the objects that were given."""
    accelerator._strategy.release(accelerator)
    for released in accelerator.extensions.released:
        released()
    accelerator.prepared.clear()
    # New lists, because a copy of the Accelerator may hold the former ones.
    for name in _LISTS.values():
        setattr(accelerator, name, [])
    gradients.reset(accelerator)
    accelerator.step = 0
    accelerator.has_lomo_optimizer = False
    accelerator.deepspeed_engine_wrapped = None
    accelerator.flag_tensor = None
    if accelerator.scaler is not None:
        scaling.forget(accelerator.scaler)
    torch_private.forget_named_models()
    return release_memory(*objects)
