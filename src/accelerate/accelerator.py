"""The Accelerator: one object through which a plain PyTorch loop runs on one process or many.

This file is a facade. Each method is a guard and one call into ``accelerate.training`` or into the strategy that serves
the state; the one thing that is decided here is whether an object was prepared before (``_prepare_one``).

Libraries compile the source of its methods again, in a copy of this namespace or in their own. So no method uses a global
with the name of a method.
"""

import contextlib
import copy
import functools
import operator
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

import accelerate.runtime.exit  # noqa: F401 - its hook runs after those that programs register later
from accelerate import comm
from accelerate.base._lazy import front
from accelerate.comm import operations
from accelerate.comm.base import Communicator
from accelerate.config.enums import DistributedType, DynamoBackend, RNGType
from accelerate.config.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    TorchDynamoPlugin,
)
from accelerate.config.project import DataLoaderConfiguration, ProjectConfiguration
from accelerate.config.strategies import traits_of
from accelerate.data.build import prepare_data_loader, skip_first_batches  # noqa: F401 - see `_replaceable`
from accelerate.extension import Extensions, specs, third_parties
from accelerate.logging import get_logger
from accelerate.parallelism_config import ParallelismConfig
from accelerate.precision import amp
from accelerate.precision.amp import precision
from accelerate.process import Processes
from accelerate.state import AcceleratorState, GradientState
from accelerate.strategies import mesh, registry
from accelerate.strategies.base import Strategy
from accelerate.training import gradients, metrics, setup
from accelerate.training import prepare as preparation
from accelerate.training.prepared import PreparedObjects
from accelerate.training.window import Window
from accelerate.utils.fsdp_utils import fsdp2_prepare_model

# What this module gives and does not hold itself.
_HOMES = {
    "accelerate.config.enums": "FP8BackendType",
    "accelerate.modules.unwrap": "model_has_dtensor",
    "accelerate.extensions.big_models.weights": "get_state_dict_offloaded_model",
    "accelerate.base.constants": (
        "DTENSOR_PYTORCH_VERSION FSDP2_PYTORCH_VERSION FSDP_PYTORCH_VERSION MODEL_NAME PROFILE_PATTERN_NAME SAFE_WEIGHTS_INDEX_NAME "
        "SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SCALER_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME"
    ),
    "accelerate.utils.ao": "convert_model_to_fp8_ao",
    "accelerate.utils.fsdp_utils": "fsdp2_canonicalize_names",
}
__getattr__, __dir__, _ = front(__name__, _HOMES, [])

logger = get_logger(__name__)

if TYPE_CHECKING:  # what extensions add, for type checkers and editors
    from accelerate.extensions.methods import ExtensionMethods
else:
    ExtensionMethods = object

# Differs from `split_batches=False`: nothing was given, since the argument moved into DataLoaderConfiguration.
_split_batches = object()
_dispatch_batches, _even_batches, _use_seedable_sampler = object(), object(), object()  # users find them here


def _derived(make: Callable[["Accelerator"], Any]) -> Any:
    """Return an attribute that is made when it is first read, and may be assigned and deleted like any other."""
    return functools.cached_property(make)


def _read(path: str) -> Any:
    """Return an attribute that is read from what an Accelerator is made of."""
    return property(operator.attrgetter(path))


def _mesh_rank(dimension: str, what: str) -> Any:
    """Return an attribute that is this rank's place in a dimension of the mesh; an error says `what` is not configured."""
    return property(lambda self: mesh.dimension_rank(self, dimension, what))


def _replaceable(name: str) -> Callable[..., Any]:
    """Return a function of this module that libraries replace here, and that has the name of a method."""
    function: Callable[..., Any] = getattr(sys.modules[__name__], name)
    return function


