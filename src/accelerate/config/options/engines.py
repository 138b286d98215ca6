"""Options of the training engines: DeepSpeed, FSDP and Megatron-LM."""

from functools import partial

from accelerate.config.options.schema import (
    LOWER,
    NOT_GIVEN,
    SEVERAL,
    TRUE_OR_FALSE,
    Option,
    above_zero,
    at_least,
    existing_file,
    fraction,
    json_file,
    rows,
)
from accelerate.utils.constants import (
    DEEPSPEED_MULTINODE_LAUNCHERS,
    FSDP2_STATE_DICT_TYPE,
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
)

_OFFLOAD = ("none", "cpu", "nvme")
_ZERO_3 = {"zero_stage": (3,)}
_LOGS_IN = {"deepspeed_multinode_launcher": [word for word in DEEPSPEED_MULTINODE_LAUNCHERS if word != "standard"]}
_FSDP_1, _FSDP_2 = {"fsdp_version": ("1",)}, {"fsdp_version": ("2",)}
_RECOMPUTES_ALL = {"megatron_lm_recompute_granularity": ("full",)}

_deepspeed = rows(
    "DeepSpeed Arguments",
    section="deepspeed_config",
    feature="deepspeed",
    chapter="deepspeed",
    env="ACCELERATE_DEEPSPEED_*",
    style=LOWER,
)
_without_file = partial(_deepspeed, when={"deepspeed_config_file": NOT_GIVEN})
_of_launcher = partial(_deepspeed, env=None, when=_LOGS_IN, optional=True)

DEEPSPEED_OPTIONS: tuple[Option, ...] = (
    _deepspeed(
        "deepspeed_config_file",
        "DeepSpeed's own configuration file (JSON).",
        env="ACCELERATE_DEEPSPEED_CONFIG_FILE",
        chapter="deepspeed file",
        check=json_file,
    ),
    _without_file("zero_stage", "ZeRO stage: 0, 1, 2 or 3.", words=("0", "1", "2", "3"), offer=2),
    _deepspeed(
        "offload_optimizer_device",
        "Where optimizer state is kept: none, cpu or nvme.",
        words=_OFFLOAD,
        when={"zero_stage": (1, 2, 3)},
    ),
    _deepspeed("offload_param_device", "Where parameters are kept: none, cpu or nvme.", words=_OFFLOAD, when=_ZERO_3),
    _deepspeed(
        "offload_optimizer_nvme_path",
        "Directory on the NVMe disk for optimizer state.",
        when={"offload_optimizer_device": ("nvme",)},
        offer="/nvme",
    ),
    _deepspeed(
        "offload_param_nvme_path",
        "Directory on the NVMe disk for parameters.",
        when={"offload_param_device": ("nvme",)},
        offer="/nvme",
    ),
    # Where a person sets the variable, Accelerator reads it in every run; the launcher sets it for DeepSpeed alone.
    _without_file(
        "gradient_accumulation_steps",
        "Batches whose gradients are added up before the optimizer steps.",
        unset=("auto",),
        env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        offer=1,
        check=at_least(1),
    ),
    _without_file(
        "gradient_clipping",
        "Largest norm of the gradients.",
        type="float",
        unset=("auto",),
        env="ACCELERATE_GRADIENT_CLIPPING",
        optional=True,
        check=above_zero,
    ),
    _deepspeed(
        "zero3_init_flag",
        "With ZeRO 3, build the model in shards (true or false).",
        env="ACCELERATE_DEEPSPEED_ZERO3_INIT",
        words=TRUE_OR_FALSE,
        when={"zero_stage": (3, None)},
    ),
    _deepspeed(
        "zero3_save_16bit_model",
        "With ZeRO 3, save the gathered 16-bit weights (true or false).",
        words=TRUE_OR_FALSE,
        when=_ZERO_3,
    ),
    _without_file(
        "deepspeed_moe_layer_cls_names",
        "Classes of mixture-of-experts layers, separated by commas.",
        env="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
        optional=True,
    ),
    _deepspeed(
        "deepspeed_multinode_launcher",
        "How DeepSpeed starts other machines: pdsh, standard, openmpi, mvapich, mpich, nossh or slurm.",
        env=None,
        words=tuple(DEEPSPEED_MULTINODE_LAUNCHERS),
        when={"num_machines": SEVERAL},
    ),
    _of_launcher("deepspeed_hostfile", "Host file of DeepSpeed's launcher.", check=existing_file),
    _of_launcher("deepspeed_exclusion_filter", "Hosts and GPUs of that file to leave out."),
    _of_launcher(
        "deepspeed_inclusion_filter",
        "Hosts and GPUs of that file to use.",
        when={**_LOGS_IN, "deepspeed_exclusion_filter": NOT_GIVEN},
    ),
)


