"""Replacements of DeepSpeed's objects: configuration access, wrappers around its engine, and placeholders for its own."""

import importlib
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import torch

from accelerate.base.imports import is_deepspeed_available
from accelerate.extensions.deepspeed.plugin import DeepSpeedPlugin
from accelerate.modules.norms import clip_grad_norm
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState

# DeepSpeed's optimizers for states in host memory, by a part of the names of torch's: their class, and the options that they take.
_ON_THE_HOST = {
    "adam": ("DeepSpeedCPUAdam", ("lr", "betas", "eps", "weight_decay", "amsgrad")),
    "adagrad": ("DeepSpeedCPUAdagrad", ("lr", "eps", "weight_decay")),
    "lion": ("DeepSpeedCPULion", ("lr", "betas", "weight_decay")),
}


def get_active_deepspeed_plugin(state: AcceleratorState) -> DeepSpeedPlugin:
    """Return the selected plugin of a state with one or several.

    Raises:
        ValueError: there is no plugin, or none is selected.
    """
    plugins: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = getattr(state, "deepspeed_plugins", None)
    if plugins is not None and not isinstance(plugins, dict):
        return plugins
    for plugin in (plugins or {}).values():
        if plugin.selected:
            return plugin
    available = f"the plugins are {sorted(plugins)}" if plugins else "there are no plugins"
    raise ValueError(
        f"No DeepSpeedPlugin is selected; {available}. Pass one to `Accelerator(deepspeed_plugin=...)`, or choose with "
        "`AcceleratorState().select_deepspeed_plugin(name)`."
    )


def map_pytorch_optim_to_deepspeed(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return DeepSpeed's optimizer for states in host memory with the groups and options of a torch optimizer.

    Args:
        optimizer: Adam, AdamW, Adagrad or Lion (by the name of its class); any other is returned as it is.

    Raises:
        ImportError: DeepSpeed is not installed.

    Source: https://deepspeed.readthedocs.io/en/latest/optimizers.html
    """
    if not is_deepspeed_available():
        raise ImportError("Offloaded optimizer states are updated by DeepSpeed's own optimizers; install `deepspeed`.")
    kind = type(optimizer).__name__.lower().removeprefix("fused")
    part = "adam" if kind == "adamw" else kind
    if part not in _ON_THE_HOST:  # NAdam, RAdam and others compute something else
        return optimizer
    name, usable = _ON_THE_HOST[part]
    options = {name: value for name, value in optimizer.defaults.items() if name in usable}
    if part == "adam":
        options["adamw_mode"] = kind == "adamw" or optimizer.defaults.get("decoupled_weight_decay", False)
    host_class: type[torch.optim.Optimizer] = getattr(importlib.import_module(f"deepspeed.ops.{part}"), name)
    return host_class(optimizer.param_groups, **options)


class DeepSpeedEngineWrapper:
    """Drives a DeepSpeed engine, which owns backward, clipping, accumulation and the optimizer's step."""

    __module__ = "accelerate.utils.deepspeed"  # the path in pickles

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        # The plain optimizer of stage 0 in float32 tells no norm.
        optimizer = getattr(engine, "optimizer", None)
        self._counts_norm = isinstance(optimizer, torch.optim.Optimizer) and not hasattr(
            optimizer, "_global_grad_norm"
        )
        self._norm: torch.Tensor | None = None
        # How many contexts hold its step back, whatever is passed to `backward`: the next one outside steps with all gradients.
        self._held = 0

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Run backward, and step where `sync_gradients` says that an accumulation step ends.

        Collective: call on every rank.
        """
        sync_gradients = sync_gradients and not self._held
        # The accumulation step is counted here rather than in the engine, because a data loader's end closes it early.
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            if self._counts_norm:
                # Nothing is scaled: the engine clips.
                self._norm = clip_grad_norm(self.engine.module.parameters(), float("inf"))
            self.engine.step()  # clips, steps optimizer and scheduler, clears gradients

    def get_global_grad_norm(self) -> float | None:
        """Return the gradients' norm over all ranks at the last step; None before the first."""
        norm = self._norm if self._counts_norm else self.engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, torch.Tensor) else norm


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """The optimizer of a DeepSpeed engine, which steps it and clears gradients: these calls do nothing here."""

    __module__ = "accelerate.utils.deepspeed"  # the path in pickles

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine clears gradients in its step."""

    def step(self) -> None:  # type: ignore[override]  # it takes no closure
        """Update nothing: the engine stepped in `DeepSpeedEngineWrapper.backward`."""
        if self.gradient_state.sync_gradients:
            for hook in self._extensions.step_ends:
                hook(self)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the engine skipped its last step because fp16 gradients overflowed."""
        return bool(getattr(self.optimizer, "overflow", False))


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """The scheduler of a DeepSpeed engine; the engine steps it."""

    __module__ = "accelerate.utils.deepspeed"  # the path in pickles

    def step(self) -> None:
        """Do nothing: the engine stepped in `DeepSpeedEngineWrapper.backward`."""

    def continue_from(self, saved: int | None) -> None:
        """Do nothing: the engine advances it once for each optimizer step, on any number of replicas."""


class DummyOptim:
    """Stands for the optimizer that the DeepSpeed config describes, until `prepare` replaces it.

    Args:
        params: the parameters or parameter groups.
        lr: the learning rate, where the config says "auto".
        weight_decay: the weight decay, where the config says "auto".
        kwargs: kept for the user.
    """

    __module__ = "accelerate.utils.deepspeed"  # the path in pickles
    _prepared_as = "optimizer"

    def __init__(self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """Stands for the scheduler that the DeepSpeed config describes, until `prepare` replaces it.

    Args:
        optimizer: the optimizer it belongs to, a `DummyOptim` for instance.
        total_num_steps: batches of the full training, counted on one process, if the config says "auto". `prepare` divides
            them by the number of processes, unless they split batches.
        warmup_num_steps: steps of the engine in the warm-up, if the config says "auto".
        lr_scheduler_callable: builds a scheduler from an optimizer; None uses the config's.
        kwargs: kept for the user.
    """

    __module__ = "accelerate.utils.deepspeed"  # the path in pickles
    _prepared_as = "scheduler"

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


def is_engine(model: Any) -> TypeGuard[Any]:
    """Whether this is a prepared engine, not a model that was prepared only for evaluation."""
    return hasattr(model, "save_checkpoint") and hasattr(model, "zero_optimization_stage")
