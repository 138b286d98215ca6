"""The backend: a model, its optimizer and its scheduler become one engine, which steps inside the backward pass."""

import contextlib
import inspect
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.backends.base import Backend
from accelerate.backends.deepspeed import checkpoint, settings, ulysses
from accelerate.checkpoint.state import together
from accelerate.config.handlers import GradScalerKwargs
from accelerate.modules.unwrap import compile_regions_deepspeed
from accelerate.precision import master
from accelerate.runtime.run import Run
from accelerate.utils.deepspeed import (
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    DummyOptim,
    DummyScheduler,
    map_pytorch_optim_to_deepspeed,
)
from accelerate.utils.imports import is_transformers_available
from accelerate.utils.nested import recursively_apply

logger = logging.getLogger(__name__)


class DeepSpeed(Backend):
    """ZeRO stages 0 to 3, with offload and precision as the configuration says.

    Source: https://arxiv.org/abs/1910.02054
    """

    name = "deepspeed"
    saves_shards = True
    save_options = ("client_state", "save_latest", "exclude_frozen_parameters")

    # -- prepare -------------------------------------------------------------------------------------------------

    def needs_wrapper(self, accelerator: Run, model: nn.Module) -> bool:
        """Always: the engine runs the model, also a frozen one."""
        return True

    def wrap_model(self, accelerator: Run, model: nn.Module) -> nn.Module:
        """Refuse to train a model by itself: without its optimizer it would be no engine, and learn alone on each rank.

        Raises:
            ValueError: it has parameters to train.
        """
        if any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                f"DeepSpeed makes one engine of a model and its optimizer, and got {type(model).__name__} alone. Pass both to `prepare` in one "
                "call; for inference, prepare_model(model, evaluation_mode=True)."
            )
        return model

    def engine(
        self, accelerator: Run, model: nn.Module, optimizer: Any, scheduler: Any, loaders: Sequence[Any]
    ) -> tuple[Any, Any, Any]:
        """Build the engine of a model; return it with its optimizer and its scheduler, each None where there is none. All ranks.

        Raises:
            ValueError: the objects and the configuration contradict each other.
        """
        import deepspeed

        plugin = accelerator.state.deepspeed_plugin
        together(lambda: settings.check(plugin, model, optimizer, scheduler))
        plugin.set_moe_leaf_modules(model)
        if plugin.zero_stage == 3 and is_transformers_available():
            from transformers.integrations import is_deepspeed_zero3_enabled

            # `generate` lets ranks that have ended go on with the others where it knows, also of models that were built whole.
            if not is_deepspeed_zero3_enabled():
                plugin.set_deepspeed_weakref()
        config = settings.resolve(accelerator, plugin, model, optimizer, scheduler, loaders)
        options: dict[str, Any] = {"model": model, "config_params": config}
        if isinstance(optimizer, DummyOptim):
            options["model_parameters"] = optimizer.params
        elif optimizer is not None:
            options["optimizer"] = _on_its_device(optimizer, plugin, config)
        if isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is not None:
            options["lr_scheduler"] = scheduler.lr_scheduler_callable
        elif settings.is_schedule(scheduler):
            options["lr_scheduler"] = scheduler
        layout = accelerator.parallelism_config
        shares = layout is not None and layout._sp_by_deepspeed
        if shares:
            options["mpu"] = ulysses.share(accelerator, model, config["train_micro_batch_size_per_gpu"])
        master.remember(model)
        engine, own_optimizer, _, own_scheduler = deepspeed.initialize(**options)
        _keep_adagrad(engine)
        _undo_first_step(engine)
        if shares:
            ulysses.average(engine)
        if engine.bfloat16_enabled():
            # fp16 engines do it themselves.
            engine.register_forward_pre_hook(_cast_to_bf16, with_kwargs=True)
        _compile(engine, accelerator.state.dynamo_plugin)
        if optimizer is None:
            return engine, None, None
        if scheduler is not None:
            stepped = isinstance(scheduler, DummyScheduler) or settings.is_schedule(scheduler)
            scheduler = DeepSpeedSchedulerWrapper(own_scheduler, own_optimizer) if stepped else scheduler
        return engine, DeepSpeedOptimizerWrapper(own_optimizer), scheduler

    def make_scaler(self, accelerator: Run, handler: GradScalerKwargs | None) -> Any | None:
        """None: the engine scales losses."""
        return None

    def owns_state(self, model: nn.Module) -> bool:
        """Whether it is an engine, which saves and loads its optimizer with its weights."""
        return is_engine(model)

    # -- step ----------------------------------------------------------------------------------------------------

    def backward(self, accelerator: Run, loss: torch.Tensor, model: Any = None, **kwargs: Any) -> None:
        """Run the engine's backward pass, and its step where the window ends. All ranks.

        Args:
            accelerator: The Accelerator.
            loss: A scalar, not scaled.
            model: Whose engine it is; by default the one that the loss was computed with.
            **kwargs: For the engine's ``backward``.
        """
        engines = accelerator.prepared.engines
        if model is not None:
            engines = [known for known in engines if model is known.engine or model is known.engine.module]
        elif len(engines) > 1:
            engines = reached(loss, engines)
        if len(engines) != 1:
            raise ValueError(
                f"The loss belongs to {len(engines)} of the prepared engines, so it does not say which one steps. Pass the prepared model: "
                "accelerator.backward(loss, model=model), and detach what the other engines shall not learn from."
            )
        engines[0].backward(loss, sync_gradients=accelerator.sync_gradients, **kwargs)

    @contextlib.contextmanager
    def no_sync(self, accelerator: Run, model: nn.Module) -> Iterator[None]:
        """Let backward passes of a model's engine take no step. What its stage exchanges in each of them it exchanges all the same."""
        engines = [known for known in accelerator.prepared.engines if model in (known.engine, known.engine.module)]
        for known in engines:
            known._held += 1
        try:
            yield
        finally:
            for known in engines:
                known._held -= 1

    def clip_grad_norm(
        self, accelerator: Run, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Return the norm of the last step's gradients, which the engine has clipped as its configuration says. All ranks."""
        engines = accelerator.prepared.engines
        if len(engines) > 1:
            given = {id(item) for item in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)}
            engines = [one for one in engines if not given.isdisjoint(map(id, one.engine.module.parameters()))]
        if not engines:
            raise ValueError("clip_grad_norm_ got parameters of no prepared model. Pass model.parameters().")
        limit = engines[0].engine.gradient_clipping()
        if (max_norm, norm_type) != (limit, 2) and "clipping" not in accelerator.prepared.logged:
            accelerator.prepared.logged.add("clipping")
            logger.warning(
                f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}) does not change how DeepSpeed clips: in the backward pass, "
                f"to gradient_clipping={limit} of its configuration. Set that."
            )
        return engines[0].get_global_grad_norm()

    # -- checkpoint ----------------------------------------------------------------------------------------------

    def model_state(self, accelerator: Run, model: nn.Module, unwrap: bool) -> dict[str, Any] | None:
        """Return the whole state dict, an engine's under the names of its module; of stage 3 on rank 0 alone, None elsewhere. All ranks."""
        if not is_engine(model):
            return super().model_state(accelerator, model, unwrap)
        return checkpoint.whole(model, accelerator.state.deepspeed_plugin.deepspeed_config)

    def save_model(self, accelerator: Run, state: dict[str, Any], folder: Any, index: int, **options: Any) -> None:
        """Put what the engine has into a `SavePlan`, its optimizer included; the weights of a model without optimizer. All ranks."""
        model = accelerator.prepared.models[index]
        own = {name: options.pop(name) for name in self.save_options if name in options}
        if is_engine(model) and model.basic_optimizer is not None:
            checkpoint.save(model, folder, index, **own)
        else:  # which DeepSpeed does not save
            state = checkpoint.gathered(model) if is_engine(model) else self.model_state(accelerator, model, True)
            super().save_model(accelerator, state, folder, index, **options)

    def load_model(self, accelerator: Run, model: nn.Module, folder: str, index: int, **options: Any) -> Any:
        """Return what loads the engine's part, its optimizer included. All ranks."""
        if not is_engine(model):
            return super().load_model(accelerator, model, folder, index, **options)
        trained = [known.engine for known in accelerator.prepared.engines]
        return checkpoint.read(
            model,
            folder,
            index,
            optimizer=trained.index(model) if model in trained else 0,
            strict=options.get("strict", True),
            weights_only=(options.get("load_kwargs") or {}).get("weights_only", True),
        )

    def save_optimizer(self, accelerator: Run, optimizer: Any, folder: str, index: int, **options: Any) -> None:
        """Nothing: the engine's part has it."""

    def load_optimizer(self, accelerator: Run, optimizer: Any, folder: str, index: int, **options: Any) -> Any:
        """Nothing: the engine's part has it."""

    def checkpointed_schedulers(self, accelerator: Run) -> list[Any]:
        """Return the schedulers that no engine saves."""
        return [item for item in accelerator.prepared.schedulers if not isinstance(item, DeepSpeedSchedulerWrapper)]

    # -- end -----------------------------------------------------------------------------------------------------

    def release(self, accelerator: Run) -> None:
        """Let the engines go of their hooks and buffers."""
        for engine in filter(is_engine, accelerator.prepared.models):
            ulysses.release(engine.module)
            engine.destroy()
            _forget(engine.module)