_fsdp = rows(
    "FSDP Arguments", "fsdp_", section="fsdp_config", feature="fsdp", chapter="fsdp", env="FSDP_*", style=LOWER
)
_fsdp_off = partial(_fsdp, words=TRUE_OR_FALSE, default="false")
_fsdp_on = partial(_fsdp_off, default="true")

FSDP_OPTIONS: tuple[Option, ...] = (
    _fsdp("version", "FSDP generation.", choices=("1", "2"), default="1"),
    _fsdp(
        "sharding_strategy",
        "What is sharded (FSDP 1): FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2.",
        default="FULL_SHARD",
        words=tuple(FSDP_SHARDING_STRATEGY),
        when=_FSDP_1,
    ),
    _fsdp(
        "reshard_after_forward",
        "Free gathered parameters after the forward pass: true or false (FSDP 2), or a sharding strategy (FSDP 1).",
        default="true",
        words=TRUE_OR_FALSE,
        open=True,
        when=_FSDP_2,
    ),
    _fsdp_off("offload_params", "Keep parameters and gradients on the CPU (true or false)."),
    _fsdp(
        "auto_wrap_policy",
        "What is wrapped: TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP.",
        words=tuple(FSDP_AUTO_WRAP_POLICY),
    ),
    _fsdp(
        "transformer_layer_cls_to_wrap",
        "Class names of the layers to wrap, separated by commas (TRANSFORMER_BASED_WRAP).",
        env="FSDP_TRANSFORMER_CLS_TO_WRAP",
        when={"fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",)},
        optional=True,
    ),
    _fsdp(
        "min_num_params",
        "Parameters from which a submodule is wrapped (SIZE_BASED_WRAP).",
        default=100_000_000,
        when={"fsdp_auto_wrap_policy": ("SIZE_BASED_WRAP",)},
        check=at_least(1),
    ),
    _fsdp(
        "backward_prefetch",
        "When the next parameters are gathered in the backward pass: BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH.",
        words=tuple(FSDP_BACKWARD_PREFETCH),
        when=_FSDP_1,
    ),
    _fsdp(
        "state_dict_type",
        "Shape of checkpoints: FULL_STATE_DICT, LOCAL_STATE_DICT or SHARDED_STATE_DICT.",
        words=tuple(FSDP_STATE_DICT_TYPE),
        special_words=(_FSDP_2, tuple(FSDP2_STATE_DICT_TYPE)),
        offer="SHARDED_STATE_DICT",
    ),
    _fsdp_off("forward_prefetch", "Gather the next parameters during the forward pass too.", when=_FSDP_1),
    _fsdp_on("use_orig_params", "Keep the original parameters visible (FSDP 1).", when=_FSDP_1),
    _fsdp_on(
        "cpu_ram_efficient_loading", "Let only the first process load pretrained weights; the others receive them."
    ),
    # What only the first process loads must reach the others, so the question comes where every process loads.
    _fsdp_on(
        "sync_module_states",
        "Broadcast the weights of the first process (FSDP 1).",
        when={**_FSDP_1, "fsdp_cpu_ram_efficient_loading": ("false",)},
    ),
    _fsdp_off("activation_checkpointing", "Recompute activations in the backward pass instead of keeping them."),
    _fsdp_off(
        "activation_checkpointing_offload",
        "Keep the inputs of checkpointed layers in CPU memory (FSDP 2).",
        when={**_FSDP_2, "fsdp_activation_checkpointing": ("true",)},
    ),
)


