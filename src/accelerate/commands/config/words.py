"""The words that options accept whose rows in the table leave them open, because a command line takes any text there.

The questionnaire offers them, and `accelerate config validate` knows them.
"""

from accelerate.config.options import BY_NAME
from accelerate.utils.constants import (
    DEEPSPEED_MULTINODE_LAUNCHERS,
    FSDP2_STATE_DICT_TYPE,
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
)

_OFFLOAD = ("none", "cpu", "nvme")

WORDS: dict[str, tuple[str, ...]] = {
    "rdzv_backend": ("static", "c10d"),
    "zero_stage": ("0", "1", "2", "3"),
    "offload_optimizer_device": _OFFLOAD,
    "offload_param_device": _OFFLOAD,
    "deepspeed_multinode_launcher": tuple(DEEPSPEED_MULTINODE_LAUNCHERS),
    "fsdp_sharding_strategy": tuple(FSDP_SHARDING_STRATEGY),
    "fsdp_auto_wrap_policy": tuple(FSDP_AUTO_WRAP_POLICY),
    "fsdp_backward_prefetch": tuple(FSDP_BACKWARD_PREFETCH),
    "fsdp_state_dict_type": tuple(FSDP_STATE_DICT_TYPE),
    "megatron_lm_recompute_granularity": ("full", "selective"),
    "megatron_lm_recompute_method": ("uniform", "block"),
    "megatron_lm_attention_backend": ("flash", "fused", "unfused", "local", "auto"),
    "parallelism_config_cp_comm_strategy": ("allgather", "alltoall"),
    "parallelism_config_sp_attn_implementation": ("sdpa", "flash_attention_2", "flash_attention_3"),
}
# Words among others: a value that is not listed may be right as well.
OPEN = frozenset(["parallelism_config_sp_attn_implementation", "rdzv_backend"])
FSDP2_STATE_DICTS = tuple(FSDP2_STATE_DICT_TYPE)

# Options whose text is "true" or "false".
TRUTHS = frozenset(
    [
        "zero3_init_flag",
        "zero3_save_16bit_model",
        "fsdp_offload_params",
        "fsdp_forward_prefetch",
        "fsdp_use_orig_params",
        "fsdp_cpu_ram_efficient_loading",
        "fsdp_sync_module_states",
        "fsdp_activation_checkpointing",
        "fsdp_activation_checkpointing_offload",
        "megatron_lm_sequence_parallelism",
        "megatron_lm_recompute_activations",
        "megatron_lm_use_distributed_optimizer",
        "megatron_lm_attention_softmax_in_fp32",
        "megatron_lm_calculate_per_token_loss",
        "megatron_lm_use_rotary_position_embeddings",
    ]
)


def accepted(name: str) -> tuple[str, ...] | None:
    """Return the words that an option accepts, without those that stand for another one; None for anything.

    Args:
        name: the option.

    Example:
        >>> accepted("rdzv_backend")
        ('static', 'c10d')
    """
    option = BY_NAME[name]
    words = WORDS.get(name) or option.choices
    return words and tuple(word for word in words if word not in option.corrections)


def is_truth(name: str) -> bool:
    """Say whether an option is true or false, even if the table keeps it as a text.

    Args:
        name: the option.
    """
    return BY_NAME[name].type == "bool" or name in TRUTHS