def _forget(module: nn.Module) -> None:
    """Take a module out of what stage 3 keeps of all engines: a stack, and the cache of a method, within its decorator."""
    with contextlib.suppress(AttributeError, ImportError, KeyError, ValueError):  # a lower stage, or another version
        from deepspeed.runtime.zero import parameter_offload
        from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

        parameter_offload.FWD_MODULE_STACK.remove(module)
        method = Coordinator._PartitionedParameterCoordinator__params_to_release
        inspect.getclosurevars(method).nonlocals["func"].cache_clear()


def _cast_to_bf16(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Turn floating tensors among the inputs into bfloat16, as autocast would, because the weights are."""
    return recursively_apply(
        torch.Tensor.bfloat16,
        (args, kwargs),
        test_type=lambda value: isinstance(value, torch.Tensor) and value.is_floating_point(),
    )


def is_engine(model: Any) -> bool:
    """Whether this is a prepared engine, not a model that was prepared for evaluation alone."""
    return hasattr(model, "save_checkpoint") and hasattr(model, "zero_optimization_stage")


def reached(loss: torch.Tensor, engines: Sequence[Any]) -> list[Any]:
    """Return the engines with a parameter in the graph of a loss."""
    owners = {id(parameter): known for known in engines for parameter in known.engine.module.parameters()}
    found: dict[int, Any] = {}
    pending, seen = [loss.grad_fn], set()
    while pending and len(found) < len(engines):
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        engine = owners.get(id(getattr(node, "variable", None)))
        if engine is not None:
            found[id(engine)] = engine
        pending += [following for following, _ in node.next_functions]
    return list(found.values())


def _keep_adagrad(engine: Any) -> None:
    """Put an Adagrad back in its place: ZeRO builds another one, of a single group, which no schedule reaches."""
    zero, given = engine.optimizer, engine.basic_optimizer
    made = getattr(zero, "optimizer", None)
    if isinstance(made, torch.optim.Adagrad) and made is not given:
        given.state.clear()
        given.state.update(made.state)
        zero.optimizer = given


def _undo_first_step(engine: Any) -> None:
    """Undo the step with gradients of zero that 16-bit stage 0 begins with: Adam would count it, and decay weights."""
    own = engine.optimizer
    if engine.zero_optimization_stage() or not hasattr(own, "fp32_groups"):
        return
    if not isinstance(own.optimizer, torch.optim.Adagrad):  # which makes its state when it is built
        own.optimizer.state.clear()
    for whole, half in zip(own.fp32_groups, own.fp16_groups, strict=True):
        for weight, source in zip(whole, half, strict=True):
            weight.data.copy_(source.data)


def _compile(engine: Any, plugin: Any) -> None:
    """Compile the engine's module in place, whole or by its repeated blocks, when the Accelerator's plugin asks for it."""
    if plugin.backend.value == "NO":
        return
    options = plugin.to_kwargs()
    if options.pop("use_regional_compilation", plugin.use_regional_compilation):
        compile_regions_deepspeed(engine.module, **options)
    else:
        engine.compile(backend=options.pop("backend"), compile_kwargs=options)


def _on_its_device(optimizer: torch.optim.Optimizer, plugin: Any, config: dict[str, Any]) -> torch.optim.Optimizer:
    """Return the optimizer that trains: the one given, unless the configuration asks for DeepSpeed's own for offloaded states."""
    offload = plugin.get_value("zero_optimization.offload_optimizer.device", "none")
    if offload in (None, "none") or not config.get("zero_force_ds_cpu_optimizer"):
        return optimizer
    try:
        mapped = together(lambda: map_pytorch_optim_to_deepspeed(optimizer))
    except Exception as error:
        raise RuntimeError(
            f"zero_force_ds_cpu_optimizer is true in the DeepSpeed configuration, and DeepSpeed could not build its {type(optimizer).__name__} "
            f"for states in host memory: {error} It needs ninja and a C++ compiler. Set it to false to train with the optimizer that you pass."
        ) from error
    if mapped is optimizer:
        raise ValueError(
            f"zero_force_ds_cpu_optimizer is true in the DeepSpeed configuration, and DeepSpeed has no {type(optimizer).__name__} for states "
            "in host memory. Set it to false to train with the optimizer that you pass."
        )
    return mapped