_megatron = rows(
    "Megatron-LM Arguments",
    "megatron_lm_",
    section="megatron_lm_config",
    feature="megatron",
    chapter="megatron details",
    env="MEGATRON_LM_*",
)
_megatron_bool = partial(_megatron, default=False)
_megatron_word = partial(_megatron, style=LOWER)
_megatron_truth = partial(_megatron_word, words=TRUE_OR_FALSE)
_megatron_int = partial(_megatron, type="int", check=at_least(1))
_megatron_one = partial(_megatron_int, offer=1)
_degree = partial(_megatron_int, default=1, chapter="megatron")
_recommended = partial(_megatron_truth, offer="true", chapter="megatron")
_dropout = partial(_megatron, type="float", optional=True, check=fraction)

MEGATRON_OPTIONS: tuple[Option, ...] = (
    _degree("tp_degree", "Degree of tensor parallelism."),
    _recommended(
        "sequence_parallelism",
        "Split sequences over the tensor-parallel processes (true or false).",
        when={"megatron_lm_tp_degree": SEVERAL},
    ),
    _degree("pp_degree", "Degree of pipeline parallelism."),
    _megatron_int(
        "num_micro_batches",
        "Micro-batches of one pipeline pass.",
        chapter="megatron",
        when={"megatron_lm_pp_degree": SEVERAL},
        offer=1,
    ),
    _recommended("recompute_activations", "Recompute selected activations (true or false)."),
    _recommended("use_distributed_optimizer", "Shard the optimizer over the data-parallel processes."),
    _megatron(
        "gradient_clipping",
        "Largest norm of the gradients; 0 is no limit.",
        default=1.0,
        chapter="megatron",
        check=at_least(0),
    ),
    _megatron_word(
        "recompute_granularity",
        "What is recomputed: full or selective.",
        words=("full", "selective"),
        when={"megatron_lm_recompute_activations": ("true",)},
    ),
    _megatron_word(
        "recompute_method",
        "How full recomputation is spread: uniform or block.",
        words=("uniform", "block"),
        when=_RECOMPUTES_ALL,
    ),
    _megatron_one("recompute_num_layers", "Layers of one unit of recomputation.", when=_RECOMPUTES_ALL),
    _megatron_word(
        "attention_backend",
        "Attention kernel: flash, fused, unfused, local or auto.",
        words=("flash", "fused", "unfused", "local", "auto"),
        offer="auto",
    ),
    _dropout("attention_dropout", "Dropout of the attention."),
    _dropout("hidden_dropout", "Dropout of the hidden layers."),
    _megatron_truth("attention_softmax_in_fp32", "Compute the softmax of the attention in fp32 (true or false)."),
    _megatron_truth("use_rotary_position_embeddings", "Use rotary position embeddings (true or false)."),
    _megatron_truth("calculate_per_token_loss", "Scale the loss by the number of tokens (true or false)."),
    _megatron_bool("eod_mask_loss", "Leave end-of-document tokens out of the loss."),
    _megatron_one("context_parallel_size", "Degree of context parallelism."),
    _megatron_one("expert_model_parallel_size", "Degree of expert parallelism."),
    _megatron_one("expert_tensor_parallel_size", "Degree of tensor parallelism within an expert."),
    _megatron_int("decoder_last_pipeline_num_layers", "Decoder layers of the last pipeline stage.", optional=True),
    _megatron_bool("use_custom_fsdp", "Use Megatron's own FSDP."),
    _megatron_bool("optimizer_cpu_offload", "Run the optimizer on the CPU."),
    _megatron_bool(
        "overlap_cpu_optimizer_d2h_h2d",
        "Overlap the CPU optimizer with the copies to and from the GPU.",
        when={"megatron_lm_optimizer_cpu_offload": (True,)},
    ),
    _megatron_bool("use_precision_aware_optimizer", "Use the optimizer that keeps its state in low precision."),
    _megatron_bool("no_load_optim", "Do not load the optimizer."),
    _megatron_bool("no_save_optim", "Do not save the optimizer."),
)
