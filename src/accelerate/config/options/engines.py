"""Options of what some runs use: the engines, FP8, several kinds of parallelism."""

from functools import partial

from accelerate.base.constants import (
    DEEPSPEED_MULTINODE_LAUNCHERS,
    FSDP2_STATE_DICT_TYPE,
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
)
from accelerate.config.options.schema import (
    BIT,
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
    matching,
    rows,
)

_OFFLOAD = "none cpu nvme"
_ZERO, _ZERO_3 = {"zero_stage": (1, 2, 3)}, {"zero_stage": (3,)}
_NVME, _NVME_3 = {"offload_optimizer_device": ("nvme",)}, {"offload_param_device": ("nvme",)}
_LOGS_IN = {"deepspeed_multinode_launcher": [word for word in DEEPSPEED_MULTINODE_LAUNCHERS if word != "standard"]}
_FSDP_1, _FSDP_2 = {"fsdp_version": ("1",)}, {"fsdp_version": ("2",)}

_deepspeed = rows(
    "DeepSpeed Arguments", section="deepspeed_config", feature="deepspeed", env="ACCELERATE_DEEPSPEED_*", style=LOWER
)
_deepspeed_truth = partial(_deepspeed, words=TRUE_OR_FALSE)
_without_file = partial(_deepspeed, when={"deepspeed_config_file": NOT_GIVEN})
# Where a person sets the variable, Accelerator reads it in every run; the launcher sets it for DeepSpeed alone.
_of_every_run = partial(_without_file, env="ACCELERATE_*", unset=("auto",))
_nvme = partial(_deepspeed, offer="/nvme")
_of_launcher = partial(_deepspeed, env=None, when=_LOGS_IN, optional=True)

