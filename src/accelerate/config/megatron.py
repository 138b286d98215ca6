"""The settings of Megatron-LM: from arguments and environment variables to the arguments that it parses."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate.config import env
from accelerate.config.enums import at_public_path
from accelerate.config.options import of_feature
from accelerate.config.options.schema import to_bool
from accelerate.utils.imports import is_megatron_lm_available

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

Batch = Mapping[str, Any] | None
Parser = Callable[["MegatronLMPlugin", Any, Batch], None]

MODEL_CONFIGS_TO_MEGATRON_PARSERS: dict[str, Parser] = {}


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[Parser], Parser]:
    """Register a function that reads the network's sizes for Megatron-LM; for use as a decorator.

    Args:
        model_type: the `model_type` of the model's configuration, or a part of it.

    Returns:
        A decorator for a function of the plugin, the model and a batch (or None). It writes into the plugin's
        `megatron_lm_default_args`.

    Example:
        >>> @add_model_config_to_megatron_parser("tiny")
        ... def parse_tiny(plugin, model, batch_data):
        ...     plugin.megatron_lm_default_args["num_layers"] = model.config.depth
    """

    def register(parser: Parser) -> Parser:
        MODEL_CONFIGS_TO_MEGATRON_PARSERS[model_type] = parser
        return parser

    return register


def find_parser(model_type: str) -> Parser:
    """Return the parser of a model type, else that of the longest name in it; a ValueError lists the known ones."""
    wanted = model_type.lower()
    fitting = [name for name in MODEL_CONFIGS_TO_MEGATRON_PARSERS if name in wanted]
    if not fitting:
        known = ", ".join(sorted(MODEL_CONFIGS_TO_MEGATRON_PARSERS))
        hint = "`add_model_config_to_megatron_parser` registers another"
        raise ValueError(f"model_type is {model_type!r}; known are {known}. {hint}.")
    return MODEL_CONFIGS_TO_MEGATRON_PARSERS[max(fitting, key=len)]


# What Megatron-LM calls the sizes of a network, and what the configurations of models call them.
_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
_USUAL_NAMES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
_NAMES_OF_GPT2 = ("n_layer", "n_embd", "n_head", "n_positions")
_NAMES_OF_T5 = ("num_layers", "d_model", "num_heads", "n_positions")


def _set(
    plugin: "MegatronLMPlugin", model: Any, type_name: str, names: Sequence[str] = _USUAL_NAMES, **particular: Any
) -> None:
    """Write the arguments that every type of model has, and those that are particular to one."""
    plugin.megatron_lm_default_args.update(
        {size: getattr(model.config, name) for size, name in zip(_SIZES, names, strict=True)},
        orig_vocab_size=model.config.vocab_size,
        model_return_dict=model.config.return_dict,
        model_type_name=type_name,
        pretraining_flag=True,
    )
    plugin.megatron_lm_default_args.update(particular)


def _columns(batch_data: Batch, key: str = "input_ids") -> int | None:
    """Return the length of the sequences in a batch's (batch, sequence) tensor."""
    return None if batch_data is None else batch_data[key].shape[1]


def _length(plugin: "MegatronLMPlugin", batch_data: Batch, limit: int, *given: int | None) -> int:
    """Resolve `plugin.seq_length`: what is given, else the length in a batch, else the limit of the model."""
    plugin.seq_length = next(length for length in (*given, _columns(batch_data), limit) if length is not None)
    return plugin.seq_length


def _long_context(plugin: "MegatronLMPlugin", config: Any, batch_data: Batch) -> dict[str, Any]:
    """Return what decoders need whose position limit is far above what they train on."""
    given = (plugin.seq_length, plugin.decoder_seq_length, getattr(config, "max_sequence_length", None))
    length = _length(plugin, batch_data, config.max_position_embeddings, *given)
    return {"seq_length": length, "return_logits": plugin.return_logits}


