"""The settings of Megatron-LM, which this version does not run: its plugin can be made and read, and what completes it raises."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


def _later(what: str) -> NotImplementedError:
    instead = "FullyShardedDataParallelPlugin, or ParallelismConfig(tp_size=...) for tensor parallelism"
    return NotImplementedError(f"{what} completes a run of Megatron-LM, which is not available yet. Use {instead}.")


@add_model_config_to_megatron_parser("megatron-bert")
def parse_bert_config(megatron_lm_plugin: "MegatronLMPlugin", model: Any, batch_data: Batch) -> None:
    """Read the sizes of a BERT. Not available yet: a NotImplementedError."""
    raise _later("parse_bert_config")


@add_model_config_to_megatron_parser("gpt2")
def parse_gpt2_config(megatron_lm_plugin: "MegatronLMPlugin", model: Any, batch_data: Batch) -> None:
    """Read the sizes of a GPT-2. Not available yet: a NotImplementedError."""
    raise _later("parse_gpt2_config")


@add_model_config_to_megatron_parser("t5")
def parse_t5_config(megatron_lm_plugin: "MegatronLMPlugin", model: Any, batch_data: Batch) -> None:
    """Read the sizes of a T5. Not available yet: a NotImplementedError."""
    raise _later("parse_t5_config")


@add_model_config_to_megatron_parser("llama")
def parse_llama_config(megatron_lm_plugin: "MegatronLMPlugin", model: Any, batch_data: Batch) -> None:
    """Read the sizes of a Llama. Not available yet: a NotImplementedError."""
    raise _later("parse_llama_config")


@add_model_config_to_megatron_parser("glm4_moe")
def parse_glm4_moe_config(megatron_lm_plugin: "MegatronLMPlugin", model: Any, batch_data: Batch) -> None:
    """Read the sizes of a GLM-4.5 mixture of experts. Not available yet: a NotImplementedError."""
    raise _later("parse_glm4_moe_config")


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
# Fields that are arguments of Megatron-LM, and what it calls some of them.
_FIELDS = (
    *(name for name in _FROM_ENVIRONMENT if name != "recompute_activations"),
    *("pipeline_model_parallel_split_rank", "num_layers_per_virtual_pipeline_stage", "DDP_impl", "consumed_samples"),
    *("no_wd_decay_cond", "scale_lr_cond", "lr_mult", "megatron_dataset_flag", "eval_iters", "eval_interval"),
)
_RENAMED = {
    "tp_degree": "tensor_model_parallel_size",
    "pp_degree": "pipeline_model_parallel_size",
    "sequence_parallelism": "sequence_parallel",
    "gradient_clipping": "clip_grad",
}


@at_public_path
@dataclass
class MegatronLMPlugin:
    """How Megatron-LM runs the training.

    This version has no Megatron-LM: a plugin can be made and its settings read, and `Accelerator` refuses it. The `set_*`
    methods, which complete `megatron_lm_default_args` while objects are prepared, raise a NotImplementedError. A field of the first two groups that is None falls back to the environment variable MEGATRON_LM_<FIELD>,
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
        NotImplementedError: `set_all_logging_options` beside `tensorboard_dir`.

    Example:
        >>> plugin = MegatronLMPlugin(tp_degree=2, pp_degree=2, num_micro_batches=4)
        >>> plugin.megatron_lm_default_args["tensor_model_parallel_size"]
        2

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
        arguments = {_RENAMED.get(field, field): getattr(self, field) for field in _FIELDS}
        self.megatron_lm_default_args: dict[str, Any] = arguments
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

    # -- while objects are prepared, which this version cannot do: each is a NotImplementedError ------------------

    def set_network_size_args(self, model: "nn.Module", batch_data: Batch = None) -> None:
        """Read the network's sizes from the model's configuration. Not available yet: a NotImplementedError."""
        raise _later("set_network_size_args")

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Switch on fp16 or bf16. Not available yet: a NotImplementedError."""
        raise _later("set_mixed_precision")

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Set the batch sizes. Not available yet: a NotImplementedError."""
        raise _later("set_training_args")

    def set_optimizer_type(self, optimizer: "Optimizer") -> None:
        """Take over the kind and options of a torch optimizer. Not available yet: a NotImplementedError."""
        raise _later("set_optimizer_type")

    def set_scheduler_args(self, scheduler: Any) -> None:
        """Take over the lengths of a `MegatronLMDummyScheduler`. Not available yet: a NotImplementedError."""
        raise _later("set_scheduler_args")

    def set_tensorboard_logging_options(self) -> None:
        """Switch on what Megatron-LM can write to TensorBoard. Not available yet: a NotImplementedError."""
        raise _later("set_tensorboard_logging_options")
