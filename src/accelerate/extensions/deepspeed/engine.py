"""The strategy: a model, its optimizer and its scheduler become one engine, whose configuration is filled in from them."""

import contextlib
import copy
import importlib
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.base.imports import is_transformers_available
from accelerate.base.nested import recursively_apply
from accelerate.checkpoint.state import run_on_all_ranks
from accelerate.config.handlers import GradScalerKwargs
from accelerate.extensions.deepspeed import together, ulysses
from accelerate.extensions.deepspeed.plugin import DeepSpeedPlugin
from accelerate.extensions.deepspeed.wrappers import (
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    DummyOptim,
    DummyScheduler,
    is_engine,
    map_pytorch_optim_to_deepspeed,
)
from accelerate.precision import amp
from accelerate.runtime import torch_private
from accelerate.runtime.run import Run
from accelerate.strategies.base import Strategy
from accelerate.training.prepare import compile_by_regions

logger = logging.getLogger(__name__)

_MICRO, _TRAIN, _STEPS = "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"
# The width of the model decides these: where they are in the configuration, and the value for a width.
_BY_WIDTH: dict[str, Callable[[int], int]] = {
    "zero_optimization.reduce_bucket_size": lambda width: width * width,
    "zero_optimization.stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
    "zero_optimization.stage3_param_persistence_threshold": lambda width: 10 * width,
}


