"""`AcceleratorState`, the settings of an `Accelerator`, and `GradientState`, the position of the training.

`PartialState` is defined in `accelerate.process`, and public here.
"""

import logging
import os
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from accelerate.base import _lazy
from accelerate.base.environment import patch_environment
from accelerate.base.imports import is_fp8_available
from accelerate.config import env
from accelerate.config.enums import DynamoBackend, PrecisionType
from accelerate.config.options import BY_NAME
from accelerate.config.strategies import StrategySpec, engines, plugin_record, traits_of
from accelerate.extension import imported
from accelerate.process import PartialState, ProcessView, SharedDict, _check_unchanged, _settings, group_is_gone
from accelerate.process import do_nothing as do_nothing
from accelerate.runtime import storage

if TYPE_CHECKING:
    from accelerate.config.handlers import GradientAccumulationPlugin

__getattr__ = _lazy.aliases(__name__)

logger = logging.getLogger(__name__)


def is_initialized() -> bool:
    """Return whether an `Accelerator` has set up the shared `AcceleratorState`.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator()
        >>> is_initialized()
        True
    """
    return bool(storage.accelerator.current)


class AcceleratorState(ProcessView):
    """The settings of the process's `Accelerator`: everything of `PartialState`, plus precision, plugins and layout.

    All instances share their attributes; the first one is built by `Accelerator`. After `_reset_state`, existing instances
    keep their attributes.

    Args:
        mixed_precision: "no", "fp16", "bf16" or "fp8"; None reads ACCELERATE_MIXED_PRECISION, else "no".
        cpu: use the processor even if there is an accelerator.
        dynamo_plugin: how models are compiled.
        deepspeed_plugin: DeepSpeed's settings, or several by name.
        fsdp_plugin: settings of fully sharded data parallelism.
        torch_tp_plugin: settings of tensor parallelism.
        megatron_lm_plugin: Megatron-LM's settings.
        parallelism_config: sizes of the device mesh.
        _from_accelerator: the call may build the state; without it, a state that was never built is an error.
        kwargs: arguments of `torch.distributed.init_process_group`.

    Attributes:
        distributed_type: how the processes cooperate; a plugin's engine if there is one.
        device_mesh: the mesh that `parallelism_config` describes, once the `Accelerator` has built it.

    Raises:
        ValueError: no state was built yet, or a value contradicts the state that exists.

    Example:
        >>> from accelerate import Accelerator
        >>> from accelerate.state import AcceleratorState
        >>> accelerator = Accelerator(mixed_precision="bf16")
        >>> AcceleratorState().mixed_precision
        'bf16'
    """

    _shared_state: ClassVar[Any] = SharedDict(storage.accelerator)
    _known_attrs: ClassVar[tuple[str, ...]] = (
        *ProcessView._known_attrs,
        *("deepspeed_plugins", "torch_tp_plugin", "parallelism_config", "device_mesh", "dynamo_plugin"),
        "_mixed_precision",
    )

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        self.__dict__ = storage.accelerator.current
        if _from_accelerator and group_is_gone(self.__dict__ or storage.process.current):
            storage.process.renew()
            self.__dict__ = storage.accelerator.renew()
        plugins = {
            "deepspeed_plugins": deepspeed_plugin,
            "fsdp_plugin": fsdp_plugin,
            "megatron_lm_plugin": megatron_lm_plugin,
        }
        if self.__dict__:
            self._check_initialized(mixed_precision, cpu)
            engine = _engine(plugins) if _from_accelerator else None
            self._check_plugins(
                {**plugins, "dynamo_plugin": dynamo_plugin, "parallelism_config": parallelism_config}, engine
            )
            if kwargs:
                _check_unchanged(self, _settings(kwargs))
            if not storage.process.current:  # only this state was reset, and libraries ask whether it exists
                PartialState(self.__dict__.get("_cpu", cpu))
            return
        if not _from_accelerator:
            raise ValueError(
                "AcceleratorState is not set up. Build an `Accelerator()` first; it sets up the state that the rest of the library uses."
            )
        try:
            self._build(mixed_precision, cpu, plugins, kwargs)
            self.torch_tp_plugin = torch_tp_plugin
            self.parallelism_config = parallelism_config
            self.device_mesh = None
            from accelerate.config.handlers import TorchDynamoPlugin

            self.dynamo_plugin = TorchDynamoPlugin() if dynamo_plugin is None else dynamo_plugin
            compiles = self.dynamo_plugin.backend is not DynamoBackend.NO
            if compiles and self._mixed_precision == PrecisionType.NO.value and self.device.type == "cuda":
                # Compiled fp32 models multiply matrices in TF32, as the interface documents.
                torch.backends.cuda.matmul.allow_tf32 = True
        except BaseException:
            self.__dict__.clear()  # a half-built state would pass for a built one
            raise

    def _build(self, mixed_precision: str | None, cpu: bool, plugins: dict[str, Any], kwargs: dict[str, Any]) -> None:
        precision = _precision(mixed_precision)
        engine = _engine(plugins)
        spec = None if engine is None else plugin_record(engine)
        # The process state must know where a lone process needs a group.
        variables = {} if spec is None or not spec.traits.needs_group else {BY_NAME[spec.switch].env: "true"}
        with patch_environment(**variables):
            process = PartialState(cpu, **kwargs)
        if cpu and process.device.type != "cpu":
            raise ValueError(
                f"cpu=True cannot take effect: `PartialState` was built before, with device={str(process.device)!r}. Build it "
                "with PartialState(cpu=True), or call `AcceleratorState._reset_state(True)` before."
            )
        if spec is not None and spec.joins and process.distributed_type not in spec.kinds:
            # The program built the process state before, where nothing asked for this strategy.
            imported(spec.joins)(process.backend, process.device.type, process.local_process_index)
        self.__dict__.update(process.__dict__)
        self._mixed_precision = precision
        self.deepspeed_plugins = None
        if spec is not None:
            self._set_engine(spec, plugins[spec.plugin])

    def _set_engine(self, spec: StrategySpec, plugin: Any) -> None:
        if traits_of(self.distributed_type).traced:
            raise NotImplementedError(
                f"{spec.plugin} does not work on XLA devices. Omit it to train with data parallelism."
            )
        self.distributed_type = spec.kinds[0]
        flag = BY_NAME[spec.switch].env
        if plugin is None:
            plugin = imported(spec.plugin_class)()
        elif getattr(plugin, "cpu_ram_efficient_loading", False) and not asked_for(spec.plugin):
            os.environ[flag] = _MIRRORED  # transformers reads this before it reads weights only on rank 0
        if spec.sets_switch:
            os.environ.setdefault(flag, _MIRRORED)
        setattr(self, spec.plugin, plugin)
        if spec.plugin_set:
            imported(spec.plugin_set)(self, plugin)
        elif self._mixed_precision != PrecisionType.NO.value:
            plugin.set_mixed_precision(self._mixed_precision)

    def _check_initialized(self, mixed_precision: str | None = None, cpu: bool | None = None) -> None:
        """Raise where an argument contradicts the state that exists."""
        if mixed_precision is not None and mixed_precision != self._mixed_precision:
            asked, live = f"mixed_precision={mixed_precision!r}", f"mixed_precision={self._mixed_precision!r}"
        elif cpu and self.device.type != "cpu":
            asked, live = "cpu=True", f"device={str(self.device)!r}"
        else:
            return
        raise ValueError(
            f"AcceleratorState has already been initialized with {live} and cannot be changed to {asked}. {_TOO_LATE}"
        )

    def _check_plugins(self, plugins: dict[str, Any], engine: str | None) -> None:
        """Raise where an engine comes too late, and warn where other settings do."""
        for name, value in plugins.items():
            live = self.__dict__.get(name)
            if live is None and (value is not None or name == engine) and name in engines():
                message = f"{name} was given, but AcceleratorState has already been initialized without one"
                raise ValueError(f"{message} ({self.distributed_type}). {_TOO_LATE}")
            if value is None or value is live or value == live:
                continue
            if name in engines() and (check := engines()[name].plugin_again):
                imported(check)(self, value, _TOO_LATE)
            else:
                message = f"AcceleratorState has already been initialized with {live!r}. {_TOO_LATE}"
                logger.warning("%s=%r is not used, because %s", name, value, message)

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Let the next instance be built again; existing instances keep their attributes.

        `reset_partial_state` does the same for `PartialState`: needed for another device, backend or process count.
        """
        storage.accelerator.renew()
        for flag in (BY_NAME[spec.switch].env for spec in engines().values()):
            if os.environ.get(flag) == _MIRRORED:
                del os.environ[flag]
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def mixed_precision(self) -> str:
        """The precision in force; under DeepSpeed, what its configuration enables."""
        plugin = self.deepspeed_plugin
        if plugin is None:
            return self._mixed_precision
        for name in (PrecisionType.FP16.value, PrecisionType.BF16.value):
            if plugin.deepspeed_config.get(name, {}).get("enabled", False) is True:
                return name
        return PrecisionType.NO.value

    @property
    def fork_launched(self) -> bool:
        """Whether a notebook started this process by forking."""
        return self.__dict__["fork_launched"] if self.__dict__ else self.__getattr__("fork_launched")

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded by the second version of FSDP (`fully_shard`)."""
        plugin = self.__dict__.get("fsdp_plugin")
        return plugin is not None and traits_of(self.distributed_type).sharded and plugin.fsdp_version == 2

    @property
    def deepspeed_plugin(self) -> Any:
        """The active DeepSpeed plugin, or None without DeepSpeed."""
        if not traits_of(self.distributed_type).casts_itself:
            return None
        plugins = self.deepspeed_plugins
        if not isinstance(plugins, dict):
            return plugins
        return next((plugin for plugin in plugins.values() if plugin.selected), None)

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return one of several DeepSpeed plugins.

        Not a collective.

        Args:
            name: its key in the dictionary that was given to `Accelerator`.

        Raises:
            ValueError: DeepSpeed is not in use, or there is no plugin of that name.
        """
        plugins = self.__dict__.get("deepspeed_plugins")
        if plugins is None:
            raise ValueError("DeepSpeed is not enabled. Pass `deepspeed_plugin` to `Accelerator` to use it.")
        if not isinstance(plugins, dict) or name not in plugins:
            available = ", ".join(map(repr, plugins)) if isinstance(plugins, dict) else "one plugin without a name"
            raise ValueError(f"There is no DeepSpeed plugin {name!r}; there is {available}.")
        return plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Make one of several DeepSpeed plugins the active one.

        Not a collective.

        Args:
            name: its key in the dictionary that was given to `Accelerator`.

        Raises:
            ValueError: DeepSpeed is not in use, or there is no plugin of that name.
        """
        chosen = self.get_deepspeed_plugin(name)
        for plugin in self.deepspeed_plugins.values():
            if plugin is not chosen:
                plugin._unselect()
        chosen.select(_from_accelerator_state=True)

    def __repr__(self) -> str:
        text = super().__repr__()
        if not self.__dict__:
            return text
        text += f"Mixed precision type: {self.mixed_precision}\n"
        plugin = self.deepspeed_plugin
        return text if plugin is None else f"{text}DeepSpeed configuration: {plugin.deepspeed_config}\n"


