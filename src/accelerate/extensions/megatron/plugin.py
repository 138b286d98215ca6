"""The settings of Megatron-LM: its plugin, and what reads the sizes of a model for it."""

import importlib.util
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accelerate.base.environment import parse_flag_from_env
from accelerate.base.versions import compare_versions
from accelerate.config import env
from accelerate.config.enums import at_public_path
from accelerate.config.options import of_feature
from accelerate.config.options.schema import to_bool

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


# Megatron's names of a model's sizes, and those in transformers' configurations, in the order of `_KINDS`; "?" where it may be missing.
_KINDS = ("llama", "gpt2")
_SIZES = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "ffn_hidden_size": ("intermediate_size", "n_inner?"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_query_groups": ("num_key_value_heads?", ""),
    "kv_channels": ("head_dim?", ""),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "layernorm_epsilon": ("rms_norm_eps", "layer_norm_epsilon"),
    "orig_vocab_size": ("vocab_size", "vocab_size"),
}


def unknown_model(model_type: str) -> NotImplementedError:
    """Return the error for a kind of model that Megatron core does not train here."""
    return NotImplementedError(
        f"Megatron-LM trains models of the types {', '.join(_KINDS)} here, and this one is a {model_type!r}. Train it with "
        "FullyShardedDataParallelPlugin, or ParallelismConfig(tp_size=...) for tensor parallelism."
    )


def _parser(model_type: str) -> Parser:
    def parse(megatron_lm_plugin: "MegatronLMPlugin", model: Any, batch_data: Batch) -> None:
        """Read a model's sizes into the plugin's `megatron_lm_default_args`; NotImplementedError for a kind that is not trained here."""
        if model_type not in _KINDS:
            raise unknown_model(model_type)
        arguments = megatron_lm_plugin.megatron_lm_default_args
        for name, model_names in _SIZES.items():
            if source := model_names[_KINDS.index(model_type)]:
                arguments[name] = getattr(model.config, source.rstrip("?"), *[None] * source.endswith("?"))
        arguments.update(megatron_lm_plugin.other_megatron_args or {})

    parse.__name__ = parse.__qualname__ = f"parse_{model_type.replace('megatron-', '')}_config"
    return add_model_config_to_megatron_parser(model_type)(parse)


parse_bert_config = _parser("megatron-bert")
parse_gpt2_config = _parser("gpt2")
parse_t5_config = _parser("t5")
parse_llama_config = _parser("llama")
parse_glm4_moe_config = _parser("glm4_moe")


# Fields that options stand for: MEGATRON_LM_<FIELD>.
_OPTIONS = {option.name.removeprefix("megatron_lm_"): option for option in of_feature("megatron")}
_LOGGING = "Pass log_with='tensorboard' to the Accelerator."
_EXPERTS = "Use ParallelismConfig(ep_size=...)."
_STEPS = "Count steps: lr_decay_iters, lr_warmup_iters."
_GROUPS = "Give the torch optimizer groups of parameters, each with its lr and weight_decay."
_LENGTHS = "Sequences have the length that a batch gives them."
_MODEL = "Pass a transformers model to prepare."
_DATA = "Pass torch's DataLoader to prepare."
_STAGES = "Set pp_degree alone."


def _setting(
    default: Any = None, unset: Any = None, argument: str | bool = False, core: str = "", instead: str = ""
) -> Any:
    """Return a field of the plugin.

    Args:
        default: the value of the field.
        unset: the value if the option table has no default and no source sets the option.
        argument: the name in Megatron-LM, or True for the same name; an option always has one.
        core: the name in Megatron core, if it differs, or if Megatron-LM has none.
        instead: the replacement of a setting that core does not use.
    """
    return field(default=default, metadata={"unset": unset, "argument": argument, "core": core, "instead": instead})


