"""Options of some runs: FSDP, several kinds of parallelism, and one that DeepSpeed shares."""

from functools import partial

from accelerate.base.constants import (
    FSDP2_STATE_DICT_TYPE,
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
)
from accelerate.config.options.schema import (
    LOWER,
    NOT_GIVEN,
    TRUE_OR_FALSE,
    Option,
    at_least,
    rows,
)

_FSDP_1, _FSDP_2 = {"fsdp_version": ("1",)}, {"fsdp_version": ("2",)}

# Accelerator reads the variable in every run. The launcher sets it where a feature has the option.
GRADIENT_ACCUMULATION = rows(
    "DeepSpeed Arguments", section="deepspeed_config", feature="deepspeed", env="ACCELERATE_*"
)(
    "gradient_accumulation_steps",
    "Batches whose gradients are added up before the optimizer steps.",
    unset=("auto",),
    offer=1,
    when={"deepspeed_config_file": NOT_GIVEN},
    style=LOWER,
    check=at_least(1),
)

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
    # Weights that only the first process loads must reach the others, so the question comes before all processes load.
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

# Extensions add further values in their features.
ENVIRONMENT_OPTION = rows("options")("compute_environment", "Where the run is.", flags=(), choices="LOCAL_MACHINE")

_WITH_FSDP = {"distributed_type": ("FSDP",)}

parallelism = rows(
    "ParallelismConfig Arguments",
    "parallelism_config_",
    section="parallelism_config",
    feature="parallelism",
    env="PARALLELISM_CONFIG_*",
)
_parallel_size = partial(parallelism, default=1, check=at_least(1))

OPTIONS: tuple[Option, ...] = (
    GRADIENT_ACCUMULATION,
    *FSDP_OPTIONS,
    ENVIRONMENT_OPTION,
    _parallel_size("dp_replicate_size", "Copies of the model (data parallel)."),
    _parallel_size("dp_shard_size", "Processes that one copy is sharded over (FSDP).", when=_WITH_FSDP),
    _parallel_size("tp_size", "Processes that one layer is sharded over (tensor parallel).", when=_WITH_FSDP),
    _parallel_size("cp_size", "Processes that one sequence is sharded over (context parallel).", when=_WITH_FSDP),
    _parallel_size("sp_size", "Processes that share a sequence (Ulysses).", when={"distributed_type": ("DEEPSPEED",)}),
    _parallel_size(
        "pp_size",
        "Processes that the layers are divided over (pipeline parallel).",
        default=None,
        offer=1,
        # The interview asks for meshes only next to an engine, where pipelines have no question.
        when={"distributed_type": ("MULTI_CPU", "MULTI_GPU")},
    ),
)
