"""What strategies share whose ranks hold parts of the parameters; and tensor parallelism and FSDP2, which need little more."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate.base.versions import is_torch_version
from accelerate.checkpoint import layouts, optimizers, save
from accelerate.checkpoint import state as states
from accelerate.checkpoint.load import Deferred, loads_by_name, uses_torch_load
from accelerate.checkpoint.state import Entries, Layout, Wanted
from accelerate.devices import row
from accelerate.modules import norms
from accelerate.modules.unwrap import is_compiled_module
from accelerate.parallel import shard
from accelerate.precision import footprint
from accelerate.runtime import rendezvous, torch_private
from accelerate.runtime.run import Run
from accelerate.strategies.base import Strategy
from accelerate.utils import fsdp_utils

_WITHOUT_COLLECTIVES = ("mps",)
# Exchanges of `fully_shard` on several processes; see `FSDP2.check`.
_GLOO_MIXES = is_torch_version("<", "2.10")


@dataclass(eq=False)
class ShardedModel:
    """A model whose state is that of its shards, as a restore takes it.

    Attributes:
        loads_by_name: names and shapes of the state have been compared with all of the model, which cannot refuse it.
        finish: reads the state over the model's.
    """

    model: nn.Module
    own: states.ModelState
    adapter_only: bool = False
    loads_by_name: bool = False
    finish: Callable[[], None] | None = None

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return what this rank has of the parameters."""
        return self.model.parameters()

    def buffers(self) -> Iterable[torch.Tensor]:
        """Return the buffers."""
        return self.model.buffers()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, adapter_only: bool = False) -> Any:
        """Load shards, by the names of the user's model. All ranks."""
        if self.finish is not None:
            return self.finish()
        options: dict[str, Any] = {}
        if self.adapter_only:
            options["setter"] = functools.partial(fsdp_utils._set_model_state_dict, adapter_only=True)
        return states.apply_model(self.model, state, self.own, strict=strict, **options)


