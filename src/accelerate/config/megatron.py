"""The settings of Megatron-LM: from arguments and environment variables to the arguments that it parses."""

import argparse
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate.config.enums import at_public_path
from accelerate.config.megatron_parsers import (
    MODEL_CONFIGS_TO_MEGATRON_PARSERS,
    add_model_config_to_megatron_parser,
    find_parser,
    parse_bert_config,
    parse_glm4_moe_config,
    parse_gpt2_config,
    parse_llama_config,
    parse_t5_config,
)
from accelerate.config.values import setting, to_bool, to_int
from accelerate.utils.imports import is_megatron_lm_available

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = [
    "MODEL_CONFIGS_TO_MEGATRON_PARSERS",
    "MegatronLMPlugin",
    "add_model_config_to_megatron_parser",
    "parse_bert_config",
    "parse_glm4_moe_config",
    "parse_gpt2_config",
    "parse_llama_config",
    "parse_t5_config",
]


def _to_float(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {value!r}; it must be a number.") from None


# Fields that MEGATRON_LM_<FIELD> stands in for: the default, and how to read the text.
_FROM_ENVIRONMENT: dict[str, tuple[Any, Callable[[Any, str], Any] | None]] = {
    "tp_degree": (1, to_int),
    "pp_degree": (1, to_int),
    "num_micro_batches": (1, to_int),
    "context_parallel_size": (1, to_int),
    "expert_model_parallel_size": (1, to_int),
    "expert_tensor_parallel_size": (1, to_int),
    "decoder_last_pipeline_num_layers": (None, to_int),
    "gradient_clipping": (1.0, _to_float),
    "attention_dropout": (0.0, _to_float),
    "hidden_dropout": (0.0, _to_float),
    "use_custom_fsdp": (False, to_bool),
    "overlap_cpu_optimizer_d2h_h2d": (False, to_bool),
    "no_load_optim": (False, to_bool),
    "no_save_optim": (False, to_bool),
    "eod_mask_loss": (False, to_bool),
    "optimizer_cpu_offload": (False, to_bool),
    "use_precision_aware_optimizer": (False, to_bool),
    "recompute_activations": (False, to_bool),
    "use_distributed_optimizer": (False, to_bool),
    "sequence_parallelism": (False, to_bool),
    "attention_backend": (True, to_bool),
    "attention_softmax_in_fp32": (True, to_bool),
    "calculate_per_token_loss": (True, to_bool),
    "use_rotary_position_embeddings": (True, to_bool),
    "recompute_granularity": (None, None),
    "recompute_method": (None, None),
    "recompute_num_layers": (None, to_int),
}
# Fields that Megatron-LM knows under another name.
_RENAMED = {
    "tensor_model_parallel_size": "tp_degree",
    "pipeline_model_parallel_size": "pp_degree",
    "sequence_parallel": "sequence_parallelism",
    "clip_grad": "gradient_clipping",
}
_SAME_NAME = [
    "pipeline_model_parallel_split_rank",
    "num_layers_per_virtual_pipeline_stage",
    "DDP_impl",
    "use_distributed_optimizer",
    "num_micro_batches",
    "consumed_samples",
    "no_wd_decay_cond",
    "scale_lr_cond",
    "lr_mult",
    "megatron_dataset_flag",
    "eval_iters",
    "eval_interval",
    "use_custom_fsdp",
    "no_load_optim",
    "eod_mask_loss",
    "no_save_optim",
    "optimizer_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_precision_aware_optimizer",
    "decoder_last_pipeline_num_layers",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "attention_backend",
    "expert_model_parallel_size",
    "context_parallel_size",
    "attention_dropout",
    "hidden_dropout",
    "attention_softmax_in_fp32",
    "expert_tensor_parallel_size",
    "calculate_per_token_loss",
    "use_rotary_position_embeddings",
]
_OF_SCHEDULE = [
    "train_iters",
    "train_samples",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_fraction",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_decay_style",
    "weight_decay_incr_style",
    "start_weight_decay",
    "end_weight_decay",
    "min_lr",
]


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

    Logging: `tensorboard_dir`, `set_all_logging_options`. Output: `return_logits`.

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
        for name, (default, convert) in _FROM_ENVIRONMENT.items():
            setattr(self, name, setting(getattr(self, name), f"MEGATRON_LM_{name.upper()}", default, convert))
        self._resolve_recomputation()
        self._complete_consumed_samples()
        # Pipelines and sharded optimizers keep gradients in one buffer, which only Megatron-LM's own wrapper has.
        self.DDP_impl = "local" if self.pp_degree > 1 or self.use_distributed_optimizer else "torch"
        self.megatron_lm_default_args: dict[str, Any] = {
            argument: getattr(self, name) for argument, name in _RENAMED.items()
        } | {name: getattr(self, name) for name in _SAME_NAME}
        if self.tensorboard_dir is not None:
            self.megatron_lm_default_args["tensorboard_dir"] = self.tensorboard_dir
            if self.set_all_logging_options:
                self.set_tensorboard_logging_options()
        elif self.set_all_logging_options:
            warnings.warn("set_all_logging_options=True is ignored without a tensorboard_dir.", stacklevel=3)
        self.megatron_lm_default_args.update(self.other_megatron_args or {})

    def _resolve_recomputation(self) -> None:
        if self.recompute_granularity is None:
            self.recompute_granularity = "selective" if self.recompute_activations else "full"
        if self.recompute_granularity == "full":  # a method and a number of layers exist for this one only
            self.recompute_method = "uniform" if self.recompute_method is None else self.recompute_method
            self.recompute_num_layers = 1 if self.recompute_num_layers is None else self.recompute_num_layers

    def _complete_consumed_samples(self) -> None:
        given = self.consumed_samples
        if given is not None and not isinstance(given, Sequence):
            raise TypeError(f"consumed_samples is {given!r}; give the numbers for train, valid and test as a list.")
        if given and len(given) < 3:  # those that are left out begin
            self.consumed_samples = [*given, 0, 0][:3]

    def set_network_size_args(self, model: "nn.Module", batch_data: Mapping[str, Any] | None = None) -> None:
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
        """Switch on half precision.

        Args:
            mixed_precision: fp16 or bf16; anything else changes nothing.
        """
        if mixed_precision in ("fp16", "bf16"):
            self.megatron_lm_default_args[mixed_precision] = True
        if mixed_precision == "bf16":  # gradients are reduced in float32, which torch's wrapper does not do
            self.DDP_impl = self.megatron_lm_default_args["DDP_impl"] = "local"

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Set the batch sizes.

        Args:
            micro_batch_size: samples that a rank works on at a time.
            dp_degree: data-parallel ranks.
        """
        self.data_parallel_size = dp_degree
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = dp_degree * micro_batch_size * self.num_micro_batches
        for name in ("data_parallel_size", "micro_batch_size", "global_batch_size"):
            self.megatron_lm_default_args[name] = getattr(self, name)

    def set_optimizer_type(self, optimizer: "Optimizer") -> None:
        """Take over a torch optimizer's kind and options; Megatron-LM then builds its own.

        Args:
            optimizer: some Adam or SGD.

        Raises:
            ValueError: another kind.
        """
        name = type(optimizer).__name__
        options = getattr(optimizer, "defaults", {})
        arguments = self.megatron_lm_default_args
        if "adam" in name.lower():
            arguments["optimizer"] = "adam"
            arguments["adam_beta1"], arguments["adam_beta2"] = options["betas"]
            arguments["adam_eps"] = options["eps"]
        elif "sgd" in name.lower():
            arguments["optimizer"] = "sgd"
            arguments["sgd_momentum"] = options["momentum"]
        else:
            raise ValueError(f"The optimizer is a {name}; Megatron-LM has Adam and SGD.")
        arguments["lr"] = options["lr"]
        arguments["weight_decay"] = options["weight_decay"]

    def set_scheduler_args(self, scheduler: Any) -> None:
        """Take over the lengths of a `MegatronLMDummyScheduler`, where `train_iters` and warm-up are not set.

        Args:
            scheduler: has `total_num_steps` and `warmup_num_steps`, counted in batches of one process.

        Raises:
            ValueError: a length is missing, or `set_training_args` was not called.
        """
        if self.train_iters is None:
            self.train_iters = self._per_replica(scheduler.total_num_steps, "total_num_steps")
            if self.train_samples is not None:
                warnings.warn(
                    f"train_samples={self.train_samples} is ignored; the scheduler's total_num_steps give "
                    f"train_iters={self.train_iters}.",
                    stacklevel=2,
                )
                self.train_samples = None
        if self.lr_warmup_iters is None and self.lr_warmup_fraction is not None:
            self.lr_warmup_iters = self.lr_warmup_samples = 0  # Megatron-LM accepts one of the three
        elif self.lr_warmup_iters is None:
            self.lr_warmup_iters = self._per_replica(scheduler.warmup_num_steps, "warmup_num_steps")
            if self.lr_warmup_samples:
                warnings.warn(
                    f"lr_warmup_samples={self.lr_warmup_samples} is ignored; the scheduler's warmup_num_steps give "
                    f"lr_warmup_iters={self.lr_warmup_iters}.",
                    stacklevel=2,
                )
            self.lr_warmup_samples = 0
        for name in _OF_SCHEDULE:
            self.megatron_lm_default_args[name] = getattr(self, name)

    def _per_replica(self, steps: int | None, name: str) -> int:
        if steps is None:
            raise ValueError(f"{name} of the MegatronLMDummyScheduler is not set.")
        if "data_parallel_size" not in self.megatron_lm_default_args:
            raise ValueError(f"{name} cannot be divided among replicas before `set_training_args` was called.")
        return steps // self.megatron_lm_default_args["data_parallel_size"]

    def set_tensorboard_logging_options(self) -> None:
        """Switch on everything that Megatron-LM can write to TensorBoard.

        Raises:
            ImportError: Megatron-LM is not installed.
        """
        if not is_megatron_lm_available():
            raise ImportError(
                "set_all_logging_options reads the list of options from Megatron-LM, which is not installed. Install it or name "
                "the options in other_megatron_args."
            )
        from megatron.training.arguments import _add_logging_args

        parser = argparse.ArgumentParser(add_help=False)
        _add_logging_args(parser)
        for action in parser._actions:
            if action.dest.startswith("log_") and isinstance(action.const, bool):
                self.megatron_lm_default_args[action.dest] = True
