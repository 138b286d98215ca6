"""The interface of an Accelerator for the folders below `training`: annotations of strategies, overlays and checkpoints."""

from typing import Any, Protocol

import torch
from torch import nn

from accelerate.config.enums import DistributedType
from accelerate.config.project import ProjectConfiguration
from accelerate.parallelism_config import ParallelismConfig


class Prepared(Protocol):
    """The prepared and registered objects of an Accelerator; implemented by `training.prepared.PreparedObjects`.

    Attributes:
        engines: Wrappers of engines that train: of DeepSpeed.
        moved: The `modules.optimizer_remap.MovedParameters`, the replacements of parameters.
        logged: Messages that are logged once and were logged.
    """

    engines: list[Any]
    moved: Any
    logged: set[str]

    def find(self, obj: Any) -> Any | None:
        """Return the entry that an object belongs to, as the prepared one or as what that was made from."""


class Run(Protocol):
    """An Accelerator as strategies, overlays and checkpoints use it.

    Attributes:
        _models: Prepared models; libraries read and replace this list and the next ones.
        _optimizers: Prepared optimizers.
        _schedulers: Prepared schedulers.
        _dataloaders: Prepared loaders.
        _custom_objects: Objects of ``register_for_checkpointing``.
        _load_model_state_pre_hook: Functions that load models before `load_state` does, by number.
        _strategy: The `strategies.base.Strategy` of the run.
        extensions: Its `extension.Extensions`.
    """

    state: Any
    gradient_state: Any
    distributed_type: DistributedType
    device: torch.device
    device_placement: bool
    process_index: int
    local_process_index: int
    num_processes: int
    sync_gradients: bool
    gradient_accumulation_steps: int
    mixed_precision: str
    is_fsdp2: bool
    scaler: Any
    ddp_handler: Any
    project_configuration: ProjectConfiguration
    _models: list[nn.Module]
    _optimizers: list[Any]
    _schedulers: list[Any]
    _dataloaders: list[Any]
    _custom_objects: list[Any]
    _load_model_state_pre_hook: Any
    _strategy: Any
    extensions: Any

    @property
    def _state_io(self) -> Any:
        """The `strategies.state_io.StateIO` of the run."""

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The sizes of the mesh's dimensions."""

    @property
    def torch_device_mesh(self) -> Any:
        """The mesh of devices, or None."""

    @property
    def prepared(self) -> Prepared:
        """The prepared and registered objects."""

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""

    @property
    def split_batches(self) -> bool:
        """Whether a batch is split across ranks."""

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether a device map has placed a model on several devices."""

    def shard_model(self, model: nn.Module) -> nn.Module:
        """Shard a model in place, with the function that libraries replace."""

    def wait_for_everyone(self) -> None:
        """Wait for all ranks."""
