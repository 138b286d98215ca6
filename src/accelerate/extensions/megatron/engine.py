"""The engine: a model, its optimizer and its scheduler become one of Megatron core; a call is a full training step."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate.base.nested import send_to_device
from accelerate.checkpoint.model_io import tied_again
from accelerate.checkpoint.state import Entries, Wanted, run_on_all_ranks
from accelerate.extensions.megatron.models import Row, Translation, build
from accelerate.extensions.megatron.plugin import MegatronLMPlugin
from accelerate.extensions.megatron.steps import GPTTrainStep, MegatronLMDummyScheduler
from accelerate.extensions.same_model.consistency import take_from_first
from accelerate.runtime.run import Run

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MegatronEngine(nn.Module):
    """A model of transformers sharded by Megatron core, with its optimizer and schedule.

    In training mode a call takes a full step on all of a batch's micro-batches: forward and backward passes, clipping,
    optimizer, scheduler. Otherwise it runs only the forward passes. It returns the loss, the mean over all data-parallel
    replicas, on every rank.

    Args:
        accelerator: The Accelerator.
        model: Of transformers; its weights move to the engine, and it stays as a model on "meta".
        optimizer: Of torch, for parameters of the model; None for evaluation.
        scheduler: A `MegatronLMDummyScheduler`, a torch scheduler of the optimizer, or None.
    """

    source: nn.Module
    # Of Megatron core, a library without types.
    core: Any
    module: Any
    optimizer: Any
    scheduler: Any

    def __init__(self, accelerator: Run, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer.module import Float16Module

        super().__init__()
        self.plugin: MegatronLMPlugin = accelerator.state.megatron_lm_plugin
        self.device, self.groups = accelerator.device, parallel_state
        self.translation = run_on_all_ranks(lambda: Translation(self.plugin, model))
        dtype = _DTYPES.get(accelerator.mixed_precision, torch.float32)
        self.core = core = self.translation.build(dtype).to(self.device)
        # This rank's parameters, the layers counted through all stages.
        layers, pattern = core.decoder.layers, re.compile(r"(?<=decoder\.layers\.)\d+")
        counted = partial(pattern.sub, lambda at: str(layers[int(at[0])].layer_number - 1))
        self._own = {counted(name): parameter for name, parameter in core.named_parameters()}
        self._pipeline = parallel_state.get_pipeline_model_parallel_group()
        parameters = dict(model.named_parameters(remove_duplicate=False))
        trained = run_on_all_ranks(lambda: _groups_of(self.translation.rows, parameters, optimizer))
        self._load_weights(parameters, trained)
        self.module = core if dtype is torch.float32 else Float16Module(core.config, core)
        self.optimizer = self.scheduler = None
        if optimizer is not None:
            averaging = build(DistributedDataParallelConfig, self.translation.arguments)
            self.module = DistributedDataParallel(core.config, averaging, self.module)
            self._build_optimizer(optimizer, scheduler)
        kind = self.plugin.custom_train_step_class or GPTTrainStep
        options = self.plugin.custom_train_step_kwargs or {}
        self.train_step_handler = kind(accelerator, self.translation.arguments, **options)
        self.grad_norm: float | None = None
        # Which stage has each of core's parameters, the first of several.
        stages: list[Any] = [None] * self.plugin.pp_degree
        dist.all_gather_object(stages, list(self._own), group=self._pipeline)
        self._stage_of = {name: stage for stage in reversed(range(len(stages))) for name in stages[stage]}
        model.to("meta")
        getattr(model, "tie_weights", lambda: None)()
        self.__dict__["source"] = model  # no module of this one: it has no weights

    # -- building ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _load_weights(self, parameters: Mapping[str, torch.Tensor], trained: Mapping[str, int | None]) -> None:
        """Take this rank's parts of the weights that rank 0 has, and note who trains them.

        Collective: call on every rank.
        """
        core_parameters = self._own
        ranks: int = self.plugin.tp_degree  # type: ignore[assignment]  # no degree is None
        for row in self.translation.rows:
            tensors = [parameters[name].detach().to(self.device) for name in row.sources]
            for tensor in tensors:
                take_from_first(tensor, self.device)
            if row.core in core_parameters:
                parameter, cut = core_parameters[row.core], _cut(core_parameters[row.core])
                whole = row.pack(tensors, len(parameter) * (ranks if cut == 0 else 1))
                rank = self.groups.get_tensor_model_parallel_rank()
                parameter.copy_(whole if cut is None else whole.chunk(ranks, cut)[rank])
                parameter.requires_grad_(trained[row.core] is not None)
                setattr(parameter, f"group_{trained[row.core]}", True)

    def _build_optimizer(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        """Build core's optimizer with the groups of the one that is given, which gives its parameters away, and core's scheduler."""
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        arguments, config = self.translation.arguments, self.core.config
        decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(optimizer.defaults.get("decoupled_weight_decay"))
        options = build(OptimizerConfig, arguments, decoupled_weight_decay=decoupled)
        decay, overrides = options.weight_decay or 1.0, {}
        for number, group in enumerate(optimizer.param_groups):
            rates = {"max_lr": group["lr"], "min_lr": options.min_lr, "wd_mult": group["weight_decay"] / decay}
            # Core reads this factor nowhere but when it loads, to distinguish groups.
            overrides[ParamKey(attr=f"group_{number}")] = rates | {"lr_mult": number}
        optimizer.state.clear()
        self.optimizer = get_megatron_optimizer(options, [self.module], config_overrides=overrides)
        for group in self.optimizer.param_groups:
            user_group = optimizer.param_groups[group["lr_mult"]]
            group |= {name: value for name, value in user_group.items() if name != "params"}
        self._given = optimizer
        self._share_groups()
        for part in self.optimizer.chained_optimizers:
            if isinstance(part.optimizer, torch.optim.SGD):  # core has none for it, and `_begin` does the same
                part.init_state_fn = lambda *_: None
        config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, self.optimizer.scale_loss
        config.no_sync_func = self.module.no_sync
        if isinstance(scheduler, MegatronLMDummyScheduler):
            self.plugin.set_scheduler_args(scheduler)
            warmup, length = (self.plugin.megatron_lm_default_args[f"lr_{name}_iters"] for name in ("warmup", "decay"))
            steps = {"lr_warmup_steps": warmup, "lr_decay_steps": length, "wd_incr_steps": length}
            rates = {"init_lr": 0.0, "max_lr": options.lr, "start_wd": decay, "end_wd": decay}
            self.scheduler = build(partial(OptimizerParamScheduler, self.optimizer), arguments, **steps, **rates)

    def _share_groups(self) -> None:
        """Give the torch optimizer core's groups, so that a torch scheduler of it changes their rates."""
        groups = {group["lr_mult"]: group for group in self.optimizer.param_groups}
        self._given.param_groups = [groups.get(at, group) for at, group in enumerate(self._given.param_groups)]

    # -- running -------------------------------------------------------------------------------------------------

    def forward(self, **batch: Any) -> Any:
        """Take a step in training mode, else evaluate; return transformers' output with the loss.

        Collective: call on every rank.
        """
        from transformers.modeling_outputs import CausalLMOutput

        figures = self.train_step(**batch) if self.training and torch.is_grad_enabled() else self.eval_step(**batch)
        return CausalLMOutput(loss=figures.get("lm loss", next(iter(figures.values()))))

    def train_step(self, **batch: Any) -> dict[str, torch.Tensor]:
        """Take a full step on a batch, and return the figures of the step's loss function.

        Collective: call on every rank.
        """
        if self.optimizer is None:
            raise ValueError(
                "This model was prepared without an optimizer. Prepare both in one call, or call model.eval()."
            )
        self.module.zero_grad_buffer()
        self.optimizer.zero_grad()
        figures = self._run(batch, forward_only=False)
        stepped, self.grad_norm, _ = self.optimizer.step()
        self.optimizer.step_was_skipped = not stepped
        if stepped and self.scheduler is not None:
            self.scheduler.step(increment=1)
        return figures

    @torch.no_grad()
    def eval_step(self, **batch: Any) -> dict[str, torch.Tensor]:
        """Evaluate a batch, and return the figures of the step's loss function. Collective: call on every rank."""
        return self._run(batch, forward_only=True)

    def _run(self, batch: Mapping[str, torch.Tensor], forward_only: bool) -> dict[str, torch.Tensor]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if not batch or not all(isinstance(value, torch.Tensor) for value in batch.values()):
            raise ValueError(
                f"A model of Megatron-LM is called with tensors by name, model(**batch), and got {list(batch)}."
            )
        cut = [value.chunk(self.plugin.num_micro_batches) for value in send_to_device(batch, self.device).values()]
        batches = [dict(zip(batch, values, strict=True)) for values in zip(*cut, strict=True)]
        rows, length = next(iter(batches[0].values())).shape[:2]
        if length % self.plugin.tp_degree and self.plugin.sequence_parallelism:
            raise ValueError(
                f"Sequences of {length} tokens are not cut over tp_degree={self.plugin.tp_degree} ranks. Pad them to a multiple, or set "
                "sequence_parallelism=False."
            )
        micro_results = get_forward_backward_func()(
            forward_step_func=self.train_step_handler.get_forward_step_func(),
            data_iterator=iter(batches),
            model=[self.module],
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=forward_only,
        )
        return self._reduced(micro_results)

    def _reduced(self, micro_results: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the mean of each figure over micro-batches and replicas: of sums and counts, or of means.

        Collective: call on every rank.
        """
        figures = {}
        for name in micro_results[0] if micro_results else ():
            values = [result[name].float() for result in micro_results]
            pairs = [value if value.dim() else torch.stack([value, torch.ones_like(value)]) for value in values]
            total = torch.stack(pairs).sum(0)
            dist.all_reduce(total, group=self.groups.get_data_parallel_group())
            figures[name] = total[0] / total[1].clamp(min=1)
        if self.plugin.pp_degree == 1:
            return figures
        sent: list[Any] = [{name: value.item() for name, value in figures.items()}]
        dist.broadcast_object_list(sent, self.groups.get_pipeline_model_parallel_last_rank(), group=self._pipeline)
        return {name: torch.tensor(value, device=self.device) for name, value in sent[0].items()}

    def megatron_generate(self, *inputs: Any, **options: Any) -> Any:
        """Refuse: core generates only by its own engines, for GPUs.

        Not a collective.

        Raises:
            NotImplementedError: always; the message says how to generate.
        """
        raise NotImplementedError(
            "megatron_generate: core's inference engines need CUDA and its own tokenizer. Load accelerator.get_state_dict(model) into the "
            "transformers model, and call its `generate`."
        )

    # -- weights and checkpoints ---------------------------------------------------------------------------------

    def entries(self, is_selected: Wanted) -> Entries:
        """Yield the selected entries of the transformers model's state dict, each unsharded.

        Collective: call on every rank.
        """
        self._settle()
        core_parameters, again = self._own, tied_again(self.source)
        stages: int = self.plugin.pp_degree  # type: ignore[assignment]  # no degree is None
        for row in self.translation.rows:
            if row.core not in self._stage_of or not any(
                is_selected(name) and name not in again for name in row.sources
            ):
                continue
            stage = dist.get_global_rank(self._pipeline, self._stage_of[row.core])
            dtype, shapes = self.core.config.params_dtype, [self.translation.shapes[name] for name in row.sources]
            if stage == dist.get_rank():
                parts = row.unpack(self._whole(core_parameters[row.core]), shapes)
            else:
                parts = [torch.empty(shape, dtype=dtype, device=self.device) for shape in shapes]
            for name, value in zip(row.sources, parts, strict=True):
                if stages > 1:
                    dist.broadcast(value, stage, group=self._pipeline)
                if is_selected(name):
                    yield name, value

    def _settle(self) -> None:
        """Gather the parameters that core would gather in the next forward pass, by `overlap_param_gather`.

        Collective: call on every rank.
        """
        if self.optimizer is not None and self.module.ddp_config.overlap_param_gather:
            self.module.start_param_sync(force_sync=True)

    def _whole(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return a parameter of this stage without its division over the ranks of a layer, which all call this."""
        value, cut = parameter.detach(), _cut(parameter)
        ranks: int = self.plugin.tp_degree  # type: ignore[assignment]  # no degree is None
        if cut is None or ranks == 1:
            return value
        parts = [torch.empty_like(value) for _ in range(ranks)]
        dist.all_gather(parts, value.contiguous(), group=self.groups.get_tensor_model_parallel_group())
        return torch.cat(parts, cut)

    def _sharded_state(self, optimizer: bool, loading: bool) -> dict[str, Any]:
        """Return what core saves and loads: weights, and with `optimizer` its state and that of the scheduler.

        Collective: call on every rank.
        """
        state: dict[str, Any] = {"model": self.core.sharded_state_dict()}
        if optimizer and self.optimizer is not None:
            # Core loads the format that any layout reads only into Apex's and Transformer Engine's Adam.
            layout = "dp_reshardable" if _begin(self.optimizer) else "fully_reshardable"
            layouts = {"distrib_optim_sharding_type": layout}
            state["optimizer"] = self.optimizer.sharded_state_dict(
                state["model"], is_loading=loading, metadata=layouts
            )
            bound = layout == "dp_reshardable" and self.plugin.use_distributed_optimizer
            state["divided"] = [self.plugin.tp_degree, self.plugin.pp_degree] if bound else None
            if self.scheduler is not None:
                state["scheduler"] = self.scheduler.state_dict()
        return state

    def save(self, place: str) -> None:
        """Let core write this rank's part into a folder. Collective: call on every rank."""
        from megatron.core import dist_checkpointing

        self._settle()
        dist_checkpointing.save(self._sharded_state(not self.plugin.no_save_optim, loading=False), place)

    def misfits(self, place: str) -> list[str]:
        """Return a line for each of this rank's parameters that differs from what core wrote into a folder.

        Not a collective.
        """
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        stored = dist_checkpointing.load_tensors_metadata(place)
        tensors = [entry for entry in self.core.sharded_state_dict().values() if isinstance(entry, ShardedTensor)]
        shapes = {t.key: stored[t.key].global_shape if t.key in stored else "no value" for t in tensors}
        return [
            f"{t.key} has {shapes[t.key]} in the checkpoint and {t.global_shape} in the engine"
            for t in tensors
            if shapes[t.key] != t.global_shape
        ]

    @torch.no_grad()
    def load(self, place: str, strict: bool = True) -> None:
        """Take what core has written into a folder. Collective: call on every rank."""
        from megatron.core import dist_checkpointing

        optimizer = not self.plugin.no_load_optim
        state = dist_checkpointing.load(self._sharded_state(optimizer, loading=True), place)
        self.core.load_state_dict(state["model"], strict=strict)
        if self.optimizer is None:
            return
        if not optimizer:
            self.optimizer.reload_model_params()
            return
        states = state["optimizer"].get("optimizer", state["optimizer"]).get("state")
        if _begin(self.optimizer) and states is not None:
            states.setdefault("common_step", 0)  # which core does not save before the first step
        self.optimizer.load_state_dict(state["optimizer"])
        _begin(self.optimizer)
        self._share_groups()
        if self.scheduler is not None and "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])


def _begin(optimizer: Any) -> bool:
    """Create the states of torch's optimizers in core's, as their first step would, because core requires them to load.

    Return whether there are such optimizers. Each parameter gets its own count of steps: core loads one for all, or none.
    """
    begun = False
    for part in optimizer.chained_optimizers:
        is_torch_optimizer = isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW | torch.optim.SGD)
        for group in part.optimizer.param_groups if is_torch_optimizer else ():
            names = ("exp_avg", "exp_avg_sq") if "betas" in group else ("momentum_buffer",) * bool(group["momentum"])
            begun, loaded = True, group.pop("step", None)
            for parameter in group["params"] if names else ():
                state = part.optimizer.state[parameter]
                state |= {name: torch.zeros_like(parameter) for name in names if name not in state}
                state["step"] = torch.tensor(float(state.get("step", 0) if loaded is None else loaded))
    return begun


def _groups_of(rows: list[Row], parameters: Mapping[str, nn.Parameter], optimizer: Any) -> dict[str, int | None]:
    """Return the optimizer's group of each of core's parameters; parameters that it does not train get no gradients."""
    groups = getattr(optimizer, "param_groups", ())
    numbers = {id(parameter): number for number, group in enumerate(groups) for parameter in group["params"]}
    group_of = {}
    for row in rows:
        of_row = {
            numbers.get(id(parameters[name])) if parameters[name].requires_grad else None for name in row.sources
        }
        if len(of_row) > 1:
            raise ValueError(
                f"{row.sources} are one parameter of Megatron core. Put them into one group of the optimizer."
            )
        group_of[row.core] = of_row.pop()
    if numbers and set(group_of.values()) == {None}:
        raise ValueError(
            "The optimizer holds no parameter of the model. Make it from model.parameters() of the model as it is now."
        )
    return group_of


def _cut(parameter: Any) -> int | None:
    """Return the dimension along which the ranks of a layer have parts of a parameter; None for an unsharded one."""
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
