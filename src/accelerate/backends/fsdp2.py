"""FSDP in its second version: torch's `fully_shard`, which shards every parameter in place."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from accelerate.backends.sharded import Sharded, note_memory
from accelerate.modules.unwrap import is_compiled_module
from accelerate.parallel import shard
from accelerate.runtime.run import Run
from accelerate.utils.versions import is_torch_version


class FSDP2(Sharded):
    """Shards along the first dimension, as DTensors, over the data-parallel dimensions of the mesh."""

    name = "fsdp2"

    def check(self, accelerator: Run, objects: Sequence[Any]) -> None:
        """Refuse weights that one rank alone has where layers are split first, from those of every rank."""
        if is_torch_version("<", "2.10") and accelerator.num_processes > 1 and dist.get_backend() == "gloo":
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