class Sharded(Strategy):
    """Parameters in parts: the strategies differ in how these are made, and are saved and loaded in the same way."""

    synchronises = True
    # A checkpoint has the shards as they are; the whole is not gathered for it.
    saves_shards = True
    save_options = ("use_dcp", "adapter_only")

    # -- prepare -------------------------------------------------------------------------------------------------

    def check(self, accelerator: Run, objects: Sequence[Any]) -> None:
        """Give a process that is alone a group of its own; ValueError where torch cannot shard. All ranks."""
        if accelerator.device.type in _WITHOUT_COLLECTIVES:
            raise ValueError(
                f"FSDP was asked for on {accelerator.device}, where torch has no collectives. Train there without an FSDP "
                "plugin (one process holds the model), or pass cpu=True."
            )
        if not torch.distributed.is_initialized():
            kind = accelerator.device.type
            rendezvous.init_process_group(rendezvous.ALONE, "gloo" if kind == "cpu" else row(kind).backends[0])
        plugin = accelerator.state.fsdp_plugin
        policy = plugin.cpu_offload
        offload = getattr(policy, "offload_params", type(policy).__name__ == "CPUOffloadPolicy")
        if offload and accelerator.device.type == "cpu":
            _say_once(accelerator, "cpu_offload=True has no effect on the CPU: parameters are in host memory anyway.")
        for name in ("state_dict_config", "optim_state_dict_config"):
            config = getattr(plugin, name)
            if config is not None and not (config.offload_to_cpu and getattr(config, "rank0_only", True)):
                _say_once(
                    accelerator,
                    f"{name}={config} has no effect: rank 0 gathers states, or all write shards, as state_dict_type says.",
                )

    def needs_wrapper(self, accelerator: Run, model: nn.Module) -> bool:
        """Always: shards of a frozen model save as much memory."""
        return True

    # -- step ----------------------------------------------------------------------------------------------------

    def clip_grad_norm(
        self, accelerator: Run, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip gradients to the total norm of the whole tensors, which all ranks learn. All ranks."""
        return norms.clip_grad_norm(parameters, max_norm, norm_type)

    # -- checkpoint ----------------------------------------------------------------------------------------------

    def layout(self, accelerator: Run, use_dcp: bool = True) -> Layout:
        """Return how a checkpoint keeps the shards."""
        return layouts.layout_of(accelerator.state.fsdp_plugin, use_dcp)

    def whole_tensors(self, accelerator: Run, model: nn.Module, wanted: Wanted = bool) -> Entries:
        """Gather a tensor at a time, on each rank. All ranks, in step."""
        again = states.tied_again(model)
        for name, value in states.model_state(model).values.items():
            if wanted(name) and name not in again:
                yield name, states.full(value)

    def model_state(self, accelerator: Run, model: nn.Module, unwrap: bool) -> dict[str, Any]:
        """Return the whole state dict in host memory on rank 0, and an empty one elsewhere. All ranks."""
        return states.collected(self.whole_tensors(accelerator, model), model)

    def save_model(self, accelerator: Run, state: dict[str, Any], folder: str, index: int, **options: Any) -> None:
        """Write the shards of a model. All ranks."""
        values = states.model_state(accelerator._models[index], _getter(options.get("adapter_only", False))).values
        layouts.write(values, folder, "model", index, self.layout(accelerator, options.get("use_dcp", True)))

    def load_model(
        self, accelerator: Run, model: nn.Module, folder: str, index: int, **options: Any
    ) -> tuple[ShardedModel, dict[str, Any]]:
        """Read this rank's shards of a model, whichever ranks wrote it, and return what takes them, and them. All ranks."""
        adapter_only = options.get("adapter_only", False)
        prefer, strict = self.layout(accelerator), options.get("strict", True)
        by_name = not adapter_only and loads_by_name(model)
        state, own, finish = layouts.read_for_model(
            model, folder, index, prefer, strict, over=by_name, getter=_getter(adapter_only)
        )
        return ShardedModel(model, own, adapter_only, by_name, finish), state

    def save_optimizer(self, accelerator: Run, optimizer: Any, folder: str, index: int, **options: Any) -> None:
        """Write the shards of an optimizer's state, by the names of parameters. All ranks."""
        model, _ = model_of(optimizer, accelerator._models)
        state = states.optimizer_state(optimizer, model)
        layouts.write(state, folder, "optimizer", index, self.layout(accelerator))

    def load_optimizer(self, accelerator: Run, optimizer: Any, folder: str, index: int, **options: Any) -> Deferred:
        """Read this rank's shards of an optimizer's state, whichever ranks wrote it. All ranks."""
        model, groups = model_of(optimizer, accelerator._models)
        over = uses_torch_load(states.inner_optimizer(optimizer))
        return optimizers.read_for_optimizer(
            optimizer, model, folder, index, self.layout(accelerator), over=over, groups=groups
        )


class TensorParallel(Sharded):
    """Layers that `parallel.tensor` has split; there are no replicas, so no gradients to average."""

    name = "tensor_parallel"
    gathers_new_memory = True
    synchronises = False
    # The weights are gathered one after the other into a file that anybody reads.
    saves_shards = False
    save_options = ()

    def check(self, accelerator: Run, objects: Sequence[Any]) -> None:
        """Refuse nothing: the mesh was checked when it was described."""

    def needs_wrapper(self, accelerator: Run, model: nn.Module) -> bool:
        """Never: the layers themselves are split."""
        return False

    def clip_grad_value(self, accelerator: Run, parameters: Iterable[nn.Parameter], clip_value: float) -> None:
        """Clip each element of the parts that this rank has. All ranks."""
        norms.clip_grad_value(parameters, clip_value)

    def layout(self, accelerator: Run, use_dcp: bool = True) -> Layout:
        """Return how a checkpoint keeps what is split: gathered, as from any other run."""
        return "full"

    def save_model(self, accelerator: Run, state: dict[str, Any], folder: str, index: int, **options: Any) -> None:
        """Write the gathered weights, from rank 0. All ranks."""
        save.write_model(state, folder, index, **options)


def _getter(adapter_only: bool) -> Callable[..., dict[str, Any]] | None:
    """Return what takes the state of an active adapter alone; None for the whole model."""
    return functools.partial(fsdp_utils._get_model_state_dict, adapter_only=True) if adapter_only else None


def note_memory(accelerator: Run, model: nn.Module) -> None:
    """Say once what it costs that each rank holds whole gradients while it does not synchronise."""
    # The note counts all parameters, which is too slow for every micro-batch.
    if "no_sync" not in accelerator.prepared.logged:
        accelerator.prepared.logged.add("no_sync")
        if note := footprint.no_sync_memory_note(model):
            fsdp_utils.logger.warning(note)


def _say_once(accelerator: Run, message: str) -> None:
    if message not in accelerator.prepared.logged:
        accelerator.prepared.logged.add(message)
        fsdp_utils.logger.warning(message)


def model_of(optimizer: Any, models: Sequence[nn.Module]) -> tuple[nn.Module, list[list[str]]]:
    """Return the model that has all parameters of an optimizer, and their names, for each group; ValueError if none has."""
    model, groups = states.owner(optimizer, models)
    if model is not None:
        return model, groups
    raise ValueError(
        f"No prepared model has all parameters of the optimizer ({type(states.inner_optimizer(optimizer)).__name__}), so "
        "its state cannot be saved as shards. Give each model an optimizer of its own, made from its parameters."
    )


class FSDP2(Sharded):
    """Shards along the first dimension, as DTensors, over the data-parallel dimensions of the mesh."""

    name = "fsdp2"
    gathers_new_memory = True

    def check(self, accelerator: Run, objects: Sequence[Any]) -> None:
        """Refuse weights that one rank alone has where layers are split first, from those of every rank."""
        if _GLOO_MIXES and accelerator.num_processes > 1 and dist.get_backend() == "gloo":
            raise ValueError(
                "fsdp_version=2 on CPUs with several processes needs torch 2.10 or newer: gloo of older ones mixes up the exchanges of "
                "`fully_shard`, and weights come out wrong. Run pip install 'torch>=2.10', or set fsdp_version=1."
            )
        layout = accelerator.parallelism_config
        split = layout is not None and (layout.tp_enabled or layout.ep_size > 1)
        if split and accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:
            raise ValueError(
                f"cpu_ram_efficient_loading=True with tp_size={layout.tp_size} and ep_size={layout.ep_size}: layers are split before they are sharded, and each "
                "group of ranks needs their weights for that. Set cpu_ram_efficient_loading=False."
            )
        super().check(accelerator, objects)

    def wrap_model(self, accelerator: Run, model: nn.Module) -> nn.Module:
        """Shard the model in place, through the function that libraries replace."""
        return accelerator.shard_model(model)

    @contextlib.contextmanager
    def whole_parameters(self, accelerator: Run, model: nn.Module) -> Iterator[nn.Module]:
        """Gather all units at once, and keep them through forwards. All ranks."""
        with torch_private.unsharded(list(shard.roots(model))):
            yield self.unwrap_model(model)

    @contextlib.contextmanager
    def no_sync(self, accelerator: Run, model: nn.Module) -> Iterator[None]:
        """Keep whole gradients on each rank meanwhile, by `set_requires_gradient_sync`."""
        inner = model._orig_mod if is_compiled_module(model) else model
        # None in a model that was prepared for evaluation; of those that are held already the outer context lets go.
        held = [root for root in shard.roots(inner) if not getattr(root, "_accelerate_held", False)]
        if held:
            note_memory(accelerator, model)
        for root in held:
            root.set_requires_gradient_sync(False)
            root._accelerate_held = True
        try:
            yield
        finally:
            for root in held:
                root._accelerate_held = False
                root.set_requires_gradient_sync(True)