@add_model_config_to_megatron_parser("megatron-bert")
def parse_bert_config(megatron_lm_plugin: "MegatronLMPlugin", model: Any, batch_data: Batch) -> None:
    """Read the sizes of a BERT. A class whose name contains MaskedLM is pretrained, any other is fine-tuned."""
    plugin, limit = megatron_lm_plugin, model.config.max_position_embeddings
    _set(
        plugin,
        model,
        "bert",
        seq_length=_length(plugin, batch_data, limit, plugin.encoder_seq_length, plugin.seq_length),
        pretraining_flag="maskedlm" in type(model).__name__.lower(),
        num_labels=model.config.num_labels,
    )


@add_model_config_to_megatron_parser("gpt2")
def parse_gpt2_config(megatron_lm_plugin: "MegatronLMPlugin", model: Any, batch_data: Batch) -> None:
    """Read the sizes of a GPT-2."""
    plugin, limit = megatron_lm_plugin, model.config.n_positions
    length = _length(plugin, batch_data, limit, plugin.decoder_seq_length, plugin.seq_length)
    particular = {"return_logits": plugin.return_logits, "tokenizer_type": "GPT2BPETokenizer"}
    _set(plugin, model, "gpt", _NAMES_OF_GPT2, seq_length=length, **particular)


@add_model_config_to_megatron_parser("t5")
def parse_t5_config(megatron_lm_plugin: "MegatronLMPlugin", model: Any, batch_data: Batch) -> None:
    """Read the sizes of a T5, whose lengths are those of `input_ids` and `labels`."""
    plugin, limit = megatron_lm_plugin, model.config.n_positions
    for name, key in (("encoder_seq_length", "input_ids"), ("decoder_seq_length", "labels")):
        if getattr(plugin, name) is None:
            setattr(plugin, name, limit if batch_data is None else _columns(batch_data, key))
    lengths = {"encoder_seq_length": plugin.encoder_seq_length, "decoder_seq_length": plugin.decoder_seq_length}
    _set(plugin, model, "t5", _NAMES_OF_T5, **lengths)


@add_model_config_to_megatron_parser("llama")
def parse_llama_config(megatron_lm_plugin: "MegatronLMPlugin", model: Any, batch_data: Batch) -> None:
    """Read the sizes of a Llama."""
    particular = _long_context(megatron_lm_plugin, model.config, batch_data)
    _set(megatron_lm_plugin, model, "gpt", tokenizer_type="Llama2Tokenizer", **particular)


@add_model_config_to_megatron_parser("glm4_moe")
def parse_glm4_moe_config(megatron_lm_plugin: "MegatronLMPlugin", model: Any, batch_data: Batch) -> None:
    """Read the sizes of a GLM-4.5 mixture of experts. Source: https://arxiv.org/abs/2508.06471"""
    config = model.config
    head_size = config.hidden_size // config.num_attention_heads
    _set(
        megatron_lm_plugin,
        model,
        "gpt",
        tokenizer_type="HuggingFaceTokenizer",
        original_model_type=config.model_type,
        pretraining_flag=False,
        ffn_hidden_size=config.intermediate_size,
        kv_channels=getattr(config, "head_dim", head_size),
        group_query_attention=True,
        num_query_groups=config.num_key_value_heads,
        qk_layernorm=getattr(config, "use_qk_norm", False),
        add_bias_linear=False,
        add_qkv_bias=getattr(config, "attention_bias", True),
        normalization="RMSNorm",
        norm_epsilon=getattr(config, "rms_norm_eps", 1e-5),
        swiglu=True,
        use_flash_attn=True,
        position_embedding_type="rope",
        rope_type="rope",
        rotary_base=config.rope_theta,
        rotary_percent=getattr(config, "partial_rotary_factor", 0.5),
        untie_embeddings_and_output_weights=not getattr(config, "tie_word_embeddings", False),
        **_long_context(megatron_lm_plugin, config, batch_data),
        **_glm4_experts(config),
        **{name: getattr(config, name) for name in _GLM4_OPTIONAL if hasattr(config, name)},
    )


_GLM4_OPTIONAL = ("eos_token_id", "bf16", "fp8", "fp8_param", "fp8_param_gather", "fp8_recipe")