class Accelerator(Processes, ExtensionMethods):
    """Run an ordinary PyTorch training loop on one process or many, in any precision, without changing the loop.

    Every rank constructs it, before models and loaders are prepared.

    Args:
        device_placement: Whether ``prepare`` moves models and batches to the device.
        split_batches: Deprecated; see ``DataLoaderConfiguration``.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``; by default what the launcher set, else ``"no"``.
        gradient_accumulation_steps: Micro-batches per optimizer step.
        cpu: Whether to stay on the CPU although there is an accelerator.
        dataloader_config: How prepared loaders behave.
        deepspeed_plugin: A DeepSpeedPlugin, or a dict of them by name.
        fsdp_plugin: A FullyShardedDataParallelPlugin.
        torch_tp_plugin: Superseded by ``parallelism_config``.
        megatron_lm_plugin: A MegatronLMPlugin.
        rng_types: Generators synchronised at the start of each epoch; by default those of the samplers.
        log_with: Trackers, by name (``"tensorboard"``, ``"all"``, ...) or as objects.
        project_dir: Folder for logs and checkpoints.
        project_config: How checkpoints are named and kept.
        gradient_accumulation_plugin: Accumulation settings in full, instead of ``gradient_accumulation_steps``.
        step_scheduler_with_optimizer: Whether prepared schedulers follow their optimizers.
        kwargs_handlers: Settings of DDP, scaler, autocast, process group, profiler and fp8, each at most once.
        dynamo_backend: Backend of torch.compile; models are compiled at ``prepare``.
        dynamo_plugin: Compilation settings in full, instead of ``dynamo_backend``.
        deepspeed_plugins: Other name of ``deepspeed_plugin``.
        parallelism_config: The device mesh: sizes of data, tensor, context and sequence parallelism.

    Attributes:
        distributed_type: Which kind of device and strategy the processes use together.
        num_processes: How many processes take part in the run (the world size).
        process_index: This process's rank in the run.
        local_process_index: This process's rank on its machine.
        device: The device that this process computes on.
        mixed_precision: The precision in force: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``.
        split_batches: Whether a loader's batch is split across ranks instead of each rank taking its own.
        dispatch_batches: Whether rank 0 reads every batch and sends each rank its part; None decides by the dataset.
        use_seedable_sampler: Whether random samplers are replaced by one whose order follows from seed and epoch.
        non_blocking: Whether batches are copied to the device asynchronously.
        project_dir: The folder for logs and checkpoints.
        logging_dir: The folder that trackers log to.
        save_iteration: The number of the next automatically named checkpoint.
        is_fsdp2: Whether the strategy is FSDP in its second version.
        is_composable_parallelism_enabled: Whether the strategy composes with other mesh dimensions.
        should_save_model: Whether this rank writes weights that all ranks have: the first process of each machine.
        deepspeed_plugin: The DeepSpeed plugin that is selected, or None.
        tensor_parallel_rank: This rank's place in the tensor-parallel dimension of the mesh; 0 where its size is 1; RuntimeError without ``parallelism_config``.
        context_parallel_rank: This rank's place in the context-parallel dimension of the mesh; 0 where its size is 1; NotImplementedError without ``parallelism_config``.
        data_parallel_rank: This rank's place in the replicating data-parallel dimension of the mesh; 0 where its size is 1; RuntimeError without ``parallelism_config``.
        data_parallel_shard_rank: This rank's place in the sharding data-parallel dimension of the mesh; 0 where its size is 1; RuntimeError without ``parallelism_config``.

    Raises:
        ValueError: A setting is unknown, or contradicts another one or the state that is live already.
        NotImplementedError: A strategy was requested that this version does not have.

    Example:
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=4)
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> for batch in loader:
        ...     loss = model(batch).mean()
        ...     accelerator.backward(loss)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    distributed_type: DistributedType = _read("state.distributed_type")
    num_processes: int = _read("state.num_processes")
    process_index: int = _read("state.process_index")
    local_process_index: int = _read("state.local_process_index")
    device: torch.device = _read("state.device")
    mixed_precision: str = _read("state.mixed_precision")
    split_batches: bool = _read("dataloader_config.split_batches")
    dispatch_batches: bool | None = _read("dataloader_config.dispatch_batches")
    use_seedable_sampler: bool = _read("dataloader_config.use_seedable_sampler")
    non_blocking: bool = _read("dataloader_config.non_blocking")
    project_dir: str | None = _read("project_configuration.project_dir")
    logging_dir: str | None = _read("project_configuration.logging_dir")
    save_iteration: int = _read("project_configuration.iteration")
    is_fsdp2: bool = _read("state.is_fsdp2")
    is_composable_parallelism_enabled: bool = _read("is_fsdp2")
    should_save_model: bool = _read("is_local_main_process")
    deepspeed_plugin: Any = _read("state.deepspeed_plugin")
    tensor_parallel_rank: int = _mesh_rank("tp", "Tensor parallelism")
    context_parallel_rank: int = _mesh_rank("cp", "Context parallelism")
    data_parallel_rank: int = _mesh_rank("dp_replicate", "Data parallelism")
    data_parallel_shard_rank: int = _mesh_rank("dp_shard", "Shard-based data parallelism")

    # What the constructor sets from `kwargs_handlers`.
    ddp_handler: DistributedDataParallelKwargs | None
    scaler_handler: GradScalerKwargs | None
    init_handler: InitProcessGroupKwargs | None
    autocast_handler: AutocastKwargs | None
    deepspeed_config: dict[str, Any]  # set when DeepSpeed makes an engine

    # Subclasses of libraries set what the constructor sets, and do not call it; these are the attributes that they do not know.
    state: AcceleratorState
    gradient_state: GradientState
    prepared: PreparedObjects = _derived(lambda self: PreparedObjects())
    fp8_enabled: bool = _derived(lambda self: precision(self.state.mixed_precision).needs_engine)
    _strategy: Strategy = _derived(lambda self: registry.resolve(self.state))
    _state_io = property(lambda self: registry.load_state_io(self._strategy.name))
    _scales_loss = _derived(lambda self: traits_of(self.state.distributed_type).scales_loss)
    _window = _derived(lambda self: Window())
    _exact_accumulation = _derived(lambda self: self.gradient_state.plugin_kwargs.get("exact", False))
    _sync_each_batch = _derived(lambda self: self.gradient_state.plugin_kwargs.get("sync_each_batch", False))
    _cp_context = None
    extensions = _derived(lambda self: Extensions.of(self))
    _loaded_checkpoint: str | None = None
    _unfinished_save: str | None = None

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = _split_batches,  # type: ignore[assignment]
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[str | RNGType] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: ParallelismConfig | None = None,
    ) -> None:
        # 1. Arguments and environment become settings.
        self.trackers: list[Any] = []
        self.log_with: list[Any] = [] if log_with is None else log_with
        self.project_configuration = setup.project(project_config, project_dir)
        if deepspeed_plugin is not None and deepspeed_plugins is not None:
            raise ValueError("Pass either deepspeed_plugin or deepspeed_plugins, not both.")
        deepspeed = deepspeed_plugins if deepspeed_plugin is None else deepspeed_plugin
        plugins = setup.plugins(deepspeed, fsdp_plugin, megatron_lm_plugin, dynamo_plugin, dynamo_backend)
        self.__dict__.update(setup.sort_handlers(kwargs_handlers))
        accumulation = setup.accumulation(gradient_accumulation_plugin, gradient_accumulation_steps)
        split = None if split_batches is _split_batches else split_batches
        self.dataloader_config = setup.loaders(dataloader_config, split)
        self.rng_types = setup.rng_types(rng_types)
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        # 2. Process, device, strategy and precision are decided in the shared state.
        options = self.init_handler.to_kwargs() if self.init_handler is not None else {}
        with setup.undone_if_refused():
            self.state = AcceleratorState(
                mixed_precision=None if mixed_precision is None else precision(mixed_precision).name,
                cpu=cpu,
                torch_tp_plugin=torch_tp_plugin,
                parallelism_config=setup.mesh(parallelism_config, ParallelismConfig, torch_tp_plugin),
                _from_accelerator=True,
                **plugins,
                **options,
            )
            self.scaler = self._strategy.make_scaler(self, self.scaler_handler)
            self.has_fp8_handler, self.delayed_fp8_autocast = self.fp8_enabled, False
            self.native_amp = precision(self.state.mixed_precision).autocast_dtype is not None
            # 3. What training needs, and the extensions that this run asks for.
            self._begin(accumulation)
            _install_third_parties()
            self.extensions = Extensions.of(self)
            if self.fp8_enabled:
                self.extensions.require(["mixed_precision='fp8'"])

    def _begin(self, accumulation: GradientAccumulationPlugin) -> None:
        """Set what belongs to gradients, to prepared and registered objects, and to checkpoints: none yet."""
        self.gradient_state = GradientState(gradient_accumulation_plugin=accumulation)
        self._exact_accumulation = accumulation.exact
        self._sync_each_batch = accumulation.sync_each_batch
        self.has_lomo_optimizer = False
        self.step = 0
        self.prepared = PreparedObjects()
        self._models: list[nn.Module] = []
        self._optimizers: list[Any] = []
        self._schedulers: list[Any] = []
        self._dataloaders: list[Any] = []
        self._custom_objects: list[Any] = []
        self.deepspeed_engine_wrapped: Any = None
        self._load_model_state_pre_hook: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._save_model_state_pre_hook: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self.flag_tensor: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Accelerator":
        # A copied trainer takes part in the same run as the one it was copied from.
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.prepared = copy.copy(self.prepared)
        preparation.restore_registry(self)

    @property
    def multi_device(self) -> bool:
        """Whether several accelerator devices take part (processes on CPUs do not count)."""
        return self.use_distributed and traits_of(self.distributed_type).distributed and self.device.type != "cpu"

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether torchdata's stateful loader is used inside prepared loaders."""
        return getattr(self.dataloader_config, "use_stateful_dataloader", False)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any prepared optimizer was skipped because gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The sizes of the device mesh's dimensions, or None."""
        return getattr(self.state, "parallelism_config", None)

    @property
    def torch_device_mesh(self) -> Any:
        """The torch device mesh, or None."""
        return getattr(self.state, "device_mesh", None)

    @property
    def even_batches(self) -> bool:
        """Whether ranks get equally many batches, by repeating samples where the data does not divide."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def sync_gradients(self) -> bool:
        """Whether gradients are synchronised, and optimizers step, in the current micro-batch."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state._set_sync_gradients(value)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.gradient_state.plugin_kwargs.update({"num_steps": value})

    @property
    def pipeline_parallel_rank(self) -> int:
        """This rank's place in the pipeline-parallel dimension of the mesh.

        Raises:
            NotImplementedError: ``pp_size`` is 1.
        """
        layout = self.parallelism_config
        if layout is None or not layout.pp_enabled:
            raise NotImplementedError("No rank has a place in a pipeline: set ParallelismConfig(pp_size=...) above 1.")
        return mesh.dimension_rank(self, "pp", "Pipeline parallelism")

    # -- prepare -------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, data loaders and schedulers for this run, in any order.

        An object that this Accelerator prepared before, or the object inside one, is not wrapped again: the prepared one
        is returned, with a UserWarning that points at the calling line.

        Collective: call on every rank.

        Args:
            *args: The objects; anything else (a loss function, None) comes back untouched.
            device_placement: For each object whether it moves to the device; None leaves it to the Accelerator.

        Returns:
            The prepared objects in the order given; a single one without a tuple.

        Raises:
            ValueError: Nothing was given, or the settings do not fit.
            TypeError: A string or a number was given.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = torch.nn.Linear(2, 1)
            >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> type(optimizer).__name__
            'AcceleratedOptimizer'
        """
        return preparation.prepare(self, args, device_placement)

    def _prepare_one(self, obj: Any, first_pass: bool = False, device_placement: bool | None = None) -> Any:
        """Prepare one object of the pass it belongs to, unless it was prepared before.

        Every strategy sends its objects through here, so this is where a second preparation is detected.

        Args:
            obj: Any object given to ``prepare``.
            first_pass: Whether this is the pass of models, optimizers and loaders, before that of schedulers.
            device_placement: Whether it moves to the device.
        """
        kind = preparation.kind_of(obj)
        if kind is None or (kind == "scheduler") is first_pass:
            return obj
        if (known := preparation.find_prepared(self, obj)) is not None:
            return known
        # Looked up on the instance, because libraries replace these methods there.
        if kind == "loader":
            result: Any = self.prepare_data_loader(obj, device_placement=device_placement)
        elif kind == "model":
            result = self.prepare_model(obj, device_placement=device_placement)
        elif kind == "optimizer":
            result = self.prepare_optimizer(obj, device_placement=device_placement)
        else:
            result = self.prepare_scheduler(obj)
        return preparation.ensure_registered(self, kind, result, obj)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare one model: place it, wrap its forward for mixed precision and itself for its strategy.

        Collective: call on every rank.

        Args:
            model: The model.
            device_placement: Whether it moves to the device; None leaves it to the Accelerator.
            evaluation_mode: Whether it is for evaluation alone, and gets no training wrapper.

        Raises:
            TypeError: It is not a module.
            ValueError: Its trainable weights are float16 while gradients are scaled, or it is where it cannot train.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare_model(torch.nn.Linear(2, 1))
        """
        return preparation.prepare_model(self, model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare one optimizer.

        Collective: call on every rank.

        Args:
            optimizer: The optimizer.
            device_placement: Whether its state moves to its parameters' device.

        Returns:
            An AcceleratedOptimizer.

        Example:
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = Accelerator(cpu=True).prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            >>> type(optimizer).__name__
            'AcceleratedOptimizer'
        """
        return preparation.prepare_optimizer(self, optimizer, device_placement)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare one learning-rate scheduler, after its optimizer.

        Collective: call on every rank.

        Args:
            scheduler: A torch scheduler.

        Returns:
            An AcceleratedScheduler.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> optimizer = accelerator.prepare_optimizer(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))
            >>> schedule = accelerator.prepare_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, step_size=10))
            >>> schedule.get_last_lr()
            [0.1]
        """
        return preparation.prepare_scheduler(self, scheduler)

    def prepare_data_loader(
        self,
        data_loader: torch.utils.data.DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> torch.utils.data.DataLoader[Any]:
        """Prepare one data loader, so that each rank reads its own part.

        Collective: call on every rank.

        Args:
            data_loader: The loader.
            device_placement: Whether its batches move to the device; None leaves it to the Accelerator.
            slice_fn_for_dispatch: Cuts a rank's part out of a dispatched batch; ``slice_tensors`` by default.

        Returns:
            A loader of the same interface.

        Example:
            >>> loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=4)
            >>> len(Accelerator(cpu=True).prepare_data_loader(loader))
            2
        """
        build = _replaceable("prepare_data_loader")
        loader: torch.utils.data.DataLoader[Any] = preparation.prepare_data_loader(
            self, data_loader, device_placement, build, slice_fn_for_dispatch
        )
        return loader

    def _prepare_device_mesh(self) -> None:
        """Build the device mesh that ``parallelism_config`` describes."""
        mesh.build(self)

    def _prepare_fsdp2(self, *args: Any) -> tuple[Any, ...]:
        """Prepare objects for FSDP2."""
        return preparation.in_order(self, args)

    def shard_model(self, model: nn.Module) -> nn.Module:
        """Shard a model in place with FSDP2, which `prepare` calls, by the function that libraries replace in this module.

        Collective: call on every rank.

        Args:
            model: The model, not wrapped.

        Returns:
            The model.
        """
        return fsdp2_prepare_model(self, model)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the model as it was before ``prepare``.

        Not a collective.

        Args:
            model: A prepared model; one that has no wrapper comes back as it is.
            keep_fp32_wrapper: Whether forward stays wrapped for mixed precision; False restores the original.
            keep_torch_compile: Whether a compiled model stays compiled.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = torch.nn.Linear(2, 1)
            >>> accelerator.unwrap_model(accelerator.prepare(model)) is model
            True
        """
        return self._strategy.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether a model, or a part of it, was placed on several devices by a device map.

        Not a collective.

        Args:
            model: The model.

        Example:
            >>> Accelerator(cpu=True).verify_device_map(torch.nn.Linear(1, 1))
            False
        """
        return any(len(getattr(module, "hf_device_map", None) or ()) > 1 for module in model.modules())

    def free_memory(self, *objects: Any) -> list[Any]:
        """Release all prepared objects and free their memory. Objects prepared after this call are treated as new.

        Collective: call on every rank.

        Args:
            *objects: Objects of yours to release as well.

        Returns:
            One None for each object, to assign back.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> model, = accelerator.free_memory(model)
        """
        return preparation.release(self, objects)

    def clear(self, *objects: Any) -> list[Any]:
        """Do the same as ``free_memory``.

        Collective: call on every rank.
        """
        return self.free_memory(*objects)

    # -- gradients -----------------------------------------------------------------------------------------------

    def accumulate(self, *models: nn.Module, num_items: Any = None) -> contextlib.AbstractContextManager[None]:
        """Return the context of one micro-batch: in it, prepared optimizers step only at the end of their accumulation step.

        The forward pass belongs into it, too: under DDP it decides whether the backward pass exchanges gradients.

        Collective: call on every rank.

        Args:
            *models: The prepared models trained in it, whose gradients stay local until the accumulation step ends.
            num_items: How many items (tokens, say) this rank's loss is the mean of. Given for every micro-batch, the
                gradients are the mean over all items of the accumulation step and of all ranks, exactly; it costs one all-reduce
                of a number per optimizer step.

        Raises:
            ValueError: ``num_items`` was given for some micro-batches of an accumulation step and not for others.

        Example:
            >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            >>> model = torch.nn.Linear(1, 1)
            >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> for batch in torch.ones(4, 1, 1):
            ...     with accelerator.accumulate(model):
            ...         accelerator.backward(model(batch).sum())
            ...         optimizer.step()
            ...         optimizer.zero_grad()
        """
        return gradients.Accumulation(self, models, num_items)

    def _do_sync(self) -> None:
        """Count a micro-batch, and decide whether gradients are synchronised in it."""
        gradients.advance(self)

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a model's gradients stay on their rank.

        With FSDP each rank keeps whole gradients meanwhile (`fully_shard` does that by `set_requires_gradient_sync`), which
        is said once, with the figure; ``GradientAccumulationPlugin(sync_each_batch=True)`` avoids it.

        Not a collective.

        Args:
            model: A prepared model.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
            >>> with accelerator.no_sync(model):
            ...     accelerator.backward(model(torch.ones(1, 1)).sum())
        """
        return gradients.no_sync(self, self._strategy, model)

    def backward(self, loss: torch.Tensor, *, num_items: Any = None, **kwargs: Any) -> None:
        """Run the backward pass, with the loss scaled for accumulation and for float16.

        Collective: call on every rank.

        Args:
            loss: The loss of this rank's micro-batch, a scalar tensor.
            num_items: How many items the loss is the mean of; see ``accumulate``.
            **kwargs: Passed to ``Tensor.backward``; ``learning_rate`` with a LOMO optimizer.

        Raises:
            TypeError: The loss is not a tensor.
            ValueError: ``num_items`` is missing for a part of the accumulation step, or was given twice.

        Example:
            >>> weight = torch.ones(1, requires_grad=True)
            >>> Accelerator(cpu=True).backward(weight.sum())
        """
        with self.extensions.phase("backward", loss):
            gradients.backward(self, loss, num_items, kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the float16 loss scale out of the gradients, before they are read or changed.

        Collective: call on every rank.

        Args:
            optimizer: The optimizer or optimizers whose gradients are meant; all prepared ones by default.

        Example:
            >>> accelerator = Accelerator(cpu=True)  # with mixed_precision="fp16" a scale would be divided out
            >>> model = torch.nn.Linear(1, 1)
            >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> accelerator.backward(model(torch.ones(1, 1)).sum())
            >>> accelerator.unscale_gradients()
            >>> model.weight.grad.item()
            1.0
        """
        gradients.unscale(self, optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Unscale the gradients and clip them to a total norm.

        Collective: call on every rank, when gradients are synchronised.

        Args:
            parameters: The parameters whose gradients are clipped together.
            max_norm: The largest norm they may have.
            norm_type: The order of the norm.

        Returns:
            The norm before clipping, a scalar tensor.

        Example:
            >>> weight = torch.nn.Parameter(torch.ones(1)); weight.grad = torch.full((1,), 4.0)
            >>> Accelerator(cpu=True).clip_grad_norm_([weight], max_norm=1.0)
            tensor(4.)
        """
        return gradients.clip_norm(self, parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Unscale the gradients and clip each element to ``[-clip_value, clip_value]``.

        Collective: call on every rank.

        Args:
            parameters: The parameters whose gradients are clipped.
            clip_value: The bound.

        Raises:
            NotImplementedError: The strategy holds gradients in shards that cannot be clipped by value.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
            >>> accelerator.backward(5 * model(torch.ones(1, 1)).sum())
            >>> accelerator.clip_grad_value_(model.parameters(), 0.5)
            >>> model.weight.grad.item()
            0.5
        """
        gradients.clip_value(self, parameters, clip_value)

    # -- collectives ---------------------------------------------------------------------------------------------

    @property
    def _communicator(self) -> Communicator:
        """The communicator of the Accelerator's own state, which outlives a reset of the shared one."""
        return comm.for_type(self.state.distributed_type)

    def gather(self, tensor: Any, *, differentiable: bool = False) -> Any:
        """Gather tensors from all ranks, concatenated along their first dimension in rank order.

        Collective: call on every rank.

        Args:
            tensor: A tensor, or lists, tuples and dicts of tensors, nested; the same shapes on every rank
                (``pad_across_processes`` helps). A tensor without dimensions counts as one of length 1.
            differentiable: Whether backward goes through, as a loss over the samples of all ranks needs. A rank's gradient is then the
                sum over the losses of all ranks, which all call backward; the gather and its backward cost an all-reduce more.

        Example:
            >>> Accelerator(cpu=True).gather(torch.tensor([1, 2]))
            tensor([1, 2])
        """
        with self.extensions.phase("gather"):
            return operations.gather_with(self._communicator, tensor, differentiable)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather predictions and labels of an evaluation loop, without the samples that fill up its last batch.

        Collective: call on every rank.

        Args:
            input_data: Nested tensors, or any picklable objects.
            use_gather_object: Whether to gather as objects although it holds tensors (of different shapes, say).

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(3), batch_size=2))
            >>> torch.cat([accelerator.gather_for_metrics(batch) for batch in loader])
            tensor([0, 1, 2])
        """
        with self.extensions.phase("gather"):
            return metrics.gather_for_metrics(self, input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sum or average tensors over all ranks, or take the largest values.

        Collective: call on every rank.

        Args:
            tensor: Nested tensors of the same shapes on every rank.
            reduction: ``"sum"``, ``"mean"``, ``"max"``, or ``"none"``, which is a sum.
            scale: Factor of the result on XLA devices, as in the recorded interface; elsewhere one that is not 1 warns.

        Example:
            >>> Accelerator(cpu=True).reduce(torch.tensor(2.0))
            tensor(2.)
        """
        with self.extensions.phase("reduce"):
            return operations.reduce_with(self._communicator, tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors to the largest size that one dimension has on any rank, so that they can be gathered.

        Collective: call on every rank.

        Args:
            tensor: Nested tensors that differ between ranks in ``dim`` alone.
            dim: The dimension to pad.
            pad_index: The value to pad with.
            pad_first: Whether to pad at the beginning.

        Example:
            >>> Accelerator(cpu=True).pad_across_processes(torch.tensor([1, 2]))
            tensor([1, 2])
        """
        return operations.pad_with(self._communicator, tensor, dim, pad_index, pad_first)

    # -- contexts ------------------------------------------------------------------------------------------------

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> contextlib.AbstractContextManager[None]:
        """Return the autocast context of the precision in force, for code outside a prepared model's forward.

        Not a collective.

        Args:
            autocast_handler: Settings for this context, instead of the Accelerator's.

        Example:
            >>> with Accelerator(cpu=True).autocast():
            ...     product = torch.ones(2, 2) @ torch.ones(2, 2)
        """
        handler = self.autocast_handler if autocast_handler is None else autocast_handler
        kind = "no" if traits_of(self.distributed_type).casts_itself else self.mixed_precision
        return amp.autocast_context(self.device.type, precision(kind), handler)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        blocking: bool | None = None,
        **save_model_func_kwargs: Any,
    ) -> Path | str:
        """Save models, optimizers, schedulers, loaders, scaler, generators and registered objects.

        The checkpoint is written aside and takes its place in one step when all of it is there, with a manifest of sizes and
        checksums. One that was there before stays until then. See docs/guides/checkpointing.md.

        Collective: call on every rank.

        Args:
            output_dir: The folder, or a URL that fsspec understands; with automatic naming, the next
                ``checkpoints/checkpoint_<n>`` of the project.
            safe_serialization: Whether models are written as safetensors.
            blocking: Whether to wait until the checkpoint is in its place. False returns when the state is copied, and
                writes in the background; ``wait_for_checkpoint`` waits for that. None takes the opposite of
                ``ProjectConfiguration.async_save``.
            **save_model_func_kwargs: Passed to the strategy's own saving of models.

        Returns:
            Where it is, or will be: the path as it was given.

        Raises:
            ValueError: There is no folder to write to, or the next one exists already.
            CollectiveMisuse: Not all ranks save to the same place; raised on those that called it, with every rank's line.
            RuntimeError: Saving failed on another rank, or the last save in the background failed.

        Example:
            >>> import tempfile
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     _ = accelerator.save_state(folder)
            ...     _ = accelerator.load_state(folder)
        """
        from accelerate.training import saving

        with self.extensions.phase("save_state"):
            return saving.save_state(self, output_dir, safe_serialization, blocking, **save_model_func_kwargs)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        latest: bool = False,
        missing_ok: bool = False,
        **load_model_func_kwargs: Any,
    ) -> Path | str | None:
        """Restore what ``save_state`` saved, into the objects prepared and registered in the same order.

        The checkpoint is verified and read in full first. What cannot be restored leaves everything as it was. If the
        checkpoint holds more models, optimizers, schedulers or loaders than are prepared, a warning names their states.

        Collective: call on every rank.

        Args:
            input_dir: The checkpoint, a folder or URL; None takes the newest complete one of the project.
            load_kwargs: Passed to the loading of models' and optimizers' files.
            latest: Take the newest complete checkpoint in ``input_dir``, or in the project; those passed over are logged.
            missing_ok: Return None where there is no checkpoint yet, so that a first run and its continuation are the same
                script. Where there are only damaged ones, it raises all the same.
            **load_model_func_kwargs: Passed to the strategy's own loading of models.

        Returns:
            Which checkpoint was loaded.

        Raises:
            ValueError: The folder is not there, or does not fit what was prepared; nothing was changed then.
            DamagedCheckpoint: A file is missing, truncated or changed; the message names it.
            FileNotFoundError: There is no complete checkpoint.
            RuntimeError: Another rank could not load it, or nothing is prepared that could take its states.

        Example:
            >>> import tempfile
            >>> accelerator = Accelerator(cpu=True)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     accelerator.load_state(folder, latest=True, missing_ok=True) is None  # the first start of a run
            True
        """
        from accelerate.training import restoring

        with self.extensions.phase("load_state"):
            return restoring.load_state(self, input_dir, load_kwargs, latest, missing_ok, **load_model_func_kwargs)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Save an object to disk, once per run (or per machine, where the project is set so). All ranks may call it.

        Not a collective.

        Args:
            obj: The object.
            f: The file.
            safe_serialization: Whether to write a dict of tensors as safetensors.

        Example:
            >>> import os, tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     Accelerator(cpu=True).save({"mean": torch.zeros(2)}, f"{folder}/statistics.bin")
            ...     os.listdir(folder)
            ['statistics.bin']
        """
        from accelerate.checkpoint import torch_files

        each_node = self.project_configuration.save_on_each_node
        torch_files.save(obj, f, save_on_each_node=each_node, safe_serialization=safe_serialization)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Return a prepared model's full state dict.

        Collective: call on every rank.

        Args:
            model: The model.
            unwrap: Whether the keys are those of the model before ``prepare``.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> sorted(accelerator.get_state_dict(accelerator.prepare(torch.nn.Linear(1, 1))))
            ['bias', 'weight']
        """

        # Looked up when it is called: without the extension of big models it is not there.
        def offloaded(whole: nn.Module) -> dict[str, Any]:
            state: dict[str, Any] = _replaceable("get_state_dict_offloaded_model")(whole)
            return state

        from accelerate.training import saving

        return saving.get_state_dict(self, model, unwrap, offloaded)

    def whole_parameters(self, model: nn.Module) -> contextlib.AbstractContextManager[nn.Module]:
        """Return a context in which each rank has a model's parameters whole, so that forwards need no other rank.

        For ``generate`` and evaluation: all units are gathered at once, and each rank then runs as many forwards as it likes. The ranks
        enter together; the model trains on afterwards. Change nothing inside: where parameters are sharded, changes are lost.
        FSDP, HSDP, and strategies whose ranks have full parameters anyway; layers that tensor parallelism splits stay split.

        Collective: call on every rank.

        Args:
            model: A prepared model.

        Returns:
            The context, which gives the model without its wrappers.

        Raises:
            NotImplementedError: DeepSpeed's stage 3.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(4, 2))
            >>> with torch.no_grad(), accelerator.whole_parameters(model) as whole:
            ...     whole.weight.shape, whole(torch.ones(1, 4)).shape
            (torch.Size([2, 4]), torch.Size([1, 2]))
        """
        return self._strategy.whole_parameters(self, model)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Add objects to what ``save_state`` saves.

        Collective: call on every rank.

        Args:
            *objects: Objects with ``state_dict`` and ``load_state_dict``.

        Raises:
            ValueError: One of them lacks these methods.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> accelerator.register_for_checkpointing(torch.nn.BatchNorm1d(2))
        """
        from accelerate.training import saving

        saving.register_for_checkpointing(self, *objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Add a function that is called before ``save_state`` writes, with models, weights and folder.

        Not a collective.

        Args:
            hook: ``hook(models, weights, output_dir)``; it may write models itself and empty the lists.

        Returns:
            A handle whose ``remove()`` takes the hook away.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> handle = accelerator.register_save_state_pre_hook(lambda models, weights, folder: print(len(models), "models"))
            >>> handle.remove()
        """
        from accelerate.training import saving

        return saving.register_hook(self._save_model_state_pre_hook, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Add a function that is called before ``load_state`` reads, with models and folder.

        Not a collective.

        Args:
            hook: ``hook(models, input_dir)``; it may read models itself and empty the list.

        Returns:
            A handle whose ``remove()`` takes the hook away.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> handle = accelerator.register_load_state_pre_hook(lambda models, folder: print(len(models), "models"))
            >>> handle.remove()
        """
        from accelerate.training import saving

        return saving.register_hook(self._load_model_state_pre_hook, hook)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader that omits the first batches of its next epoch, to continue in the middle of one.

        Not a collective.

        Args:
            dataloader: A prepared loader.
            num_batches: How many batches to omit.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(4)))
            >>> [batch.item() for batch in accelerator.skip_first_batches(loader, 2)]
            [2, 3]
        """
        return _replaceable("skip_first_batches")(dataloader, num_batches=num_batches)

    # -- the end -------------------------------------------------------------------------------------------------

    def end_training(self) -> None:
        """Finish checkpoints and extensions (trackers, say), and leave the process group.

        Collective: call on every rank, at the end.
        """
        with contextlib.ExitStack() as last:  # calls all, whatever one of them raises
            last.callback(self.state.destroy_process_group)
            for hook in reversed(self.extensions.ended):
                last.callback(hook)


@functools.cache
def _install_third_parties() -> None:
    """Give the Accelerator the methods of other packages' extensions, which may import this module."""
    for spec in third_parties():
        spec.install(Accelerator)


for _spec in specs():
    _spec.install(Accelerator)
