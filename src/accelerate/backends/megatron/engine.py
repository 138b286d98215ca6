"""The engine: a model, its optimizer and its scheduler become one of Megatron core, whose call is a whole training step."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate.backends.megatron.models import Row, Translation, chosen
from accelerate.checkpoint.state import Entries, Wanted, run_on_all_ranks, tied_again
from accelerate.config.megatron import MegatronLMPlugin
from accelerate.parallel.mesh import take_from_first
from accelerate.runtime.run import Run
from accelerate.utils.megatron_lm import (
    GPTTrainStep,
    MegatronLMDummyScheduler,
)
from accelerate.utils.operations import send_to_device

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MegatronEngine(nn.Module):
    """A model of transformers cut by Megatron core, with its optimizer and schedule.

    In training mode a call takes a whole step on all of a batch's micro-batches: forward and backward passes, clipping, optimizer, scheduler;
    else the forward passes alone. It returns the loss, the mean over all data-parallel replicas, on every rank.

    Args:
        accelerator: The Accelerator.
        model: Of transformers; it gives its weights away, and stays as a model without any ("meta").
        optimizer: Of torch, for parameters of the model; None for evaluation alone.
        scheduler: A `MegatronLMDummyScheduler`, a torch scheduler of the optimizer, or None.
    """

    def __init__(self, accelerator: Run, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.transformer.module import Float16Module

        super().__init__()
        self.plugin: MegatronLMPlugin = accelerator.state.megatron_lm_plugin
        self.device, self.groups = accelerator.device, parallel_state
        self.translation = run_on_all_ranks(lambda: Translation(self.plugin, model))
        dtype = _DTYPES.get(accelerator.mixed_precision, torch.float32)
        self.core = core = self.translation.build(self.plugin, dtype).to(self.device)
        given = dict(model.named_parameters(remove_duplicate=False))
        numbers = {
            id(one): number
            for number, group in enumerate(getattr(optimizer, "param_groups", ()))
            for one in group["params"]
        }
        self._load_weights(given)
        trained = run_on_all_ranks(lambda: self._groups_of(given, numbers))
        wrapped = core if dtype is torch.float32 else Float16Module(core.config, core)
        arguments = self.translation.arguments
        averaging = chosen(DistributedDataParallelConfig, arguments, grad_reduce_in_fp32=True)
        self.module = DistributedDataParallel(core.config, averaging, wrapped) if optimizer is not None else wrapped
        self.optimizer = self.scheduler = self._followed = None
        if optimizer is not None:
            self._build_optimizer(optimizer, trained)
            self._build_scheduler(optimizer, scheduler)
            core.config.finalize_model_grads_func = finalize_model_grads
            core.config.grad_scale_func = self.optimizer.scale_loss
            core.config.no_sync_func = self.module.no_sync
            for group in optimizer.param_groups:
                group["params"] = [nn.Parameter(torch.empty(0)) for _ in group["params"][:1]]
            optimizer.state.clear()
        kind = self.plugin.custom_train_step_class or GPTTrainStep
        self.train_step_handler = kind(accelerator, arguments, **self.plugin.custom_train_step_kwargs or {})
        self.grad_norm: float | None = None
        self.step_was_skipped = False
        # Which stage has each of core's parameters, the first of several.
        stages: list[Any] = [None] * dist.get_world_size(self._pipeline)
        dist.all_gather_object(stages, list(self._own), group=self._pipeline)
        self._stage_of = {name: stage for stage in reversed(range(len(stages))) for name in stages[stage]}
        model.to("meta")
        getattr(model, "tie_weights", lambda: None)()
        self.__dict__["source"] = model  # no module of this one: it has no weights

    # -- building ------------------------------------------------------------------------------------------------

    @property
    def _pipeline(self) -> Any:
        return self.groups.get_pipeline_model_parallel_group()

    @property
    def _own(self) -> dict[str, nn.Parameter]:
        """This rank's parameters, the layers counted through all stages."""
        found, shift = {}, 0
        for name, parameter in self.core.named_parameters():
            before, layers, after = name.partition("decoder.layers.")
            if layers:
                number, _, rest = after.partition(".")
                shift = self.core.decoder.layers[int(number)].layer_number - 1
                name = f"{layers}{shift}.{rest}"
            found[name] = parameter
        return found

    def _load_weights(self, given: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's parts of the weights that rank 0 has. All ranks."""
        own, rank = self._own, self.groups.get_tensor_model_parallel_rank()
        for (row, name), theirs in self.translation.named():
            with torch.no_grad():
                whole = [given[one].detach().to(self.device) for one in theirs]
                for one in whole:
                    take_from_first(one, self.device)
                if name in own:
                    packed, parameter = row.pack(whole, self.translation.sizes), own[name]
                    parameter.copy_(
                        packed.chunk(self.plugin.tp_degree, _cut(parameter))[rank] if _is_cut(parameter) else packed
                    )

    def _groups_of(self, given: Mapping[str, torch.Tensor], numbers: Mapping[int, int]) -> dict[str, int]:
        """Return the optimizer's group of each of core's parameters; those that it does not train get no gradients."""
        found = {}
        for (_, name), theirs in self.translation.named():
            groups = {numbers.get(id(given[one])) if given[one].requires_grad else None for one in theirs}
            if len(groups) > 1:
                raise ValueError(
                    f"{theirs} are one parameter of Megatron core. Put them into one group of the optimizer."
                )
            number = groups.pop()
            if name in self._own:
                self._own[name].requires_grad_(number is not None)
                found[name] = number
        if numbers and set(found.values()) == {None} and self.plugin.pp_degree == 1:
            raise ValueError(
                "The optimizer holds no parameter of the model. Make it from model.parameters() of the model as it is now."
            )
        return found

    def _build_optimizer(self, optimizer: torch.optim.Optimizer, groups: Mapping[str, int]) -> None:
        from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
        from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate

        arguments = self.translation.arguments
        arguments.update(min_lr=self.plugin.min_lr)
        decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(optimizer.defaults.get("decoupled_weight_decay"))
        more = {"params_dtype": self.core.config.params_dtype, "decoupled_weight_decay": decoupled}
        config = chosen(OptimizerConfig, arguments, **more)
        names = {id(parameter): name for name, parameter in self._own.items()}
        overrides = {}
        for number, group in enumerate(optimizer.param_groups):
            predicate = ParamWithNamePredicate(f"group {number}", lambda one, _, n=number: groups[names[id(one)]] == n)
            # Core tells groups apart by the two factors when it loads a checkpoint; its scheduler multiplies by the second.
            overrides[ParamKey(with_name_predicate=predicate)] = {
                "max_lr": group["lr"],
                "lr_mult": group["lr"] / (config.lr or 1.0),
                "min_lr": self.plugin.min_lr,
                "wd_mult": group["weight_decay"] / config.weight_decay
                if config.weight_decay
                else group["weight_decay"],
                "given_group": number,
            }
        self.optimizer = get_megatron_optimizer(config, [self.module], config_overrides=overrides)
        self._followed = optimizer
        self._follow()

    def _build_scheduler(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        if not isinstance(scheduler, MegatronLMDummyScheduler):
            self._followed = optimizer if scheduler is not None else None
            return
        self.plugin.set_scheduler_args(scheduler)
        plugin, found, self._followed = self.plugin, self.plugin.megatron_lm_default_args, None
        decay = self.translation.arguments["weight_decay"] or 1.0
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=optimizer.defaults["lr"],
            min_lr=plugin.min_lr,
            lr_warmup_steps=found["lr_warmup_iters"],
            lr_decay_steps=found["lr_decay_iters"],
            lr_decay_style=plugin.lr_decay_style,
            start_wd=decay if plugin.start_weight_decay is None else plugin.start_weight_decay,
            end_wd=decay if plugin.end_weight_decay is None else plugin.end_weight_decay,
            wd_incr_steps=found["lr_decay_iters"],
            wd_incr_style=plugin.weight_decay_incr_style,
        )

    def _follow(self, back: bool = False) -> None:
        """Let core's groups have the rates of the optimizer that was given, which a torch scheduler changes; or `back`, after loading."""
        for group in self.optimizer.param_groups if self._followed is not None else ():
            if "given_group" in group:
                theirs = self._followed.param_groups[group["given_group"]]
                source, target = (group, theirs) if back else (theirs, group)
                target.update(lr=source["lr"], weight_decay=source["weight_decay"])

    # -- running -------------------------------------------------------------------------------------------------

    def forward(self, **batch: Any) -> Any:
        """Take a step in training mode, else evaluate; return transformers' output with the loss. All ranks."""
        from transformers.modeling_outputs import CausalLMOutput

        figures = self.train_step(**batch) if self.training and torch.is_grad_enabled() else self.eval_step(**batch)
        return CausalLMOutput(loss=figures.get("lm loss", next(iter(figures.values()))))

    def train_step(self, **batch: Any) -> dict[str, torch.Tensor]:
        """Take a whole step on a batch, and return the figures of the step's loss function. All ranks."""
        if self.optimizer is None:
            raise ValueError(
                "This model was prepared without an optimizer. Prepare both in one call, or call model.eval()."
            )
        self.module.zero_grad_buffer()
        self.optimizer.zero_grad()
        figures = self._run(batch, forward_only=False)
        self._follow()
        stepped, self.grad_norm, _ = self.optimizer.step()
        self.step_was_skipped = not stepped
        if stepped and self.scheduler is not None:
            self.scheduler.step(increment=1)
        return figures

    @torch.no_grad()
    def eval_step(self, **batch: Any) -> dict[str, torch.Tensor]:
        """Evaluate a batch, and return the figures of the step's loss function. All ranks."""
        return self._run(batch, forward_only=True)

    def _run(self, batch: Mapping[str, torch.Tensor], forward_only: bool) -> dict[str, torch.Tensor]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if not batch or not all(isinstance(value, torch.Tensor) for value in batch.values()):
            raise ValueError(
                f"A model of Megatron-LM is called with tensors by name, model(**batch), and got {list(batch)}."
            )
        cut = {name: value.chunk(self.plugin.num_micro_batches) for name, value in batch.items()}
        batches = [
            send_to_device(dict(zip(cut, values, strict=True)), self.device)
            for values in zip(*cut.values(), strict=True)
        ]
        rows, length = next(iter(batches[0].values())).shape[:2]
        if length % self.plugin.tp_degree and self.plugin.sequence_parallelism:
            raise ValueError(
                f"Sequences of {length} tokens are not cut over tp_degree={self.plugin.tp_degree} ranks. Pad them to a multiple, or set "
                "sequence_parallelism=False."
            )
        found = get_forward_backward_func()(
            forward_step_func=self.train_step_handler.get_forward_step_func(),
            data_iterator=iter(batches),
            model=[self.module],
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=forward_only,
        )
        return self._reduced(found)

    def _reduced(self, found: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the mean of each figure over micro-batches and replicas: of sums and counts, or of means. All ranks."""
        figures: list[Any] = [None]
        if found:
            sums = {name: torch.stack([one[name].float() for one in found]).sum(0) for name in found[0]}
            for name, value in sums.items():
                dist.all_reduce(value, group=self.groups.get_data_parallel_group())
                count = (
                    len(found) * self.groups.get_data_parallel_world_size()
                    if value.dim() == 0
                    else value[1].clamp(min=1)
                )
                sums[name] = (value if value.dim() == 0 else value[0]) / count
            figures = [{name: value.item() for name, value in sums.items()}]
        if self.plugin.pp_degree == 1:
            return sums
        dist.broadcast_object_list(figures, self.groups.get_pipeline_model_parallel_last_rank(), group=self._pipeline)
        return {name: torch.tensor(value, device=self.device) for name, value in figures[0].items()}

    def megatron_generate(self, *inputs: Any, **options: Any) -> Any:
        """Refuse: core generates by engines of its own, for GPUs. Any rank.

        Raises:
            NotImplementedError: always; the message says how to generate.
        """
        raise NotImplementedError(
            "megatron_generate: core's inference engines need CUDA and a tokenizer of its own. Load accelerator.get_state_dict(model) into the "
            "transformers model, and call its `generate`."
        )

    # -- weights and checkpoints ---------------------------------------------------------------------------------

    def entries(self, wanted: Wanted) -> Entries:
        """Yield the wanted entries of the transformers model's state dict, each whole. All ranks, in step."""
        own, like, again = self._own, self.source.state_dict(), tied_again(self.source)
        here = self.groups.get_pipeline_model_parallel_rank()
        for (row, name), theirs in self.translation.named():
            if name not in self._stage_of or not any(wanted(one) and one not in again for one in theirs):
                continue
            stage = self._stage_of[name]
            if stage == here:
                parts = self._whole(row, own[name])
            else:
                parts = [
                    torch.empty(like[one].shape, dtype=self.core.config.params_dtype, device=self.device)
                    for one in theirs
                ]
            for one, value in zip(theirs, parts, strict=True):
                if self.plugin.pp_degree > 1:
                    dist.broadcast(value, dist.get_global_rank(self._pipeline, stage), group=self._pipeline)
                if wanted(one):
                    yield one, value

    def _whole(self, row: Row, parameter: nn.Parameter) -> list[torch.Tensor]:
        value = parameter.detach()
        if _is_cut(parameter) and self.plugin.tp_degree > 1:
            parts = [torch.empty_like(value) for _ in range(self.plugin.tp_degree)]
            dist.all_gather(parts, value.contiguous(), group=self.groups.get_tensor_model_parallel_group())
            value = torch.cat(parts, _cut(parameter))
        return row.unpack(value, self.translation.sizes)

    def sharded_state(self, optimizer: bool, loading: bool) -> dict[str, Any]:
        """Return what core saves and loads: weights, and with `optimizer` its state and that of the scheduler. All ranks."""
        state: dict[str, Any] = {"model": self.core.sharded_state_dict()}
        if optimizer and self.optimizer is not None:
            if not loading:
                self._follow()
            plain = [_begun(part.optimizer) for part in self.optimizer.chained_optimizers]
            # What any division reads, core loads into Apex's and Transformer Engine's Adam alone.
            layout = "dp_reshardable" if any(plain) else "fully_reshardable"
            found = {"distrib_optim_sharding_type": layout}
            state["optimizer"] = self.optimizer.sharded_state_dict(state["model"], is_loading=loading, metadata=found)
            bound = layout == "dp_reshardable" and self.plugin.use_distributed_optimizer
            state["divided"] = [self.plugin.tp_degree, self.plugin.pp_degree] if bound else None
            if self.scheduler is not None:
                state["scheduler"] = self.scheduler.state_dict()
        return state

    @torch.no_grad()
    def load_sharded(self, state: Mapping[str, Any], optimizer: bool, strict: bool = True) -> None:
        """Take what core has loaded for `sharded_state`. All ranks."""
        self.core.load_state_dict(state["model"], strict=strict)
        if self.optimizer is None:
            return
        if not optimizer:
            self.optimizer.reload_model_params()
            return
        self.optimizer.load_state_dict(state["optimizer"])
        for part in self.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups if _begun(part.optimizer) else ():
                # Core gives the states of torch's Adam one count together, or none.
                for one in group["params"] if "step" in group else ():
                    part.optimizer.state[one]["step"] = torch.tensor(float(group["step"]))
        self._follow(back=True)
        if self.scheduler is not None and "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])


def _begun(optimizer: Any) -> bool:
    """Give torch's Adam the states that its first step makes, which core wants to be there; return whether it is one."""
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return False
    for parameter in (
        one for group in optimizer.param_groups for one in group["params"] if one not in optimizer.state
    ):
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    return True


def _is_cut(parameter: nn.Parameter) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def _cut(parameter: nn.Parameter) -> int:
    return parameter.partition_dim
