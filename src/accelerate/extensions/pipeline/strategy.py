"""Pipeline parallelism: each rank has the stages of its position in a pipeline, with replicas or FSDP2 shards if configured."""

import contextlib
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate.checkpoint import layouts, state
from accelerate.checkpoint.model_io import ModelIO, io_of
from accelerate.checkpoint.save import SavePlan
from accelerate.checkpoint.state import Entries, Layout, Wanted
from accelerate.config.handlers import GradScalerKwargs
from accelerate.config.strategies import traits_of
from accelerate.extensions.pipeline import is_pipeline
from accelerate.modules import norms
from accelerate.parallelism_config import ParallelismConfig
from accelerate.runtime.run import Run
from accelerate.strategies.sharded import FSDP2, Sharded
from accelerate.strategies.sharded_io import ShardedIO, model_of

# Settings of an FSDP plugin.
_NOT_OF_STAGES = (
    *("cpu_offload", "ignored_modules", "activation_checkpointing", "module_precision"),
    *("forward_prefetch", "backward_prefetch"),
)


def _pipelines(accelerator: Run) -> list[Any]:
    return [model for model in accelerator._models if is_pipeline(model)]


class PipelineParallel(Sharded):
    """Stages of `training.pipeline`; a checkpoint has each rank's own tensors, under the names of the full model."""

    # -- prepare -------------------------------------------------------------------------------------------------

    def make_scaler(self, accelerator: Run, handler: GradScalerKwargs | None) -> None:
        """Return no scaler; ValueError for strategies and precisions that no pipeline has. The Accelerator calls it first."""
        layout: ParallelismConfig = accelerator.parallelism_config  # type: ignore[assignment]  # pp_size is set
        engine, size = traits_of(accelerator.distributed_type), layout.pp_size
        other_shards = engine.sharded and not accelerator.is_fsdp2
        if other_shards or engine.own_groups or engine.traced or not engine.places_batches:
            raise ValueError(
                f"pp_size={size} with {accelerator.distributed_type}: a pipeline trains without another strategy, with data parallelism, or with FSDP version 2. Remove the plugin, "
                "or set pp_size=1."
            )
        if accelerator.mixed_precision not in ("no", "bf16"):
            raise ValueError(
                f"mixed_precision={accelerator.mixed_precision!r} with pp_size={size}: stages do not share a gradient scaler. Use 'bf16' or 'no'."
            )

    def check(self, accelerator: Run, objects: Sequence[Any]) -> None:
        """Refuse models that were not divided, optimizers of other parameters, and settings that stages do not have.

        Collective: call on every rank.
        """
        layout: ParallelismConfig = accelerator.parallelism_config  # type: ignore[assignment]  # pp_size is set
        if accelerator.is_fsdp2:
            FSDP2().check(accelerator, ())
            plugin = accelerator.state.fsdp_plugin
            output = getattr(plugin.mixed_precision_policy, "output_dtype", None)
            refused = {name: getattr(plugin, name) for name in _NOT_OF_STAGES}
            refused["mixed_precision_policy.output_dtype"] = None if output is torch.float32 else output
            for name, value in refused.items():
                if value and type(value).__name__ != "OffloadPolicy":
                    raise ValueError(
                        f"{name}={value!r} with pp_size={layout.pp_size}: stages do not have it. Omit it, or set pp_size=1."
                    )
        pipelines = *_pipelines(accelerator), *(obj for obj in objects if is_pipeline(obj))
        pipeline_ids = {id(parameter) for model in pipelines for parameter in model.parameters()}
        for obj in objects:
            if isinstance(obj, nn.Module) and not is_pipeline(obj) and accelerator.prepared.find(obj) is None:
                raise ValueError(
                    f"pp_size={layout.pp_size}, but {type(obj).__name__} is a full model. Call accelerator.prepare_pipeline(model, ...), make the optimizer from "
                    "pipeline.parameters(), and prepare that; a model that does not train goes to prepare_model(model, evaluation_mode=True)."
                )
            groups = obj.param_groups if isinstance(obj, torch.optim.Optimizer) else ()
            if any(id(parameter) not in pipeline_ids for group in groups for parameter in group["params"]):
                raise ValueError(
                    f"The optimizer ({type(obj).__name__}) has parameters that no pipeline has on this rank. Call accelerator.prepare_pipeline first, and make the optimizer "
                    "from pipeline.parameters()."
                )

    def whole_parameters(self, accelerator: Run, model: nn.Module) -> contextlib.AbstractContextManager[nn.Module]:
        """Raise NotImplementedError: a rank has only its own stages."""
        raise NotImplementedError(
            "whole_parameters is not possible with pp_size above 1. Evaluate the pipeline, or load its checkpoint in a separate process."
        )

    # -- step ----------------------------------------------------------------------------------------------------

    def no_sync(self, accelerator: Run, model: Any) -> contextlib.AbstractContextManager[None]:
        """Return the pipeline's own context."""
        return model.no_sync() if is_pipeline(model) else contextlib.nullcontext()

    def join(self, joinables: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """Raise NotImplementedError: a stage has nothing to shadow the schedule of others with."""
        raise NotImplementedError("join_uneven_inputs is not possible with pp_size above 1. Use even_batches=True.")

    def clip_grad_norm(
        self, accelerator: Run, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip to the norm over all stages, what several have counted once. Collective: call on every rank."""
        parameters, pipelines = list(parameters), _pipelines(accelerator)
        if not pipelines:
            return super().clip_grad_norm(accelerator, parameters, max_norm, norm_type)
        repeated = {
            id(p) for part in pipelines for name, p in part.named_parameters() if name in part.holdings.repeated
        }
        return norms.clip_grad_norm(
            parameters, max_norm, norm_type, stages=pipelines[0].holdings.group, repeated=repeated
        )

    def clip_grad_value(self, accelerator: Run, parameters: Iterable[nn.Parameter], clip_value: float) -> None:
        """Clip each element of the gradients that this rank has. Collective: call on every rank."""
        norms.clip_grad_value(parameters, clip_value)


class PipelineModels(ModelIO):
    """How a pipeline gives its state: each rank has the tensors of its stages, under the names of the full model."""

    def tied_names(self, model: Any) -> list[list[str]]:
        """Return the groups of names that mean one parameter, which a pipeline has once. Not a collective."""
        ties: list[list[str]] = model.holdings.ties
        return ties

    def elsewhere(self, model: Any) -> Collection[str]:
        """Return the names that other stages have. Not a collective."""
        names: Collection[str] = model.holdings.elsewhere
        return names


class PipelineIO(ShardedIO):
    """The states of a run with pipelines."""

    has_all_names = False

    def layout(self, accelerator: Run, use_dcp: bool = True) -> Layout:
        """Return how a checkpoint keeps stages: as shards, whatever a plugin says, because no rank has all names."""
        return "sharded"

    def whole_tensors(self, accelerator: Run, model: nn.Module, is_selected: Wanted = bool) -> Entries:
        """Send each tensor from the first rank of the pipeline that has it to the others.

        Collective: call on every rank.
        """
        if not is_pipeline(model):
            yield from super().whole_tensors(accelerator, model, is_selected)
            return
        holdings: Any = model.holdings
        local_values = io_of(model).model_state(model).values
        saved = {*local_values, *holdings.elsewhere}
        for name, like in holdings.tensors.items():
            if name not in saved or not is_selected(name):
                continue
            if holdings.place in holdings.holders[name]:
                value = state.full(local_values[name]).contiguous()
            else:
                value = torch.empty_like(like, device=accelerator.device)
            dist.broadcast(value, holdings.ranks[holdings.holders[name][0]], group=holdings.group)
            yield name, value

    def save_optimizer(self, accelerator: Run, optimizer: Any, plan: SavePlan, index: int, **options: Any) -> None:
        """Write this rank's part of an optimizer's state, and the groups with the parameters of all stages.

        Collective: call on every rank.
        """
        model, _ = model_of(optimizer, accelerator._models)
        values = io_of(model).optimizer_state(optimizer, model)
        if is_pipeline(model):
            values["param_groups"] = _joined(values["param_groups"], model.holdings)
        layouts.write(values, plan, "optimizer", index, "sharded")


def _joined(groups: list[dict[str, Any]], holdings: Any) -> list[dict[str, Any]]:
    """Return an optimizer's groups with the names of all stages. All ranks of the pipeline; ValueError if their numbers differ."""
    groups_of_ranks: list[Any] = [None] * len(holdings.ranks)
    dist.all_gather_object(groups_of_ranks, groups, group=holdings.group)
    if len({len(of_rank) for of_rank in groups_of_ranks}) > 1:
        raise ValueError(
            f"The optimizer has {[len(of_rank) for of_rank in groups_of_ranks]} groups of parameters on the ranks of the pipeline. Give it the same groups on each, also empty ones."
        )
    return [
        {**same[0], "params": list(dict.fromkeys(itertools.chain.from_iterable(group["params"] for group in same)))}
        for same in zip(*groups_of_ranks, strict=True)
    ]