DEEPSPEED_OPTIONS = (
    _deepspeed(
        "deepspeed_config_file",
        "DeepSpeed's own configuration file (JSON).",
        env="ACCELERATE_*",
        chapter="deepspeed file",
        check=json_file,
    ),
    _without_file("zero_stage", "ZeRO stage.", words="0 1 2 3", offer=2),
    _deepspeed("offload_optimizer_device", "Where optimizer state is kept.", words=_OFFLOAD, when=_ZERO),
    _deepspeed("offload_param_device", "Where parameters are kept.", words=_OFFLOAD, when=_ZERO_3),
    _nvme("offload_optimizer_nvme_path", "Directory on the NVMe disk for optimizer state.", when=_NVME),
    _nvme("offload_param_nvme_path", "Directory on the NVMe disk for parameters.", when=_NVME_3),
    _of_every_run(
        "gradient_accumulation_steps",
        "Batches whose gradients are added up before the optimizer steps.",
        offer=1,
        check=at_least(1),
    ),
    _of_every_run(
        "gradient_clipping", "Largest norm of the gradients.", type="float", optional=True, check=above_zero
    ),
    _deepspeed_truth(
        "zero3_init_flag",
        "With ZeRO 3, build the model in shards.",
        env="ACCELERATE_DEEPSPEED_ZERO3_INIT",
        when={"zero_stage": (3, None)},
    ),
    _deepspeed_truth("zero3_save_16bit_model", "With ZeRO 3, save the gathered 16-bit weights.", when=_ZERO_3),
    _without_file(
        "deepspeed_moe_layer_cls_names",
        "Classes of mixture-of-experts layers, separated by commas.",
        env="ACCELERATE_*",
        optional=True,
    ),
    _deepspeed(
        "deepspeed_multinode_launcher",
        "How DeepSpeed starts other machines.",
        env=None,
        words=DEEPSPEED_MULTINODE_LAUNCHERS,
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

# Options that are fields of `DeepSpeedPlugin`: where they are in a file of DeepSpeed's, which may say "auto", and the plugin's defaults.
DEEPSPEED_FIELDS = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps", "auto"),
    "gradient_clipping": ("gradient_clipping", "auto"),
    "zero_stage": ("zero_optimization.stage", 2),
    "offload_optimizer_device": ("zero_optimization.offload_optimizer.device", "none"),
    "offload_param_device": ("zero_optimization.offload_param.device", "none"),
    "offload_param_nvme_path": ("zero_optimization.offload_param.nvme_path", "none"),
    "offload_optimizer_nvme_path": ("zero_optimization.offload_optimizer.nvme_path", "none"),
    "zero3_save_16bit_model": ("zero_optimization.stage3_gather_16bit_weights_on_model_save", False),
}

# Options that only version 1 of FSDP reads, and what version 2 has in their place.
ONLY_FSDP_1 = {
    "fsdp_sharding_strategy": "fsdp_reshard_after_forward says whether gathered parameters are freed",
    "fsdp_forward_prefetch": "version 2 takes the number of units to gather ahead instead",
    "fsdp_backward_prefetch": "version 2 always fetches the next weights during the backward pass",
    "fsdp_use_orig_params": "version 2 always keeps the original parameters",
    "fsdp_sync_module_states": "version 2 needs no switch to give all processes the same weights",
}

_fsdp = rows("FSDP Arguments", "fsdp_", section="fsdp_config", feature="fsdp", env="FSDP_*", style=LOWER)
_fsdp_1 = partial(_fsdp, when=_FSDP_1)
_fsdp_off = partial(_fsdp, words=TRUE_OR_FALSE, default="false")
_fsdp_on = partial(_fsdp_off, default="true")

FSDP_OPTIONS = (
    _fsdp("version", "FSDP generation.", choices="1 2", default="1"),
    _fsdp_1("sharding_strategy", "What is sharded (FSDP 1).", default="FULL_SHARD", words=FSDP_SHARDING_STRATEGY),
    _fsdp(
        "reshard_after_forward",
        "Free gathered parameters after the forward pass: true or false (FSDP 2), or a sharding strategy (FSDP 1).",
        default="true",
        words=TRUE_OR_FALSE,
        allow_other=True,
        when=_FSDP_2,
    ),
    _fsdp(
        "module_precision", "Precision by module name, a JSON mapping (FSDP 2).", type="json", chapter="", when=_FSDP_2
    ),
    _fsdp_off("offload_params", "Keep parameters and gradients on the CPU."),
    _fsdp("auto_wrap_policy", "What is wrapped.", words=FSDP_AUTO_WRAP_POLICY),
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
    _fsdp_1("backward_prefetch", "When backward gathers the next parameters (FSDP 1).", words=FSDP_BACKWARD_PREFETCH),
    _fsdp(
        "state_dict_type",
        "Shape of checkpoints.",
        words=FSDP_STATE_DICT_TYPE,
        special_words=(_FSDP_2, tuple(FSDP2_STATE_DICT_TYPE)),
        offer="SHARDED_STATE_DICT",
    ),
    _fsdp_off(
        "forward_prefetch", "Gather the next parameters during the forward pass too.", when=_FSDP_1, allow_other=True
    ),
    _fsdp_on("use_orig_params", "Keep the original parameters visible (FSDP 1).", when=_FSDP_1),
    _fsdp_on("cpu_ram_efficient_loading", "Load pretrained weights on the first process; the others receive them."),
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


# No interview asks about Megatron-LM: its plugin is for those who write their loop for it.
_megatron = rows(
    "Megatron-LM Arguments", "megatron_lm_", section="megatron_lm_config", feature="megatron", env="MEGATRON_LM_*"
)
_whole = partial(_megatron, type="int", check=at_least(1))
_bool = partial(_megatron, default=False)
_word = partial(_megatron, style=LOWER)
_truth = partial(_word, words=TRUE_OR_FALSE)
_dropout = partial(_megatron, type="float", check=fraction)

MEGATRON_OPTIONS = (
    _whole("tp_degree", "Degree of tensor parallelism.", default=1),
    _truth("sequence_parallelism", "Split sequences over the tensor-parallel processes."),
    _whole("pp_degree", "Degree of pipeline parallelism.", default=1),
    _whole("num_micro_batches", "Micro-batches of one pipeline pass."),
    _truth("recompute_activations", "Recompute selected activations."),
    _truth("use_distributed_optimizer", "Shard the optimizer over the data-parallel processes."),
    _megatron("gradient_clipping", "Largest norm of the gradients; 0 is no limit.", default=1.0, check=at_least(0)),
    _word("recompute_granularity", "What is recomputed.", words="full selective"),
    _word("recompute_method", "How full recomputation is spread.", words="uniform block"),
    _whole("recompute_num_layers", "Layers of one unit of recomputation."),
    _word("attention_backend", "Attention kernel.", words="flash fused unfused local auto"),
    _dropout("attention_dropout", "Dropout of the attention."),
    _dropout("hidden_dropout", "Dropout of the hidden layers."),
    _truth("attention_softmax_in_fp32", "Compute the softmax of the attention in fp32."),
    _truth("use_rotary_position_embeddings", "Use rotary position embeddings."),
    _truth("calculate_per_token_loss", "Scale the loss by the number of tokens."),
    _bool("eod_mask_loss", "Leave end-of-document tokens out of the loss."),
    _whole("context_parallel_size", "Degree of context parallelism."),
    _whole("expert_model_parallel_size", "Degree of expert parallelism."),
    _whole("expert_tensor_parallel_size", "Degree of tensor parallelism within an expert."),
    _whole("decoder_last_pipeline_num_layers", "Decoder layers of the last pipeline stage."),
    _bool("use_custom_fsdp", "Use Megatron's own FSDP."),
    _bool("optimizer_cpu_offload", "Run the optimizer on the CPU."),
    _bool("overlap_cpu_optimizer_d2h_h2d", "Overlap the CPU optimizer with the copies to and from the GPU."),
    _bool("use_precision_aware_optimizer", "Use the optimizer that keeps its state in low precision."),
    _bool("no_load_optim", "Do not load the optimizer."),
    _bool("no_save_optim", "Do not save the optimizer."),
)


_fp8 = rows("FP8 Arguments", "fp8_", section="fp8_config", feature="fp8", env="ACCELERATE_FP8_*", key="*")
_AO = {"fp8_backend": ("ao",)}
_ao = partial(_fp8, default=True, style=BIT, when=_AO)
_te = partial(_fp8, when={"fp8_backend": ("te",)})

FP8_OPTIONS = (
    _fp8("backend", "Library: torchao or Transformer Engine.", choices="ao te msamp", words="ao te"),
    _te("use_autocast_during_eval", "Evaluate in FP8 too (te).", default=False, switch=True),
    _te("margin", "Margin of the scaling factor, as a power of two (te).", default=0, check=at_least(0)),
    _te("interval", "Steps between two computations of the scaling factor (te).", default=1, check=at_least(1)),
    _te("format", "Number format of FP8 (te).", choices="HYBRID E4M3 E5M2", default="HYBRID", key="fp8_format"),
    _te("amax_history_len", "How many past maxima the scaling looks at (te).", default=1024, check=at_least(1)),
    _te("amax_compute_algo", "Which past maximum counts (te).", choices="max most_recent", default="most_recent"),
    _te(
        "override_linear_precision",
        "Use higher precision in the forward pass, the input gradient, the weight gradient (te).",
        type="bools",
        default=(False, False, False),
        env=None,
        env_names=("ACCELERATE_FP8_OVERRIDE_FPROP", "ACCELERATE_FP8_OVERRIDE_DGRAD", "ACCELERATE_FP8_OVERRIDE_WGRAD"),
    ),
    _fp8(
        "opt_level",
        "Level of MS-AMP, which is not supported (msamp).",
        choices="O1 O2",
        default="O2",
        when={"fp8_backend": ("msamp",)},
    ),
    _ao("enable_fsdp_float8_all_gather", "Let FSDP2 gather the weights in FP8 (ao).", when={**_AO, **_FSDP_2}),
    _ao("pad_inner_dim", "Pad matrices to sizes FP8 can do (ao)."),
)

# What it may be besides a machine of one's own is with the features of extensions.
ENVIRONMENT_OPTION = rows("options")("compute_environment", "Where the run is.", flags=(), choices="LOCAL_MACHINE")

_WITH_FSDP, _WITH_DEEPSPEED = {"distributed_type": ("FSDP",)}, {"distributed_type": ("DEEPSPEED",)}
# The interview asks for meshes beside an engine alone, where pipelines have no question.
_PLAIN = {"distributed_type": ("MULTI_CPU", "MULTI_GPU")}
_SPLIT = {"parallelism_config_cp_size": SEVERAL}
_ULYSSES = {"parallelism_config_sp_size": SEVERAL}


_parallelism = rows(
    "ParallelismConfig Arguments",
    "parallelism_config_",
    section="parallelism_config",
    feature="parallelism",
    env="PARALLELISM_CONFIG_*",
)
_ulysses = partial(_parallelism, exported_if_several="parallelism_config_sp_size", when=_ULYSSES)
_parallel_size = partial(_parallelism, default=1, check=at_least(1))

PARALLELISM_OPTIONS = (
    _parallel_size("dp_replicate_size", "Copies of the model (data parallel)."),
    _parallel_size("dp_shard_size", "Processes that one copy is sharded over (FSDP).", when=_WITH_FSDP),
    _parallel_size("tp_size", "Processes that one layer is split over (tensor parallel).", when=_WITH_FSDP),
    _parallel_size("cp_size", "Processes that one sequence is split over (context parallel).", when=_WITH_FSDP),
    _parallelism("cp_backend", "Library of context parallelism.", choices="torch", default="torch", when=_SPLIT),
    _parallelism(
        "cp_comm_strategy",
        "How the processes of one sequence exchange keys and values.",
        default="allgather",
        exported_if_several="parallelism_config_cp_size",
        words="allgather alltoall",
        when=_SPLIT,
    ),
    _parallel_size("sp_size", "Processes that share a sequence (Ulysses).", when=_WITH_DEEPSPEED),
    _parallel_size(
        "pp_size",
        "Processes that the layers are divided over (pipeline parallel).",
        default=None,
        offer=1,
        when=_PLAIN,
    ),
    _parallelism(
        "sp_backend",
        "Implementation of sequence parallelism; torch is this fork's own.",
        choices="deepspeed torch",
        default="deepspeed",
        when=_ULYSSES,
    ),
    _ulysses("sp_seq_length_is_variable", "The sequence length differs from batch to batch.", default=True),
    _ulysses(
        "sp_seq_length",
        "Length of every sequence (Ulysses).",
        when={**_ULYSSES, "parallelism_config_sp_seq_length_is_variable": (False,)},
        check=matching(r"0*[1-9][0-9]*", "it must be a whole number of at least 1"),
    ),
    _ulysses(
        "sp_attn_implementation",
        "Attention of sequence parallelism: eager, flash_attention_2, flash_attention_3 or sdpa.",
        default="sdpa",
        words="sdpa flash_attention_2 flash_attention_3",
        allow_other=True,
    ),
)


OPTIONS: tuple[Option, ...] = (
    *(*DEEPSPEED_OPTIONS, *FSDP_OPTIONS, *MEGATRON_OPTIONS),
    *(*FP8_OPTIONS, ENVIRONMENT_OPTION, *PARALLELISM_OPTIONS),
)
