"""Expert parallelism: the experts of each layer are spread over ranks, which send each other the tokens.

Transformers shards them by the plan of the model, and exchanges tokens. FSDP2 shards the remaining weights of each expert
over the ranks that have the same experts (`efsdp`). Gradients are the mean over all batches, like those of other parameters.

Source: https://arxiv.org/abs/2006.16668
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from accelerate.base.versions import is_torch_version
from accelerate.extensions.same_model import consistency
from accelerate.modules.optimizer_remap import named, remap_optimizers
from accelerate.modules.unwrap import is_compiled_module
from accelerate.runtime.run import Run
from accelerate.strategies.mesh import ranks_of_experts


def prepare(accelerator: Run, objects: Sequence[Any]) -> tuple[Any, ...]:
    """Spread the experts of unsharded models among the objects over ranks, in place. Each rank has the same weights.

    Collective: call on every rank.

    Raises:
        ValueError: the run does not shard by FSDP2, splits layers too, or a model has no plan for its experts.
    """
    layout = accelerator.parallelism_config
    models = [item._orig_mod if is_compiled_module(item) else item for item in objects if isinstance(item, nn.Module)]
    models = [model for model in models if not any(modules(model))]
    if models and is_torch_version("<", "2.8"):
        raise ValueError(
            f"ep_size={layout.ep_size} needs torch 2.8 or newer, which divides gradients by another number than the ranks that exchange "
            "them. Run pip install 'torch>=2.8', or set ep_size=1."
        )
    for model in models:
        if not accelerator.is_fsdp2 or layout.tp_enabled or not getattr(model, "ep_plan", None):
            raise ValueError(
                f"ep_size={layout.ep_size} with tp_size={layout.tp_size} and {accelerator.distributed_type} cannot split "
                f"{type(model).__name__}, whose plan for experts is {getattr(model, 'ep_plan', None)}. It takes FSDP version 2, which averages "
                "the gradients of all that is no expert, and a mixture of experts of transformers 5.23 or newer. With layers that are split "
                "too, load the model with from_pretrained(..., distributed_config=DistributedConfig(tp_size=..., ep_size=...))."
            )
    for model in models:
        meshes, split = splitting(model, layout.ep_size, layout.dp_shard_size, layout.dp_replicate_size)
        consistency.require_same_model(accelerator, model)
        before = named(model)
        split()
        remap_optimizers(accelerator, model, before)
        layout.expert_mesh = meshes.get_mesh(("dp_replicate", "efsdp") if layout.dp_replicate_enabled else "efsdp")
    return tuple(objects)


def splitting(model: nn.Module, ep: int, shards: int, replicas: int = 1) -> tuple[Any, Callable[[], Any]]:
    """Return the meshes of a model's experts, and what leaves this rank's of them in it, by the model's own plan.

    Collective: call on every rank.
    """
    from transformers.distributed import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    asked = DistributedConfig(fsdp_size=shards, dp_replicate_size=replicas, ep_size=ep)
    config, _, meshes = model.prepare_distribute_model(asked)
    _, plan, _ = model._resolve_parallel_plans(config)
    return meshes, partial(apply_expert_parallelism, model, meshes.get_mesh("ep"), meshes.get_mesh("tp"), plan)


def modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose experts are spread over ranks. Not a collective."""
    yield from filter(ranks_of_experts, model.modules())