def _glm4_experts(config: Any) -> dict[str, Any]:
    dense = config.first_k_dense_replace
    return {
        "num_experts": config.n_routed_experts,
        "moe_layer_freq": [int(layer >= dense) for layer in range(config.num_hidden_layers)],
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * getattr(config, "n_shared_experts", 1),
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_pre_softmax": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_router_dtype": "fp32",
        "moe_aux_loss_coeff": 0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,
    }


# Fields that options stand for, and the defaults that the option table does not have.
_FROM_ENVIRONMENT = {option.name.removeprefix("megatron_lm_"): option for option in of_feature("megatron")}
_DEFAULTS = {
    **dict.fromkeys(("num_micro_batches", "context_parallel_size"), 1),
    **dict.fromkeys(("expert_model_parallel_size", "expert_tensor_parallel_size"), 1),
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), 0.0),
    **dict.fromkeys(("recompute_activations", "use_distributed_optimizer", "sequence_parallelism"), False),
    **dict.fromkeys(("attention_backend", "attention_softmax_in_fp32"), True),
    **dict.fromkeys(("calculate_per_token_loss", "use_rotary_position_embeddings"), True),
}
# Fields that Megatron-LM knows under another name.
_RENAMED = {
    "tensor_model_parallel_size": "tp_degree",
    "pipeline_model_parallel_size": "pp_degree",
    "sequence_parallel": "sequence_parallelism",
    "clip_grad": "gradient_clipping",
}
_NOT_FOR_MEGATRON = {*_RENAMED.values(), "recompute_activations"}
_SAME_NAME = (
    *(name for name in _FROM_ENVIRONMENT if name not in _NOT_FOR_MEGATRON),
    *("pipeline_model_parallel_split_rank", "num_layers_per_virtual_pipeline_stage", "DDP_impl", "consumed_samples"),
    *("no_wd_decay_cond", "scale_lr_cond", "lr_mult", "megatron_dataset_flag", "eval_iters", "eval_interval"),
)
_OF_SCHEDULE = (
    *("train_iters", "train_samples", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
    *("lr_decay_iters", "lr_decay_samples", "lr_decay_style", "min_lr"),
    *("weight_decay_incr_style", "start_weight_decay", "end_weight_decay"),
)


@at_public_path
@dataclass
class MegatronLMPlugin:
    """How Megatron-LM runs the training.

    `megatron_lm_default_args` holds the arguments for Megatron-LM; the `set_*` methods complete it while objects are
    prepared. A field of the first two groups that is None falls back to the environment variable MEGATRON_LM_<FIELD>,
    which `accelerate launch` sets.

    Parallelism: `tp_degree`, `pp_degree`, `context_parallel_size`, `expert_model_parallel_size`,
    `expert_tensor_parallel_size` (ranks per dimension, 1 by default), `num_micro_batches` (per pipeline step),
    `sequence_parallelism`, `use_distributed_optimizer`, `use_custom_fsdp`, `decoder_last_pipeline_num_layers`.

    Memory and numerics: `recompute_activations` (selective), or in full by `recompute_granularity`, `recompute_method`,
    `recompute_num_layers`; `optimizer_cpu_offload`, `overlap_cpu_optimizer_d2h_h2d`, `use_precision_aware_optimizer`,
    `attention_backend`, `attention_dropout`, `hidden_dropout`, `attention_softmax_in_fp32`, `calculate_per_token_loss`,
    `use_rotary_position_embeddings`, `gradient_clipping`, `eod_mask_loss`, `no_load_optim`, `no_save_optim`.

    Schedule: `train_iters` or `train_samples`; `lr_warmup_iters`, `lr_warmup_samples` or `lr_warmup_fraction`;
    `lr_decay_style`, `lr_decay_iters`, `lr_decay_samples`, `min_lr`, `lr_mult`; `weight_decay_incr_style`,
    `start_weight_decay`, `end_weight_decay`; `no_wd_decay_cond`, `scale_lr_cond`, `consumed_samples` (train, valid, test; 0 for those
    that are left out at the end).

    Data: `seq_length`, `encoder_seq_length`, `decoder_seq_length` (tokens), `is_train_batch_min`,
    `megatron_dataset_flag` (Megatron-LM's own data sets), `eval_iters`, `eval_interval`.

    Logging: `tensorboard_dir`, and with it `set_all_logging_options`. Output: `return_logits`.

    Your own code: `custom_train_step_class`, `custom_train_step_kwargs`, `custom_model_provider_function`,
    `custom_prepare_model_function`, `custom_megatron_datasets_provider_function`, `custom_get_batch_function`,
    `custom_loss_function`.

    `other_megatron_args`: further arguments by Megatron-LM's names; they win.

    Raises:
        ValueError: a variable or argument cannot be read.
        ImportError: `set_all_logging_options` without Megatron-LM.

    Example:
        >>> plugin = MegatronLMPlugin(tp_degree=2, pp_degree=2, num_micro_batches=4)
        >>> plugin.set_training_args(micro_batch_size=3, dp_degree=2)
        >>> plugin.megatron_lm_default_args["global_batch_size"]
        24

    Source: https://github.com/NVIDIA/Megatron-LM, https://arxiv.org/abs/1909.08053
    """

    tp_degree: int | None = None
    pp_degree: int | None = None
    use_custom_fsdp: bool | None = None
    overlap_cpu_optimizer_d2h_h2d: bool | None = None
    no_load_optim: bool | None = None
    eod_mask_loss: bool | None = None
    no_save_optim: bool | None = None
    optimizer_cpu_offload: bool | None = None
    use_precision_aware_optimizer: bool | None = None
    decoder_last_pipeline_num_layers: int | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    attention_backend: bool | None = None
    expert_model_parallel_size: int | None = None
    context_parallel_size: int | None = None
    attention_dropout: float | None = None
    hidden_dropout: float | None = None
    attention_softmax_in_fp32: bool | None = None
    expert_tensor_parallel_size: int | None = None
    calculate_per_token_loss: bool | None = None
    use_rotary_position_embeddings: bool | None = None
    num_micro_batches: int | None = None
    gradient_clipping: float | None = None
    sequence_parallelism: bool | None = None
    recompute_activations: bool | None = None
    use_distributed_optimizer: bool | None = None
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable | None = None
    scale_lr_cond: Callable | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any | None = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable | None = None
    custom_prepare_model_function: Callable | None = None
    custom_megatron_datasets_provider_function: Callable | None = None
    custom_get_batch_function: Callable | None = None
    custom_loss_function: Callable | None = None
    other_megatron_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for field, option in _FROM_ENVIRONMENT.items():
            default = _DEFAULTS.get(field, option.default)
            setattr(self, field, env.setting(getattr(self, field), option.name, default, field))
        self.attention_backend = to_bool(self.attention_backend, "attention_backend")
        self._resolve_recomputation()
        if self.consumed_samples and len(self.consumed_samples) < 3:  # those that are left out begin
            self.consumed_samples = [*self.consumed_samples, 0, 0][:3]
        # Pipelines and sharded optimizers keep gradients in one buffer, which only Megatron-LM's own wrapper has.
        self.DDP_impl = "local" if self.pp_degree > 1 or self.use_distributed_optimizer else "torch"
        self.megatron_lm_default_args: dict[str, Any] = {
            argument: getattr(self, name) for argument, name in _RENAMED.items()
        } | {name: getattr(self, name) for name in _SAME_NAME}
        if self.tensorboard_dir is not None:
            self.megatron_lm_default_args["tensorboard_dir"] = self.tensorboard_dir
            if self.set_all_logging_options:
                self.set_tensorboard_logging_options()
        self.megatron_lm_default_args.update(self.other_megatron_args or {})

    def _resolve_recomputation(self) -> None:
        if self.recompute_granularity is None:
            self.recompute_granularity = "selective" if self.recompute_activations else "full"
        if self.recompute_granularity == "full":  # a method and a number of layers exist for this one only
            self.recompute_method = "uniform" if self.recompute_method is None else self.recompute_method
            self.recompute_num_layers = 1 if self.recompute_num_layers is None else self.recompute_num_layers

    def set_network_size_args(self, model: "nn.Module", batch_data: Batch = None) -> None:
        """Read the network's sizes from the model's configuration.

        Args:
            model: a transformers model.
            batch_data: a batch with `input_ids` (and `labels`) of shape (batch, sequence), whose length counts where no
                sequence length is set.

        Raises:
            ValueError: there is no parser for the model's type.
        """
        find_parser(model.config.model_type)(self, model, batch_data)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Switch on fp16 or bf16; anything else changes nothing."""
        if mixed_precision in ("fp16", "bf16"):
            self.megatron_lm_default_args[mixed_precision] = True
        if mixed_precision == "bf16":  # gradients are reduced in float32, which torch's wrapper does not do
            self.DDP_impl = self.megatron_lm_default_args["DDP_impl"] = "local"

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Set the batch sizes: samples that a rank works on at a time, times data-parallel ranks."""
        self.data_parallel_size = dp_degree
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = dp_degree * micro_batch_size * self.num_micro_batches
        for name in ("data_parallel_size", "micro_batch_size", "global_batch_size"):
            self.megatron_lm_default_args[name] = getattr(self, name)

    def set_optimizer_type(self, optimizer: "Optimizer") -> None:
        """Take over the kind and options of a torch Adam or SGD, for Megatron-LM's own one; else a ValueError."""
        name = type(optimizer).__name__
        options = getattr(optimizer, "defaults", {})
        arguments = self.megatron_lm_default_args
        if "adam" in name.lower():
            beta1, beta2 = options["betas"]
            arguments.update(optimizer="adam", adam_beta1=beta1, adam_beta2=beta2, adam_eps=options["eps"])
        elif "sgd" in name.lower():
            arguments.update(optimizer="sgd", sgd_momentum=options["momentum"])
        else:
            raise ValueError(f"The optimizer is a {name}; Megatron-LM has Adam and SGD.")
        arguments.update(lr=options["lr"], weight_decay=options["weight_decay"])

    def set_scheduler_args(self, scheduler: Any) -> None:
        """Take over the lengths of a `MegatronLMDummyScheduler`, where `train_iters` and warm-up are not set; numbers of samples give way to it.

        Args:
            scheduler: has `total_num_steps` and `warmup_num_steps`, counted in batches of one process.

        Raises:
            ValueError: a length is missing, or `set_training_args` was not called.
        """
        if self.train_iters is None:
            self.train_iters = self._per_replica(scheduler.total_num_steps, "total_num_steps")
            self.train_samples = None
        if self.lr_warmup_iters is None and self.lr_warmup_fraction is not None:
            self.lr_warmup_iters = self.lr_warmup_samples = 0  # Megatron-LM accepts one of the three
        elif self.lr_warmup_iters is None:
            self.lr_warmup_iters = self._per_replica(scheduler.warmup_num_steps, "warmup_num_steps")
            self.lr_warmup_samples = 0
        self.megatron_lm_default_args.update({name: getattr(self, name) for name in _OF_SCHEDULE})

    def _per_replica(self, steps: int | None, name: str) -> int:
        if steps is None:
            raise ValueError(f"{name} of the MegatronLMDummyScheduler is not set.")
        if "data_parallel_size" not in self.megatron_lm_default_args:
            raise ValueError(f"{name} cannot be divided among replicas before `set_training_args` was called.")
        return steps // self.megatron_lm_default_args["data_parallel_size"]

    def set_tensorboard_logging_options(self) -> None:
        """Switch on everything that Megatron-LM can write to TensorBoard; an ImportError where it is not installed."""
        if not is_megatron_lm_available():
            raise ImportError("set_all_logging_options needs Megatron-LM; install it, or use other_megatron_args.")
        from megatron.training.arguments import _add_logging_args

        parser = argparse.ArgumentParser(add_help=False)
        _add_logging_args(parser)
        for action in parser._actions:
            if action.dest.startswith("log_") and isinstance(action.const, bool):
                self.megatron_lm_default_args[action.dest] = True