_TOO_LATE = "Pass it to the first `Accelerator()`, or call `AcceleratorState._reset_state(True)` before."

# True, in letters that no user types: the state itself set the variable, not a launcher, a user or TrainingArguments.
_MIRRORED = "tRUE"


def asked_for(plugin: str) -> bool:
    """Return whether the environment asks for a plugin's engine, as the launcher and TrainingArguments do.

    Not a collective.
    """
    switch = engines()[plugin].switch
    return os.environ.get(BY_NAME[switch].env) != _MIRRORED and env.value_of(switch)


def _engine(plugins: dict[str, Any]) -> str | None:
    """Return which plugin decides how the processes cooperate: a given one, else one that the launcher asked for."""
    passed = [name for name, plugin in plugins.items() if plugin is not None]
    if len(passed) > 1:
        raise ValueError(f"{' and '.join(passed)} were given; they exclude each other, pass one of them.")
    return passed[0] if passed else next(filter(asked_for, engines()), None)


def _precision(value: str | None) -> str:
    source = "mixed_precision"
    if value is None:
        source = BY_NAME[source].env
        value = os.environ.get(source, "").strip() or "no"
    name = str(value).lower()
    if name not in PrecisionType:
        raise ValueError(f"Unknown {source}: {value!r}. Choose one of {', '.join(PrecisionType.list())}.")
    if name == PrecisionType.FP8.value and not is_fp8_available():
        raise ValueError(
            "mixed_precision='fp8' needs one of the libraries torchao and transformer_engine. Install one, or use "
            "'bf16'."
        )
    return name


