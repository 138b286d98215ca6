"""The common base of strategies with shards; tensor parallelism and FSDP2. Their checkpoints are in `sharded_io`."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate.base.versions import is_torch_version
from accelerate.devices import row
from accelerate.modules import norms
from accelerate.modules.unwrap import is_compiled_module
from accelerate.runtime import rendezvous, torch_private
from accelerate.runtime.ranks import ALONE
from accelerate.runtime.run import Run
from accelerate.strategies import shard
from accelerate.strategies.base import Strategy
from accelerate.strategies.fsdp import public_module

_WITHOUT_COLLECTIVES = ("mps",)
# Exchanges of `fully_shard` on several processes; see `FSDP2.check`.
_GLOO_MIXES = is_torch_version("<", "2.10")


class Sharded(Strategy):
    """Parameters in parts: the strategies differ in how these are made, and are saved and loaded in the same way."""

    synchronises = True

    # -- prepare -------------------------------------------------------------------------------------------------

    def check(self, accelerator: Run, objects: Sequence[Any]) -> None:
        """Give a single process a process group; ValueError if torch cannot shard.

        Collective: call on every rank.
        """
        if accelerator.device.type in _WITHOUT_COLLECTIVES:
            raise ValueError(
                f"FSDP was requested on {accelerator.device}, where torch has no collectives. Train there without an FSDP "
                "plugin (one process holds the model), or pass cpu=True."
            )
        if not torch.distributed.is_initialized():
            kind = accelerator.device.type
            rendezvous.init_process_group(ALONE, "gloo" if kind == "cpu" else row(kind).backends[0])
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
        """Clip gradients to the total norm of the full tensors, which all ranks compute.

        Collective: call on every rank.
        """
        return norms.clip_grad_norm(parameters, max_norm, norm_type)


def note_unsharded_gradients(accelerator: Run, model: nn.Module) -> None:
    """Let extensions act once, when gradients add up without an exchange."""
    if "no_sync" not in accelerator.prepared.logged:
        accelerator.prepared.logged.add("no_sync")
        for hook in accelerator.extensions.unsharded_gradients:
            hook(model)


def _say_once(accelerator: Run, message: str) -> None:
    if message not in accelerator.prepared.logged:
        accelerator.prepared.logged.add(message)
        public_module().logger.warning(message)


class FSDP2(Sharded):
    """Shards along the first dimension, as DTensors, over the data-parallel dimensions of the mesh."""

    def check(self, accelerator: Run, objects: Sequence[Any]) -> None:
        """Refuse a gloo that mixes up exchanges."""
        if _GLOO_MIXES and accelerator.num_processes > 1 and dist.get_backend() == "gloo":
            raise ValueError(
                "fsdp_version=2 on CPUs with several processes needs torch 2.10 or newer: gloo of older ones mixes up the exchanges of "
                "`fully_shard`, and weights come out wrong. Run pip install 'torch>=2.10', or set fsdp_version=1."
            )
        super().check(accelerator, objects)

    def wrap_model(self, accelerator: Run, model: nn.Module) -> nn.Module:
        """Shard the model in place, through the function that libraries replace."""
        return accelerator.shard_model(model)

    @contextlib.contextmanager
    def whole_parameters(self, accelerator: Run, model: nn.Module) -> Iterator[nn.Module]:
        """Gather all units at once, and keep them through forwards.

        Collective: call on every rank.
        """
        with torch_private.unsharded(list(shard.roots(model))):
            yield self.unwrap_model(model)

    @contextlib.contextmanager
    def no_sync(self, accelerator: Run, model: nn.Module) -> Iterator[None]:
        """Keep unsharded gradients on each rank inside the context, by `set_requires_gradient_sync`."""
        inner: Any = model._orig_mod if is_compiled_module(model) else model
        # None for a model prepared for evaluation. The outer context releases the roots that are held already.
        held_roots: list[Any] = [root for root in shard.roots(inner) if not getattr(root, "_accelerate_held", False)]
        if held_roots:
            note_unsharded_gradients(accelerator, model)
        for root in held_roots:
            root.set_requires_gradient_sync(False)
            root._accelerate_held = True
        try:
            yield
        finally:
            for root in held_roots:
                root._accelerate_held = False
                root.set_requires_gradient_sync(True)