def check(plugin: DeepSpeedPlugin, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Refuse objects that the engine cannot train: two optimizers, an optimizer of another model, a missing disk.

    Raises:
        ValueError: they contradict the configuration; the message names the key.
    """
    import deepspeed

    config, stage = plugin.deepspeed_config, plugin.zero_stage
    if plugin.enable_msamp:
        raise NotImplementedError(
            "enable_msamp=True: MS-AMP is not supported. Remove it and use mixed_precision='bf16'."
        )
    if plugin.get_value("fp16.enabled") is True and not deepspeed.get_accelerator().is_fp16_supported():
        raise ValueError(
            "mixed_precision='fp16' (fp16.enabled in the DeepSpeed configuration): DeepSpeed has no float16 on this processor. Take 'bf16'."
        )
    if hasattr(optimizer, "fused_backward"):
        raise NotImplementedError(
            f"{type(optimizer).__name__} updates weights in its own backward pass, and the engine in its step. Pass a torch optimizer to prepare."
        )
    # A scheduler that is made by a function stands for none of the configuration.
    has_callable = getattr(scheduler, "lr_scheduler_callable", None) is not None
    for name, value, dummy in (("optimizer", optimizer, DummyOptim), ("scheduler", scheduler, DummyScheduler)):
        stands = isinstance(value, dummy)
        if stands and name not in config and not (has_callable and value is scheduler):
            raise ValueError(
                f"{dummy.__name__} stands for the {name} of the DeepSpeed configuration, which has no `{name}`. Add it there, or pass "
                f"a torch {name} to prepare" + (", or `lr_scheduler_callable`." if value is scheduler else ".")
            )
        if value is not None and not stands and name in config:
            raise ValueError(
                f"The DeepSpeed configuration has `{name}`, and prepare got a {type(value).__name__}. Pass "
                f"accelerate.utils.{dummy.__name__} to prepare, or take `{name}` out of the configuration."
            )
    if isinstance(optimizer, DummyOptim) and not isinstance(scheduler, DummyScheduler | None):
        raise ValueError(
            f"prepare got DummyOptim and a {type(scheduler).__name__}: a torch scheduler needs the torch optimizer that it was made for. "
            "Pass DummyScheduler as well, or a torch optimizer."
        )
    optimizer_ids = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
    if optimizer_ids and optimizer_ids.isdisjoint(map(id, model.parameters())):
        raise ValueError(
            f"The optimizer ({type(optimizer).__name__}) holds no parameter of {type(model).__name__}: its steps would change nothing. Make "
            "it from `model.parameters()` of the model as it is now."
        )
    _check_disk(plugin)
    if optimizer is None and stage in (1, 2):
        raise ValueError(
            f"prepare got a model without an optimizer, and ZeRO stage {stage} shards the optimizer's state. Pass the optimizer with the "
            "model, or set zero_stage to 3 (or 0) for inference."
        )


def _check_disk(plugin: DeepSpeedPlugin) -> None:
    """Refuse nvme where DeepSpeed would keep the host's memory instead, has no folder, or cannot build what reads and writes."""
    for key in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
        if plugin.get_value(f"{key}.device") != "nvme":
            continue
        if plugin.zero_stage != 3:
            raise ValueError(f"{key}.device is 'nvme' at ZeRO stage {plugin.zero_stage}: take stage 3, or 'cpu'.")
        if plugin.get_value(f"{key}.nvme_path") in (None, "none"):
            raise ValueError(f"{key}.device is 'nvme', and {key}.nvme_path names no folder. Set it.")
        import deepspeed

        if not deepspeed.ops.__compatible_ops__["async_io"]:
            raise RuntimeError(
                f"{key}.device is 'nvme', for which DeepSpeed builds async_io, and this machine has no libaio. Install it with its headers "
                "(libaio-dev, libaio-devel), or set the device to 'cpu'."
            )


def batch_size(loaders: Sequence[Any], smallest: bool, processes: int) -> int | None:
    """Return the batch size of a process in the loaders that have one; of several the smallest or the largest."""
    # A loader whose batches the main process reads and splits has the size of full ones.
    declared = [(getattr(loader, "batch_size", None), getattr(loader, "split_batches", False)) for loader in loaders]
    sizes = [size // processes if cut else size for size, cut in declared if isinstance(size, int)]
    return (min if smallest else max)(sizes) if sizes else None


def resolve(
    accelerator: Run, plugin: DeepSpeedPlugin, model: nn.Module, optimizer: Any, scheduler: Any, loaders: Sequence[Any]
) -> dict[str, Any]:
    """Fill in every "auto" of the plugin's configuration, and return the engine's configuration.

    Raises:
        ValueError: nothing determines a value, or values contradict each other.
    """
    config = plugin.deepspeed_config
    steps = accelerator.gradient_accumulation_steps
    if config[_STEPS] == "auto":
        config[_STEPS] = steps
    elif config[_STEPS] != steps:
        if steps != 1 and accelerator.process_index == 0:  # 1 is the default
            logger.warning(
                f"gradient_accumulation_steps is {config[_STEPS]} in the DeepSpeed configuration and {steps} in the Accelerator: "
                "the configuration holds."
            )
        accelerator.gradient_accumulation_steps = config[_STEPS]
    micro = config.get(_MICRO, "auto")
    if micro == "auto":
        micro = batch_size(loaders, plugin.is_train_batch_min, accelerator.num_processes)
    if micro is None:
        raise ValueError(
            f"{_MICRO} is 'auto' in the DeepSpeed configuration, and no data loader has a batch size. Pass a loader with a batch size to "
            f"prepare, or set AcceleratorState().deepspeed_plugin.deepspeed_config[{_MICRO!r}]."
        )
    layout = accelerator.parallelism_config
    sharing: int = 1 if layout is None else layout.sp_size  # type: ignore[assignment]  # no size is None
    replicas = accelerator.num_processes // sharing
    settings: dict[str, Any] = {
        _MICRO: micro,
        _TRAIN: micro * config[_STEPS] * replicas,
        "gradient_clipping": 1.0,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
        **_widths(model, plugin),
        **_optimizer(optimizer),
        **_schedule(scheduler, 1 if accelerator.split_batches else replicas),
    }
    if optimizer is not None and not isinstance(optimizer, DummyOptim):
        config.setdefault("zero_allow_untested_optimizer", True)
        # The optimizer that was passed trains. Otherwise DeepSpeed would refuse it together with an offload.
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    if layout is not None and layout._sp_by_deepspeed:
        config[_TRAIN] = settings[_TRAIN]  # the Trainer has counted ranks that share sequences one by one
    plugin.deepspeed_config_process(must_match=False, **settings)
    return {"steps_per_print": math.inf, **copy.deepcopy(config)}


def _widths(model: nn.Module, plugin: DeepSpeedPlugin) -> dict[str, int]:
    """Return sizes of buckets for the model's width, where the configuration asks for them."""
    asked = [key for key in _BY_WIDTH if plugin.is_auto(key)]
    if not asked:
        return {}
    model_config = getattr(model, "config", None)
    for config in (model_config, getattr(model_config, "text_config", None)):
        sizes = [getattr(config, "hidden_size", None), *(getattr(config, "hidden_sizes", None) or ())]
        if widths := [size for size in sizes if isinstance(size, int)]:
            return {key: _BY_WIDTH[key](max(widths)) for key in asked}
    raise ValueError(
        f"{', '.join(asked)}: 'auto' in the DeepSpeed configuration, and {type(model).__name__} has no config.hidden_size to compute it "
        "from. Set it."
    )


def _optimizer(optimizer: Any) -> dict[str, Any]:
    if not isinstance(optimizer, DummyOptim):
        return {}
    return {"optimizer.params.lr": optimizer.lr, "optimizer.params.weight_decay": optimizer.weight_decay}


def _schedule(scheduler: Any, replicas: int) -> dict[str, Any]:
    if not isinstance(scheduler, DummyScheduler) or scheduler.lr_scheduler_callable is not None:
        return {}
    optimizer = scheduler.optimizer
    rate = optimizer.lr if hasattr(optimizer, "lr") else optimizer.defaults["lr"]
    settings = {
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": rate,
        # DeepSpeed refuses a warm-up of no steps since 0.19.6.
        "scheduler.params.warmup_num_steps": scheduler.warmup_num_steps or 1,
    }
    if scheduler.total_num_steps is not None:
        # It counts batches of one process, as other schedulers do; the engine steps once for those of all. A warm-up counts steps.
        settings["scheduler.params.total_num_steps"] = math.ceil(scheduler.total_num_steps / replicas)
    return settings


# The strategy ---------------------------------------------------------------------------------------------------------


class DeepSpeed(Strategy):
    """ZeRO stages 0 to 3, with offload and precision as the configuration says.

    Source: https://arxiv.org/abs/1910.02054
    """

    prepares_together = "_prepare_deepspeed"

    # -- prepare -------------------------------------------------------------------------------------------------

    def needs_wrapper(self, accelerator: Run, model: nn.Module) -> bool:
        """Always: the engine runs the model, also a frozen one."""
        return True

    def wrap_model(self, accelerator: Run, model: nn.Module) -> nn.Module:
        """Refuse to train a model without its optimizer: it would be no engine, and each rank would learn separately.

        Raises:
            ValueError: it has parameters to train.
        """
        if any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                f"DeepSpeed makes one engine of a model and its optimizer, and got only {type(model).__name__}. Pass both to `prepare` in one "
                "call; for inference, prepare_model(model, evaluation_mode=True)."
            )
        return model

    def engine(
        self, accelerator: Run, model: nn.Module, optimizer: Any, scheduler: Any, loaders: Sequence[Any]
    ) -> tuple[Any, Any, Any]:
        """Build the engine of a model; return it with its optimizer and its scheduler, each None where there is none.

        Collective: call on every rank.

        Raises:
            ValueError: the objects and the configuration contradict each other.
        """
        import deepspeed

        plugin = accelerator.state.deepspeed_plugin
        run_on_all_ranks(lambda: check(plugin, model, optimizer, scheduler))
        plugin.set_moe_leaf_modules(model)
        if plugin.zero_stage == 3 and is_transformers_available():
            integrations: Any = importlib.import_module("transformers.integrations")
            # `generate` lets ranks that have ended continue with the others if it detects ZeRO 3, also for models built unsharded.
            if not integrations.is_deepspeed_zero3_enabled():
                plugin.set_deepspeed_weakref()
        config = resolve(accelerator, plugin, model, optimizer, scheduler, loaders)
        options: dict[str, Any] = {"model": model, "config_params": config}
        if isinstance(optimizer, DummyOptim):
            options["model_parameters"] = optimizer.params
        elif optimizer is not None:
            options["optimizer"] = _on_its_device(optimizer, plugin, config)
        if isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is not None:
            options["lr_scheduler"] = scheduler.lr_scheduler_callable
        elif together.is_schedule(scheduler):
            options["lr_scheduler"] = scheduler
        layout = accelerator.parallelism_config
        shares = layout is not None and layout._sp_by_deepspeed
        if shares:
            options["mpu"] = ulysses.share(accelerator, model, config["train_micro_batch_size_per_gpu"])
        amp.remember(model)
        if torch_private.is_fake():
            compared: Any = importlib.import_module("deepspeed.runtime.zero.utils")
            compared.get_lst_from_rank0 = _numbers_of_rank0
            compared.assert_lst_len_same_as_other_ranks = lambda numbers: _numbers_of_rank0([len(numbers)])
        engine, own_optimizer, _, own_scheduler = deepspeed.initialize(**options)
        _keep_adagrad(engine)
        _undo_first_step(engine)
        if shares:
            ulysses.average(engine)
        if engine.bfloat16_enabled():
            # fp16 engines do it themselves.
            engine.register_forward_pre_hook(_cast_to_bf16, with_kwargs=True)
        _compile(accelerator, engine)
        if optimizer is None:
            return engine, None, None
        if scheduler is not None:
            stepped = isinstance(scheduler, DummyScheduler) or together.is_schedule(scheduler)
            scheduler = DeepSpeedSchedulerWrapper(own_scheduler, own_optimizer) if stepped else scheduler
        return engine, DeepSpeedOptimizerWrapper(own_optimizer), scheduler

    def make_scaler(self, accelerator: Run, handler: GradScalerKwargs | None) -> Any | None:
        """None: the engine scales losses."""
        return None

    def whole_parameters(self, accelerator: Run, model: nn.Module) -> contextlib.AbstractContextManager[nn.Module]:
        """Refuse stage 3, which frees parameters after each forward; at other stages all ranks have them.

        Collective: call on every rank.
        """
        if is_engine(model) and model.zero_optimization_stage() == 3:
            raise NotImplementedError(
                "whole_parameters at ZeRO stage 3: the engine frees each module's parameters after its forward. Call "
                "unwrap_model(model).generate(...) on all ranks without it, or take unsharded tensors from stream_weights."
            )
        return super().whole_parameters(accelerator, model)

    # -- step ----------------------------------------------------------------------------------------------------

    def backward(self, accelerator: Run, loss: torch.Tensor, model: Any = None, **kwargs: Any) -> None:
        """Run the engine's backward pass, and its step where the accumulation step ends.

        Collective: call on every rank.

        Args:
            accelerator: The Accelerator.
            loss: A scalar, not scaled.
            model: The model whose engine runs; by default the one that the loss was computed with.
            **kwargs: For the engine's ``backward``.
        """
        engines = accelerator.prepared.engines
        if model is not None:
            engines = [wrapper for wrapper in engines if model is wrapper.engine or model is wrapper.engine.module]
        elif len(engines) > 1:
            engines = reached(loss, engines)
        if len(engines) != 1:
            raise ValueError(
                f"The loss belongs to {len(engines)} of the prepared engines, so it does not say which one steps. Pass the prepared model: "
                "accelerator.backward(loss, model=model), and detach the inputs that the other engines must not learn from."
            )
        engines[0].backward(loss, sync_gradients=accelerator.sync_gradients, **kwargs)

    @contextlib.contextmanager
    def no_sync(self, accelerator: Run, model: nn.Module) -> Iterator[None]:
        """Let backward passes of a model's engine take no step. Its stage still exchanges gradients in each of them."""
        engines = [outer for outer in accelerator.prepared.engines if model in (outer.engine, outer.engine.module)]
        for outer in engines:
            outer._held += 1
        try:
            yield
        finally:
            for outer in engines:
                outer._held -= 1

    def clip_grad_norm(
        self, accelerator: Run, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Return the norm of the last step's gradients, which the engine has clipped as its configuration says.

        Collective: call on every rank.
        """
        engines = accelerator.prepared.engines
        if len(engines) > 1:
            clipped_ids = {id(item) for item in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)}
            engines = [
                outer for outer in engines if not clipped_ids.isdisjoint(map(id, outer.engine.module.parameters()))
            ]
        if not engines:
            raise ValueError("clip_grad_norm_ got parameters of no prepared model. Pass model.parameters().")
        limit = engines[0].engine.gradient_clipping()
        if (max_norm, norm_type) != (limit, 2) and "clipping" not in accelerator.prepared.logged:
            accelerator.prepared.logged.add("clipping")
            logger.warning(
                f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}) does not change how DeepSpeed clips: in the backward pass, "
                f"to gradient_clipping={limit} of its configuration. Set that."
            )
        return engines[0].get_global_grad_norm()  # type: ignore[no-any-return]  # a number, as DeepSpeed gives it

    # -- end -----------------------------------------------------------------------------------------------------

    def release(self, accelerator: Run) -> None:
        """Let the engines go of their hooks and buffers."""
        for engine in filter(is_engine, accelerator._models):
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
    cast: tuple[Any, Any] = recursively_apply(
        torch.Tensor.bfloat16,
        (args, kwargs),
        test_type=lambda value: isinstance(value, torch.Tensor) and value.is_floating_point(),
    )
    return cast


def reached(loss: torch.Tensor, engines: Sequence[Any]) -> list[Any]:
    """Return the engines with a parameter in the graph of a loss."""
    owners = {id(parameter): wrapper for wrapper in engines for parameter in wrapper.engine.module.parameters()}
    reached_engines: dict[int, Any] = {}
    pending, seen = [loss.grad_fn], set()
    while pending and len(reached_engines) < len(engines):
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        engine = owners.get(id(getattr(node, "variable", None)))
        if engine is not None:
            reached_engines[id(engine)] = engine
        pending += [following for following, _ in node.next_functions]
    return list(reached_engines.values())


def _numbers_of_rank0(numbers: list[int]) -> list[int]:
    """Exchange the values that ZeRO 3 compares, and return this rank's: DeepSpeed's own function needs a second rank."""
    import deepspeed

    deepspeed.comm.broadcast(torch.tensor(numbers), src=0)
    return numbers


def _keep_adagrad(engine: Any) -> None:
    """Put an Adagrad back in its place: ZeRO builds another one, of a single group, which no schedule reaches."""
    zero, user_optimizer = engine.optimizer, engine.basic_optimizer
    zero_optimizer = getattr(zero, "optimizer", None)
    if isinstance(zero_optimizer, torch.optim.Adagrad) and zero_optimizer is not user_optimizer:
        user_optimizer.state.clear()
        user_optimizer.state.update(zero_optimizer.state)
        zero.optimizer = user_optimizer


def _undo_first_step(engine: Any) -> None:
    """Undo the step with gradients of zero that 16-bit stage 0 begins with: Adam would count it, and decay weights."""
    wrapper = engine.optimizer
    if engine.zero_optimization_stage() or not hasattr(wrapper, "fp32_groups"):
        return
    if not isinstance(wrapper.optimizer, torch.optim.Adagrad):  # which makes its state when it is built
        wrapper.optimizer.state.clear()
    for whole, half in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True):
        for weight, source in zip(whole, half, strict=True):
            weight.data.copy_(source.data)


def _compile(accelerator: Any, engine: Any) -> None:
    """Compile the engine's module in place, fully or by its repeated blocks, if the Accelerator's plugin asks for it."""
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend.value == "NO":
        return
    options = plugin.to_kwargs()
    if options.pop("use_regional_compilation", plugin.use_regional_compilation):
        compile_by_regions(accelerator, engine.module, in_place=True, options=options)
    else:
        engine.compile(backend=options.pop("backend"), compile_kwargs=options)


def _on_its_device(optimizer: torch.optim.Optimizer, plugin: Any, config: dict[str, Any]) -> torch.optim.Optimizer:
    """Return the optimizer that trains: the one given, unless the configuration asks for DeepSpeed's own for offloaded states."""
    offload = plugin.get_value("zero_optimization.offload_optimizer.device", "none")
    if offload in (None, "none") or not config.get("zero_force_ds_cpu_optimizer"):
        return optimizer
    try:
        cpu_optimizer = run_on_all_ranks(lambda: map_pytorch_optim_to_deepspeed(optimizer))
    except Exception as error:
        raise RuntimeError(
            f"zero_force_ds_cpu_optimizer is true in the DeepSpeed configuration, and DeepSpeed could not build its {type(optimizer).__name__} "
            f"for states in host memory: {error} It needs ninja and a C++ compiler. Set it to false to train with the optimizer that you pass."
        ) from error
    if cpu_optimizer is optimizer:
        raise ValueError(
            f"zero_force_ds_cpu_optimizer is true in the DeepSpeed configuration, and DeepSpeed has no {type(optimizer).__name__} for states "
            "in host memory. Set it to false to train with the optimizer that you pass."
        )
    return cpu_optimizer