class GradientState:
    """The position of the training between two optimizer steps: whether gradients are synchronised, and in which loader.

    All instances share their attributes. After `_reset_state`, existing instances keep their attributes.

    Args:
        gradient_accumulation_plugin: replaces the settings in force; None keeps them.

    Attributes:
        sync_gradients: whether the coming backward pass ends an accumulation step.
        plugin_kwargs: the settings that differ from the plugin's defaults.
        is_xla_gradients_synced: whether gradients on XLA devices were reduced in this accumulation step.
    """

    _shared_state: ClassVar[Any] = SharedDict(storage.gradient)
    sync_gradients: bool
    plugin_kwargs: dict[str, Any]
    is_xla_gradients_synced = False

    def __init__(self, gradient_accumulation_plugin: "GradientAccumulationPlugin | None" = None) -> None:
        self.__dict__ = storage.gradient.current
        if not self.__dict__:
            self.sync_gradients = True
            self.plugin_kwargs = {}
            self._active: list[weakref.ref[Any]] = []
            self.is_xla_gradients_synced = False
        if gradient_accumulation_plugin is not None:
            self.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()
            if self.num_steps == 1:
                self.sync_gradients = True  # an accumulation step that was left open by an exception ends here

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy follows its process's training, and in another process it is in none of this one's loaders.
        return _restored_gradient_state, ({**self.__dict__, "_active": []},)

    def __deepcopy__(self, memo: dict[int, Any]) -> "GradientState":
        # A copied optimizer or loader trains in the same loop as the one it was copied from.
        return self

    @property
    def initialized(self) -> bool:
        """Whether the state has been built."""
        return bool(self.__dict__)

    @property
    def num_steps(self) -> int:
        """How many backward passes one optimizer step gathers."""
        return self.plugin_kwargs.get("num_steps", 1)

    @property
    def adjust_scheduler(self) -> bool:
        """Whether the scheduler counts the backward passes of an accumulation step, too."""
        return self.plugin_kwargs.get("adjust_scheduler", False)

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the end of a loader ends the accumulation step."""
        return self.plugin_kwargs.get("sync_with_dataloader", True)

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders that are being iterated, the innermost last, after a None."""
        loaders = (reference() for reference in self._active)
        return [None, *(loader for loader in loaders if loader is not None)]

    @dataloader_references.setter
    def dataloader_references(self, dataloaders: Iterable[Any]) -> None:
        self._active = [weakref.ref(loader) for loader in dataloaders if loader is not None]

    @property
    def active_dataloader(self) -> Any:
        """The innermost loader that is being iterated, or None."""
        return self.dataloader_references[-1]

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader has handed out its last batch."""
        loader = self.active_dataloader
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """How many samples of the active loader's last global batch are real; -1 where that is unknown."""
        loader = self.active_dataloader
        return -1 if loader is None else loader.remainder

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Return whether the coming backward pass ends an accumulation step."""
        self.sync_gradients = sync_gradients
        if sync_gradients and not self.is_xla_gradients_synced and "distributed_type" in storage.process.current:
            if traits_of(storage.process.current["distributed_type"]).traced:
                # Runs the operations recorded so far, or the graph would grow over the full accumulation step.
                from accelerate.devices.table import DEVICES

                DEVICES["xla"].namespace().mark_step()

    def _add_dataloader(self, dataloader: Any) -> None:
        """Make a loader the active one, when its iteration begins; the state holds no reference to it."""
        self._active.append(weakref.ref(dataloader))

    def _activate(self, dataloader: Any) -> None:
        """Make a loader that is being iterated the active one again, as it yields a batch: loops may take turns."""
        if self._active and self._active[-1]() is dataloader:
            return
        # torch_xla iterates loaders in its own threads, ahead of the training, which is then in another loop.
        if threading.current_thread() is not threading.main_thread():
            return
        for position, reference in enumerate(self._active):
            if reference() is dataloader:
                self._active.append(self._active.pop(position))
                break

    def _remove_dataloader(self, dataloader: Any) -> None:
        """Forget a loader, when its iteration ends; whichever loader surrounds it is active again."""
        for position in range(len(self._active) - 1, -1, -1):
            if self._active[position]() is dataloader:
                del self._active[position]
                break
        self._active[:] = [reference for reference in self._active if reference() is not None]

    @staticmethod
    def _reset_state() -> None:
        """Let the next instance be built again; existing instances keep their attributes."""
        storage.gradient.renew()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )


def _restored_gradient_state(values: dict[str, Any]) -> GradientState:
    """Return the gradient state of this process; where there is none, with the values of the one that was pickled."""
    missing = not storage.gradient.current
    state = GradientState()
    if missing:
        state.__dict__.update(values)
    return state
