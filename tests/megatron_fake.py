"""A small stand-in for Megatron core: its classes by their names, which write down what they are made with. One rank, no schedules.

`NAMES` are the arguments that a test asks about; `make test-megatron` compares them with core's own.
"""

import dataclasses
import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

NAMES = {
    "transformer.transformer_config.TransformerConfig": (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels layernorm_epsilon normalization "
        "gated_linear_unit add_bias_linear activation_func attention_dropout hidden_dropout attention_softmax_in_fp32 "
        "recompute_granularity recompute_method recompute_num_layers sequence_parallel tensor_model_parallel_size "
        "pipeline_model_parallel_size calculate_per_token_loss fp16 bf16 params_dtype pipeline_dtype variable_seq_lengths "
        "moe_token_dispatcher_type bias_activation_fusion bias_dropout_fusion masked_softmax_fusion gradient_accumulation_fusion "
        "persist_layer_norm num_layers_in_last_pipeline_stage distribute_saved_activations"
    ),
    "optimizer.OptimizerConfig": (
        "optimizer lr min_lr weight_decay fp16 bf16 params_dtype adam_beta1 adam_beta2 adam_eps sgd_momentum decoupled_weight_decay "
        "use_distributed_optimizer clip_grad initial_loss_scale loss_scale_window min_loss_scale hysteresis loss_scale "
        "overlap_param_gather optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d "
        "use_precision_aware_optimizer"
    ),
    "distributed.DistributedDataParallelConfig": (
        "grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather use_distributed_optimizer bucket_size average_in_collective"
    ),
    "optimizer_param_scheduler.OptimizerParamScheduler": (
        "optimizer init_lr max_lr min_lr lr_warmup_steps lr_decay_steps lr_decay_style start_wd end_wd wd_incr_steps wd_incr_style"
    ),
    "models.gpt.GPTModel": (
        "config transformer_layer_spec vocab_size max_sequence_length pre_process post_process share_embeddings_and_output_weights "
        "position_embedding_type rotary_base rope_scaling rope_scaling_factor"
    ),
}


