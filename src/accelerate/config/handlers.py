"""Keyword handlers: small dataclasses whose changed fields become the keyword arguments of a torch object."""

import copy
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from accelerate.base._warn import warn_user
from accelerate.config import env
from accelerate.config.enums import DDPCommunicationHookType, DynamoBackend, at_public_path

_POWER_SGD = (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD)
_COMMUNICATION = ("comm_hook", "comm_wrapper", "comm_state_option")


@at_public_path
class KwargsHandler:
    """The base of every keyword handler: two views of its fields as a dictionary.

    Example:
        >>> GradScalerKwargs(init_scale=1024.0).to_kwargs()
        {'init_scale': 1024.0}
    """

    def to_dict(self) -> dict[str, Any]:
        """Return all attributes, deep-copied."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """Return the attributes that differ from those of a handler built without arguments or environment variables."""
        with env.without_variables():
            usual = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if name not in usual or usual[name] != value}


@at_public_path
@dataclass
class AutocastKwargs(KwargsHandler):
    """The arguments of `torch.autocast`, besides the device and the dtype.

    Args:
        enabled: False switches autocast off.
        cache_enabled: whether casts of weights are kept within the block; None leaves it to torch.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(kwargs_handlers=[AutocastKwargs(cache_enabled=True)])

    Source: https://pytorch.org/docs/stable/amp.html
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@at_public_path
@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """The arguments of `torch.nn.parallel.DistributedDataParallel`, and how it compresses the gradients that it exchanges.

    Args:
        dim: the dimension along which inputs are scattered.
        broadcast_buffers: copy the buffers of rank 0 to all ranks at each forward pass.
        bucket_cap_mb: size of a gradient bucket, in MiB.
        find_unused_parameters: look for parameters that got no gradient, at a cost in each step.
        check_reduction: kept for the interface; torch ignores it.
        gradient_as_bucket_view: let gradients live inside the buckets, which saves a copy.
        static_graph: promise that each step uses the same graph.
        comm_hook: the compression, as a member or its value; see `DDPCommunicationHookType`.
        comm_wrapper: cast what `comm_hook` exchanges to "fp16" or "bf16"; "no" leaves it.
        comm_state_option: keyword arguments of torch's `PowerSGDState`, for the two PowerSGD hooks.

    Raises:
        ValueError: `comm_hook` or `comm_wrapper` is unknown.

    Example:
        >>> from accelerate import Accelerator
        >>> handler = DistributedDataParallelKwargs(find_unused_parameters=True, comm_hook="bf16")
        >>> accelerator = Accelerator(kwargs_handlers=[handler])

    Source: https://pytorch.org/docs/stable/ddp_comm_hooks.html
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: Literal[
        DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16
    ] = DDPCommunicationHookType.NO
    comm_state_option: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.comm_hook, self.comm_wrapper = self._communication()

    def _communication(self) -> tuple[DDPCommunicationHookType, DDPCommunicationHookType]:
        kind = DDPCommunicationHookType
        hook, wrapper = kind(self.comm_hook), kind(self.comm_wrapper)
        if wrapper not in (kind.NO, kind.FP16, kind.BF16):
            raise ValueError(f"comm_wrapper is {wrapper}, which wraps no hook. Choose one of: no, fp16, bf16.")
        if hook is kind.NO and wrapper is not kind.NO:
            warn_user(f"comm_wrapper={wrapper} has no effect without a comm_hook; set comm_hook={wrapper}.")
        if self.comm_state_option and hook not in _POWER_SGD:
            warn_user(f"comm_state_option has no effect with comm_hook={hook}; only the PowerSGD hooks read it.")
        return hook, wrapper

    def to_dict(self, ignore_keys: tuple[str, ...] = _COMMUNICATION) -> dict[str, Any]:
        """Return the attributes that torch's constructor takes, deep-copied: all but `ignore_keys`.

        Not a collective.
        """
        return {name: copy.deepcopy(value) for name, value in self.__dict__.items() if name not in ignore_keys}

    def register_comm_hook(self, model: Any) -> None:
        """Register the chosen compression on a DistributedDataParallel; "no" does nothing.

        Unknown values of fields raise ValueError.

        Collective: call on every rank, once, before the first backward pass.
        """
        chosen, wrapper = self._communication()
        if chosen is DDPCommunicationHookType.NO:
            return

        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        state = None
        if chosen in _POWER_SGD:
            hook = getattr(powerSGD_hook, f"{chosen}_hook".replace("power_sgd", "powerSGD"))
            state = powerSGD_hook.PowerSGDState(None, **self.comm_state_option)
        else:
            hook = getattr(default_hooks, f"{chosen}_compress_hook")
        if wrapper is not DDPCommunicationHookType.NO:
            hook = getattr(default_hooks, f"{wrapper}_compress_wrapper")(hook)
        model.register_comm_hook(state=state, hook=hook)


@at_public_path
@dataclass
class GradScalerKwargs(KwargsHandler):
    """The arguments of the gradient scaler of fp16 training.

    Args:
        init_scale: the first scale.
        growth_factor: the factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: the factor after an overflow.
        growth_interval: steps without overflow before the scale grows.
        enabled: False makes the scaler do nothing.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(kwargs_handlers=[GradScalerKwargs(growth_interval=500)])

    Source: https://pytorch.org/docs/stable/amp.html#gradient-scaling
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@at_public_path
@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """The arguments of `torch.distributed.init_process_group`.

    Args:
        backend: the communication library; the state picks another one where the hardware needs it.
        init_method: where the processes meet, as a URL; None reads the environment.
        timeout: how long a collective may wait, as a `timedelta` or in seconds. None takes torch's defaults: ten minutes
            for "nccl", thirty for the others.

    Example:
        >>> from datetime import timedelta
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=2))])

    Source: https://pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.timeout is None:
            self.timeout = timedelta(minutes=10 if self.backend == "nccl" else 30)
        elif isinstance(self.timeout, (int, float)):
            self.timeout = timedelta(seconds=self.timeout)


@at_public_path
@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients are gathered over several batches before a step.

    Args:
        num_steps: batches per optimizer step; None takes the Accelerator's `gradient_accumulation_steps`.
        adjust_scheduler: count the accumulated batches in the scheduler's own step counter. It has no effect: as in
            upstream, the default is not passed on, and schedules follow optimizer steps.
        sync_with_dataloader: let the end of a data loader close the accumulation step, however short it is.
        sync_each_batch: exchange gradients at every batch; more traffic, less memory with sharded gradients.
        exact: divide the loss of a shortened last accumulation step by its real length instead of `num_steps`. Then the last
            step of an epoch weighs its batches like every other step. It needs `sync_with_dataloader` and a data loader with
            a known length.

    Raises:
        ValueError: `num_steps` is below one, or `exact` is set without `sync_with_dataloader`.

    Example:
        >>> from accelerate import Accelerator
        >>> plugin = GradientAccumulationPlugin(num_steps=4, exact=True)
        >>> accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    exact: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.num_steps, int) and self.num_steps < 1:
            raise ValueError(f"num_steps is {self.num_steps}; accumulate over at least 1 batch.")
        if self.exact and not self.sync_with_dataloader:
            raise ValueError(
                "exact=True needs sync_with_dataloader=True: it weighs accumulation steps that a loader's end cuts."
            )


@at_public_path
@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """The arguments of `torch.compile` when `Accelerator.prepare` compiles a model.

    Each field left at None is read from the environment variable in brackets, which the launcher sets.

    No method is a collective.

    Args:
        backend: the compiler, as a `DynamoBackend` or its name in any case; "no" compiles nothing
            (ACCELERATE_DYNAMO_BACKEND).
        mode: "default", "reduce-overhead" or "max-autotune" (ACCELERATE_DYNAMO_MODE).
        fullgraph: fail where the model does not compile as one graph (ACCELERATE_DYNAMO_USE_FULLGRAPH).
        dynamic: compile for any shape; None lets torch find out (ACCELERATE_DYNAMO_USE_DYNAMIC).
        options: the options of the backend itself; torch takes no `mode` then.
        disable: make `torch.compile` return the model unchanged.
        use_regional_compilation: compile the repeated blocks of the model one by one, which starts much faster
            (ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION).

    Raises:
        ValueError: `backend` is unknown.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="inductor", mode="reduce-overhead"))

    Source: https://pytorch.org/docs/stable/generated/torch.compile.html
    """

    backend: DynamoBackend | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        env.fill(self, {"backend": ("dynamo_backend", "no"), "mode": ("dynamo_mode", "default")})
        env.fill(self, {"fullgraph": ("dynamo_use_fullgraph", False), "dynamic": ("dynamo_use_dynamic", None)})
        env.fill(self, {"use_regional_compilation": ("dynamo_use_regional_compilation", False)})
        self.backend = DynamoBackend(str(self.backend).upper())

    def to_dict(self) -> dict[str, Any]:
        """Return all attributes, deep-copied, with the backend written as `torch.compile` reads it."""
        return super().to_dict() | {"backend": self.backend.value.lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments for `torch.compile` that differ from a plugin built without arguments or variables."""
        kwargs = super().to_kwargs()
        kwargs.pop("use_regional_compilation", None)  # for us, not for torch
        return kwargs