@at_public_path
@dataclass
class MegatronLMPlugin:
    """How Megatron-LM runs the training.

    It trains on `megatron-core` of the registry, and refuses features of Megatron-LM's own training script. `prepare` completes
    `megatron_lm_default_args` by the `set_*` methods. A field of the first two groups that is None falls back to the environment
    variable MEGATRON_LM_<FIELD>, which `accelerate launch` sets.

    Parallelism: `tp_degree`, `pp_degree`, `context_parallel_size`, `expert_model_parallel_size`,
    `expert_tensor_parallel_size` (ranks per dimension, 1 by default), `num_micro_batches` (per pipeline step),
    `sequence_parallelism`, `use_distributed_optimizer`, `use_custom_fsdp`, `decoder_last_pipeline_num_layers`.

    Memory and numerics: `recompute_activations` (selective), or in full by `recompute_granularity`, `recompute_method`,
    `recompute_num_layers`; `optimizer_cpu_offload`, `overlap_cpu_optimizer_d2h_h2d`, `use_precision_aware_optimizer`,
    `attention_backend`, `attention_dropout`, `hidden_dropout`, `attention_softmax_in_fp32`, `calculate_per_token_loss`,
    `use_rotary_position_embeddings`, `gradient_clipping`, `eod_mask_loss`, `no_load_optim`, `no_save_optim`.

    Schedule: `train_iters` or `train_samples`; `lr_warmup_iters`, `lr_warmup_samples` or `lr_warmup_fraction`;
    `lr_decay_style`, `lr_decay_iters`, `lr_decay_samples`, `min_lr`, `lr_mult`; `weight_decay_incr_style`,
    `start_weight_decay`, `end_weight_decay`; `no_wd_decay_cond`, `scale_lr_cond`, `consumed_samples` (train, valid, test; 0 for
    missing ones at the end).

    Data: `seq_length`, `encoder_seq_length`, `decoder_seq_length` (tokens), `is_train_batch_min`,
    `megatron_dataset_flag` (Megatron-LM's own data sets), `eval_iters`, `eval_interval`.

    Logging: `tensorboard_dir`, and with it `set_all_logging_options`. Output: `return_logits`.

    Your own code: `custom_train_step_class`, `custom_train_step_kwargs`, `custom_model_provider_function`,
    `custom_prepare_model_function`, `custom_megatron_datasets_provider_function`, `custom_get_batch_function`,
    `custom_loss_function`.

    `other_megatron_args`: further arguments by the names of core's `TransformerConfig`, `OptimizerConfig` and
    `DistributedDataParallelConfig`; they win.

    Raises:
        ValueError: a variable or argument cannot be read.
        NotImplementedError: `set_all_logging_options` with `tensorboard_dir`.

    Example:
        >>> plugin = MegatronLMPlugin(tp_degree=2, pp_degree=2, num_micro_batches=4)
        >>> plugin.megatron_lm_default_args["tensor_model_parallel_size"]
        2

    Source: https://github.com/NVIDIA/Megatron-LM, https://arxiv.org/abs/1909.08053
    """

    tp_degree: int | None = _setting(argument="tensor_model_parallel_size")
    pp_degree: int | None = _setting(argument="pipeline_model_parallel_size")
    use_custom_fsdp: bool | None = _setting(instead="Use FullyShardedDataParallelPlugin.")
    overlap_cpu_optimizer_d2h_h2d: bool | None = _setting()
    no_load_optim: bool | None = _setting()
    eod_mask_loss: bool | None = _setting(instead="Give tokens that do not count the label -100.")
    no_save_optim: bool | None = _setting()
    optimizer_cpu_offload: bool | None = _setting()
    use_precision_aware_optimizer: bool | None = _setting()
    decoder_last_pipeline_num_layers: int | None = _setting(core="num_layers_in_last_pipeline_stage")
    recompute_granularity: str | None = _setting()
    recompute_method: str | None = _setting()
    recompute_num_layers: int | None = _setting()
    attention_backend: bool | None = _setting(unset=True)
    expert_model_parallel_size: int | None = _setting(unset=1, instead=_EXPERTS)
    context_parallel_size: int | None = _setting(unset=1, instead="Use ParallelismConfig(cp_size=...).")
    attention_dropout: float | None = _setting(unset=0.0)
    hidden_dropout: float | None = _setting(unset=0.0)
    attention_softmax_in_fp32: bool | None = _setting(unset=True)
    expert_tensor_parallel_size: int | None = _setting(unset=1, instead=_EXPERTS)
    calculate_per_token_loss: bool | None = _setting(unset=True)
    use_rotary_position_embeddings: bool | None = _setting(unset=True)
    num_micro_batches: int | None = _setting(unset=1)
    gradient_clipping: float | None = _setting(argument="clip_grad")
    sequence_parallelism: bool | None = _setting(unset=False, argument="sequence_parallel")
    recompute_activations: bool | None = _setting(unset=False)
    use_distributed_optimizer: bool | None = _setting(unset=False)
    pipeline_model_parallel_split_rank: int | None = _setting(argument=True, instead=_STAGES)
    num_layers_per_virtual_pipeline_stage: int | None = _setting(argument=True, instead=_STAGES)
    is_train_batch_min: bool = True
    train_iters: int | None = None
    train_samples: int | None = _setting(instead=_STEPS)
    weight_decay_incr_style: str = _setting("constant", core="wd_incr_style")
    start_weight_decay: float | None = _setting(core="start_wd")
    end_weight_decay: float | None = _setting(core="end_wd")
    lr_decay_style: str = _setting("linear", core="lr_decay_style")
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = _setting(instead=_STEPS)
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = _setting(instead=_STEPS)
    lr_warmup_fraction: float | None = None
    min_lr: float = _setting(0, core="min_lr")
    consumed_samples: list[int] | None = _setting(argument=True)
    no_wd_decay_cond: Callable | None = _setting(argument=True, instead=_GROUPS)
    scale_lr_cond: Callable | None = _setting(argument=True, instead=_GROUPS)
    lr_mult: float = _setting(1.0, argument=True, instead=_GROUPS)
    megatron_dataset_flag: bool = _setting(False, argument=True, instead=_DATA)
    seq_length: int | None = None
    encoder_seq_length: int | None = _setting(instead=_LENGTHS)
    decoder_seq_length: int | None = _setting(instead=_LENGTHS)
    tensorboard_dir: str | None = _setting(instead=_LOGGING)
    set_all_logging_options: bool = False
    eval_iters: int = _setting(100, argument=True)
    eval_interval: int = _setting(1000, argument=True)
    return_logits: bool = _setting(
        False, instead="Load get_state_dict(model) into the transformers model, and call that."
    )
    custom_train_step_class: Any | None = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable | None = _setting(instead=_MODEL)
    custom_prepare_model_function: Callable | None = _setting(instead=_MODEL)
    custom_megatron_datasets_provider_function: Callable | None = _setting(instead=_DATA)
    custom_get_batch_function: Callable | None = None
    custom_loss_function: Callable | None = None
    other_megatron_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        settings, options = self.__dataclass_fields__, _OPTIONS
        for name, option in options.items():
            unset = settings[name].metadata["unset"]
            value = env.setting(getattr(self, name), option.name, option.default if unset is None else unset, name)
            setattr(self, name, value)
        self.attention_backend = to_bool(self.attention_backend, "attention_backend")
        self._resolve_recomputation()
        if self.consumed_samples and len(self.consumed_samples) < 3:  # missing ones start at zero
            self.consumed_samples = [*self.consumed_samples, 0, 0][:3]
        # Pipelines and sharded optimizers keep gradients in one buffer, which only Megatron-LM's own wrapper has.
        self.DDP_impl = "local" if self.pp_degree > 1 or self.use_distributed_optimizer else "torch"
        arguments: dict[str, Any] = {"DDP_impl": self.DDP_impl}
        for name, setting in settings.items():
            argument = setting.metadata.get("argument") or name in options
            if argument and name != "recompute_activations":  # which its granularity says
                arguments[name if argument is True else argument] = getattr(self, name)
        if self.tensorboard_dir is not None:
            arguments["tensorboard_dir"] = self.tensorboard_dir
            if self.set_all_logging_options:
                self.set_tensorboard_logging_options()
        arguments.update(self.other_megatron_args or {})
        self.megatron_lm_default_args = arguments

    def _resolve_recomputation(self) -> None:
        others = self.other_megatron_args or {}
        self._recomputes = (
            self.recompute_activations or self.recompute_granularity or "recompute_granularity" in others
        )
        if self.recompute_granularity is None:
            self.recompute_granularity = "selective" if self.recompute_activations else "full"
        if self.recompute_granularity == "full":  # a method and a number of layers exist for this one only
            self.recompute_method = "uniform" if self.recompute_method is None else self.recompute_method
            self.recompute_num_layers = 1 if self.recompute_num_layers is None else self.recompute_num_layers

    # -- while objects are prepared -------------------------------------------------------------------------------

    def refuse_unused(self) -> None:
        """Refuse settings that Megatron core has no use for here.

        Raises:
            NotImplementedError: one is set; the message says what does the same.
        """
        for name, setting in self.__dataclass_fields__.items():
            instead, value = setting.metadata.get("instead"), getattr(self, name)
            if instead and value not in (None, False, setting.default, setting.metadata["unset"]):
                raise NotImplementedError(f"MegatronLMPlugin({name}={value!r}) is not possible here. {instead}")

    def core_arguments(self) -> dict[str, Any]:
        """Return the settings and the values that `prepare` has added, by the names of Megatron core, without None."""
        rows = self.__dataclass_fields__.items()
        named = {core: getattr(self, name) for name, row in rows if (core := row.metadata.get("core"))}
        arguments = named | self.megatron_lm_default_args
        if self.custom_train_step_class or self.custom_loss_function:  # the loss of a custom step is a mean
            arguments["calculate_per_token_loss"] = False
        # Core's own attention is the local one.
        unused = ("recompute_granularity", "recompute_method", "recompute_num_layers")[3 * bool(self._recomputes) :]
        return arguments | dict.fromkeys((*unused, "attention_backend"))

    def set_network_size_args(self, model: "nn.Module", batch_data: Batch = None) -> None:
        """Read the network's sizes from the model's configuration.

        Raises:
            NotImplementedError: this kind of model is not trained here.
        """
        kind = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
        if kind not in MODEL_CONFIGS_TO_MEGATRON_PARSERS:
            raise unknown_model(kind)
        MODEL_CONFIGS_TO_MEGATRON_PARSERS[kind](self, model, batch_data)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Switch on fp16 or bf16; ValueError for another one."""
        if mixed_precision not in ("fp16", "bf16"):
            raise ValueError(f"mixed_precision={mixed_precision!r} with Megatron-LM: use 'bf16', 'fp16' or 'no'.")
        self.megatron_lm_default_args[mixed_precision] = True

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Set the batch sizes: of a micro-batch, and of all data-parallel replicas in one step."""
        self.data_parallel_size, self.micro_batch_size = dp_degree, micro_batch_size
        self.global_batch_size = dp_degree * micro_batch_size * self.num_micro_batches
        for name in ("data_parallel_size", "micro_batch_size", "global_batch_size"):
            self.megatron_lm_default_args[name] = getattr(self, name)

    def set_optimizer_type(self, optimizer: "Optimizer") -> None:
        """Take over the kind and options of a torch optimizer.

        Raises:
            ValueError: it is none of Adam, AdamW and SGD, or has options that Megatron's do not have.
        """
        kind, options = type(optimizer).__name__, dict(getattr(optimizer, "defaults", {}))
        changed = [name for name in ("amsgrad", "maximize", "nesterov", "dampening") if options.get(name)]
        if kind not in ("Adam", "AdamW", "SGD") or changed:
            raise ValueError(
                f"Megatron-LM trains with Adam, AdamW or SGD of torch.optim, and got {kind}({', '.join(changed)}). Pass one of these."
            )
        if kind == "SGD" and self.use_distributed_optimizer:
            raise ValueError(
                "use_distributed_optimizer=True with SGD: core shards only Adam and AdamW. Set it to False."
            )
        optimizer_arguments = {"lr": options["lr"], "weight_decay": options["weight_decay"]}
        if kind == "SGD":
            optimizer_arguments |= {"optimizer": "sgd", "sgd_momentum": options["momentum"]}
        else:
            optimizer_arguments |= {"optimizer": "adam", "adam_eps": options["eps"]}
            optimizer_arguments |= dict(zip(("adam_beta1", "adam_beta2"), options["betas"], strict=True))
        self.megatron_lm_default_args.update(optimizer_arguments)

    def set_scheduler_args(self, scheduler: Any) -> None:
        """Take over the lengths of a `MegatronLMDummyScheduler`, which counts batches of one process; the plugin's own win."""
        arguments, replicas = self.megatron_lm_default_args, getattr(self, "data_parallel_size", 1)
        decay = self.lr_decay_iters or -(-(scheduler.total_num_steps or 0) // replicas) or self.train_iters
        if not decay:
            raise ValueError(
                "MegatronLMDummyScheduler needs total_num_steps, or MegatronLMPlugin(lr_decay_iters=...)."
            )
        warmup = self.lr_warmup_iters
        if warmup is None:
            counted = -(-scheduler.warmup_num_steps // replicas)
            warmup = counted if self.lr_warmup_fraction is None else int(self.lr_warmup_fraction * decay)
        arguments.update(lr_decay_iters=decay, lr_warmup_iters=warmup)

    def set_tensorboard_logging_options(self) -> None:
        """Refuse output that only Megatron-LM's own training script writes: a NotImplementedError."""
        raise NotImplementedError(f"set_all_logging_options belongs to megatron.training. {_LOGGING}")


def is_megatron_lm_available() -> bool:
    """Tell whether ACCELERATE_USE_MEGATRON_LM is set and Megatron Core 0.8.0 or later is installed."""
    if not parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM", False) or importlib.util.find_spec("megatron") is None:
        return False
    try:
        return compare_versions("megatron-core", ">=", "0.8.0")
    except ImportError as error:
        warnings.warn(f"Megatron-LM cannot be used, although ACCELERATE_USE_MEGATRON_LM is set: {error}.")
        return False
