"""What functions of `training` use of an Accelerator: they are the bodies of its methods, and use its private attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from accelerate.runtime.run import Run

if TYPE_CHECKING:
    from collections import OrderedDict
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

    from accelerate.comm.base import Communicator
    from accelerate.config.enums import RNGType
    from accelerate.config.handlers import AutocastKwargs
    from accelerate.config.project import DataLoaderConfiguration
    from accelerate.extension import Extensions
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.strategies.base import Strategy
    from accelerate.strategies.state_io import StateIO
    from accelerate.training.prepared import PreparedObjects
    from accelerate.training.window import Window


class TrainingRun(Run, Protocol):
    """An Accelerator, as far as `training` knows it.

    Attributes:
        extensions: Those of this run; a hook is called through them.
        step: Micro-batches since the last one that ended a loader.
        deepspeed_config: The configuration that the engine of DeepSpeed has; only there once an engine is prepared.
        _exact_accumulation: Whether a short accumulation step is divided by its real length.
        _loaded_checkpoint: Location of the checkpoint that was loaded last, which automatic naming keeps.
        _scales_loss: Whether losses are divided by the length of an accumulation step here, and not by an engine.
        _sync_each_batch: Whether gradients are exchanged after every micro-batch.
        _unfinished_save: Location of a save that failed, which the next save of that name replaces.
        _window: The accumulation step that is open.
    """

    state: AcceleratorState
    gradient_state: GradientState
    prepared: PreparedObjects
    autocast_handler: AutocastKwargs | None
    dataloader_config: DataLoaderConfiguration
    deepspeed_config: dict[str, Any]
    deepspeed_engine_wrapped: Any
    flag_tensor: torch.Tensor | None
    has_lomo_optimizer: bool
    native_amp: bool
    rng_types: list[str | RNGType]
    extensions: Extensions
    step: int
    step_scheduler_with_optimizer: bool
    _exact_accumulation: bool
    _loaded_checkpoint: str | None
    _save_model_state_pre_hook: OrderedDict[int, Callable[..., None]]
    _scales_loss: bool
    _strategy: Strategy
    _sync_each_batch: bool
    _unfinished_save: str | None
    _window: Window

    # -- read alone ----------------------------------------------------------------------------------------------------

    @property
    def deepspeed_plugin(self) -> Any:
        """The `DeepSpeedPlugin` that is selected; None without DeepSpeed."""

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads every batch."""

    @property
    def even_batches(self) -> bool:
        """Whether ranks get equally many batches."""

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied asynchronously."""

    @property
    def split_batches(self) -> bool:
        """Whether a batch is split across ranks."""

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the order of samples follows from seed and epoch."""

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether torchdata's loader is inside prepared ones."""

    @property
    def _communicator(self) -> Communicator:
        """The communicator of the run."""

    @property
    def _state_io(self) -> StateIO:
        """What a checkpoint has of the strategy."""

    # -- methods that libraries replace, so they are called on the Accelerator -----------------------------------------

    def autocast(self) -> AbstractContextManager[None]:
        """Return the autocast context of the precision in force."""

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: nn.Module) -> Any:
        """Adapt a loader to DeepSpeed's sequence parallelism."""

    def get_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return a model's full state dict."""

    def lomo_backward(self, loss: torch.Tensor, learning_rate: Any) -> None:
        """Run the backward pass of LOMO optimizers."""

    def prepare_data_loader(self, data_loader: Any) -> Any:
        """Prepare one loader."""

    def save_state(self, output_dir: str | None) -> Any:
        """Save a checkpoint."""

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return a model without its wrappers."""

    def wait_for_everyone(self) -> None:
        """Wait for all ranks."""

    def _do_sync(self) -> None:
        """Count a micro-batch, and decide whether gradients are synchronised in it."""

    def _prepare_one(self, obj: Any, first_pass: bool = False, device_placement: bool | None = None) -> Any:
        """Prepare one object of a pass."""

    def _prepare_device_mesh(self) -> None:
        """Build the device mesh."""