class FusedAdam(torch.optim.Optimizer):
    """Stands for Apex's, which is none of torch's."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {})


class Wrapper(nn.Module):
    """Stands for what core puts around a model."""

    def __init__(self, config: Any, *more: Any) -> None:
        super().__init__()
        self.config, self.module, self.ddp_config = config, more[-1], more[0]

    def no_sync(self) -> None:
        """Nothing to hold back."""


def _layer(number: int, config: Any) -> nn.Module:
    made, bias = nn.Module(), config.add_bias_linear is not False
    heads, groups = config.num_attention_heads, config.num_query_groups or config.num_attention_heads
    width = config.hidden_size // heads
    rows = config.ffn_hidden_size * (2 if config.gated_linear_unit else 1)
    made.layer_number = number + 1
    made.input_layernorm, made.pre_mlp_layernorm = (_norm(config) for _ in range(2))
    made.self_attention, made.mlp = nn.Module(), nn.Module()
    made.self_attention.linear_qkv = nn.Linear(config.hidden_size, (heads + 2 * groups) * width, bias)
    made.self_attention.linear_proj = nn.Linear(heads * width, config.hidden_size, bias)
    made.mlp.linear_fc1 = nn.Linear(config.hidden_size, rows, bias)
    made.mlp.linear_fc2 = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias)
    return made


def _norm(config: Any) -> nn.Module:
    return nn.RMSNorm(config.hidden_size) if config.normalization == "RMSNorm" else nn.LayerNorm(config.hidden_size)


class Core:
    """The stand-in: `told` has what each class was made with last, by its name; `saved` what checkpoints were written of."""

    def __init__(self, apex: bool = True) -> None:
        self.told: dict[str, dict[str, Any]] = {}
        self.saved: dict[str, Any] = {}
        self.apex = apex

    def modules(self) -> dict[str, types.ModuleType]:
        """Return what to put into `sys.modules`."""
        group = lambda *arguments: dist.group.WORLD  # noqa: E731
        one, zero, yes = (lambda *arguments, value=value: value for value in (1, 0, True))
        spec = types.SimpleNamespace
        parallel = {
            f"get_{kind}_model_parallel_{what}": how
            for kind in ("tensor", "pipeline")
            for what, how in {"group": group, "rank": zero, "world_size": one, "last_rank": zero}.items()
        }
        content = {
            "parallel_state": parallel
            | dict.fromkeys(("is_pipeline_first_stage", "is_pipeline_last_stage"), yes)
            | dict.fromkeys(("destroy_model_parallel", "initialize_model_parallel"), zero)
            | {"model_parallel_is_initialized": yes, "get_data_parallel_group": group},
            "tensor_parallel": {
                "model_parallel_cuda_manual_seed": zero,
                "get_cuda_rng_tracker": lambda: spec(get_states=dict, set_states=zero),
            },
            "distributed": {"DistributedDataParallel": Wrapper, "finalize_model_grads": zero},
            "transformer.module": {"Float16Module": Wrapper},
            "transformer.transformer_block": {
                "TransformerBlockSubmodules": lambda *parts: parts,
                "get_num_layers_to_build": lambda config: config.num_layers,
            },
            "models.gpt.gpt_layer_specs": {"get_gpt_layer_local_spec": lambda **_: spec(submodules=spec())},
            "optimizer": {
                "ParamKey": dataclasses.make_dataclass("ParamKey", ["attr"], frozen=True),
                "get_megatron_optimizer": self._optimizer,
            },
            "dist_checkpointing": {"save": lambda state, place: self.saved.update(state)},
        }
        for path, names in NAMES.items():
            where, _, name = path.rpartition(".")
            content.setdefault(where, {})[name] = self._recorder(name, names)
        made = {}
        for where, inside in content.items():
            parts = ["megatron", "core", *where.split(".")]
            for end in range(1, len(parts) + 1):
                made.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
            vars(made[".".join(parts)]).update(inside)
        for name, module in made.items():
            above, _, own = name.rpartition(".")
            if above:
                setattr(made[above], own, module)
        return made

    def _recorder(self, name: str, names: str) -> type:
        def after(made: Any) -> None:
            self.told[name] = {field: value for field, value in vars(made).items() if value is not None}

        fields = [(field, Any, dataclasses.field(default=None)) for field in names.split()]
        recorder = dataclasses.make_dataclass(name, fields, namespace={"__post_init__": after})
        if name != "GPTModel":
            return recorder

        class GPTModel(nn.Module):
            def __init__(self, **given: Any) -> None:
                recorder(**given)
                super().__init__()
                config = self.config = given["config"]
                self.post_process, self.embedding, self.decoder = True, nn.Module(), nn.Module()
                self.embedding.word_embeddings = nn.Embedding(given["vocab_size"], config.hidden_size)
                if given["position_embedding_type"] == "learned_absolute":
                    self.embedding.position_embeddings = nn.Embedding(given["max_sequence_length"], config.hidden_size)
                self.decoder.layers = nn.ModuleList(_layer(number, config) for number in range(config.num_layers))
                self.decoder.final_layernorm = _norm(config)
                self.output_layer = nn.Linear(config.hidden_size, given["vocab_size"], bias=False)
                if given["share_embeddings_and_output_weights"]:
                    del self.output_layer.weight  # on one stage there is no second one

            def sharded_state_dict(self) -> dict[str, Any]:
                return self.state_dict()

        GPTModel.__signature__ = __import__("inspect").signature(recorder)
        return GPTModel

    def _optimizer(self, config: Any, chunks: list[nn.Module], config_overrides: dict[Any, dict[str, Any]]) -> Any:
        groups = [
            {"params": [one for one in chunks[0].parameters() if getattr(one, key.attr, False)], **told}
            for key, told in config_overrides.items()
        ]
        inner = FusedAdam(groups) if self.apex else torch.optim.AdamW(groups)
        made = types.SimpleNamespace(chained_optimizers=[types.SimpleNamespace(optimizer=inner)])
        made.param_groups, made.zero_grad, made.scale_loss = inner.param_groups, inner.zero_grad, float
        made.sharded_state_dict = lambda state, is_loading, metadata: metadata
        return made


def install(monkeypatch: Any, **options: Any) -> Core:
    """Put a stand-in where core is imported from."""
    core = Core(**options)
    for name, module in core.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return core
