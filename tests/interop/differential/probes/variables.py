"""Every environment variable that plugins, states and `Accelerator` read, and what it changes there."""

import os

from accelerate import Accelerator, ParallelismConfig
from accelerate.state import GradientState, PartialState
from accelerate.utils import dataclasses
from interop.differential.core import Words, probe, words
from interop.differential.probes.plugins import fields_of, plain

FLAGS = words("true True TRUE 1 yes on false FALSE 0 no nonsense 2", "")
NUMBERS = words("0 1 2 -1 2.5 07 1e3 auto nonsense", "", " 3 ")
DEVICES = words("none cpu nvme CPU NVMe nonsense", "")
FSDP = {
    "FSDP_VERSION": words("1 2 3 0 v2 2.0", ""),
    "FSDP_SHARDING_STRATEGY": words("FULL_SHARD full_shard SHARD_GRAD_OP NO_SHARD HYBRID_SHARD HYBRID_SHARD_ZERO2 1 2 5 9 x", ""), "FSDP_RESHARD_AFTER_FORWARD": Words([*FLAGS, "FULL_SHARD", "SHARD_GRAD_OP"]),
    "FSDP_AUTO_WRAP_POLICY": words("TRANSFORMER_BASED_WRAP transformer_based_wrap SIZE_BASED_WRAP size_based_wrap NO_WRAP no_wrap x", ""),
    "FSDP_BACKWARD_PREFETCH": words("BACKWARD_PRE backward_pre BACKWARD_POST NO_PREFETCH no_prefetch 1 x", ""),
    "FSDP_STATE_DICT_TYPE": words("FULL_STATE_DICT full_state_dict LOCAL_STATE_DICT SHARDED_STATE_DICT sharded_state_dict 1 2 x", ""), "FSDP_OFFLOAD_PARAMS": FLAGS, "FSDP_FORWARD_PREFETCH": FLAGS, "FSDP_USE_ORIG_PARAMS": FLAGS,
    "FSDP_SYNC_MODULE_STATES": FLAGS, "FSDP_CPU_RAM_EFFICIENT_LOADING": FLAGS, "FSDP_ACTIVATION_CHECKPOINTING": FLAGS,
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": FLAGS, "FSDP_MIN_NUM_PARAMS": NUMBERS,
    "FSDP_TRANSFORMER_CLS_TO_WRAP": words("A A,B a", "", "A, B"),
    "FSDP_IGNORED_MODULES": Words(["", "head", "layers.*"]),
}  # fmt: skip
DEEPSPEED = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": NUMBERS, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": NUMBERS,
    "ACCELERATE_GRADIENT_CLIPPING": NUMBERS, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": DEVICES,
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": DEVICES,
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": words("none /nvme NONE", ""),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": words("none /nvme NONE", ""),
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": FLAGS, "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": FLAGS,
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": Words(["", "none", "absent.json"]),
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": Words(["", "A", "A,B"]),
    "ACCELERATE_FP8_BACKEND": words("MSAMP msamp TE", ""), "ACCELERATE_FP8_OPT_LEVEL": words("O1 O2 O3 o2", ""),
}  # fmt: skip
MEGATRON_FLAGS = (
    "USE_CUSTOM_FSDP NO_LOAD_OPTIM EOD_MASK_LOSS NO_SAVE_OPTIM OPTIMIZER_CPU_OFFLOAD OVERLAP_CPU_OPTIMIZER_D2H_H2D "
    "USE_PRECISION_AWARE_OPTIMIZER SEQUENCE_PARALLELISM RECOMPUTE_ACTIVATIONS USE_DISTRIBUTED_OPTIMIZER ATTENTION_SOFTMAX_IN_FP32 "
    "CALCULATE_PER_TOKEN_LOSS USE_ROTARY_POSITION_EMBEDDINGS"
)
MEGATRON_NUMBERS = (
    "TP_DEGREE PP_DEGREE NUM_MICRO_BATCHES GRADIENT_CLIPPING RECOMPUTE_NUM_LAYERS DECODER_LAST_PIPELINE_NUM_LAYERS "
    "EXPERT_MODEL_PARALLEL_SIZE CONTEXT_PARALLEL_SIZE EXPERT_TENSOR_PARALLEL_SIZE ATTENTION_DROPOUT HIDDEN_DROPOUT"
)
MEGATRON = {
    **{f"MEGATRON_LM_{name}": FLAGS for name in MEGATRON_FLAGS.split(" ")},
    **{f"MEGATRON_LM_{name}": NUMBERS for name in MEGATRON_NUMBERS.split(" ")},
    "MEGATRON_LM_RECOMPUTE_GRANULARITY": words("full selective FULL x", ""),
    "MEGATRON_LM_RECOMPUTE_METHOD": words("uniform block BLOCK x", ""),
    "MEGATRON_LM_ATTENTION_BACKEND": words("flash fused local auto FLASH true x", ""),
}
PARALLELISM = {
    **{f"PARALLELISM_CONFIG_{axis}_SIZE": NUMBERS for axis in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")},
    "PARALLELISM_CONFIG_CP_BACKEND": words("torch TORCH deepspeed x", ""),
    "PARALLELISM_CONFIG_SP_BACKEND": words("deepspeed DEEPSPEED x", ""),
    "PARALLELISM_CONFIG_CP_COMM_STRATEGY": words("allgather alltoall ALLTOALL x", ""),
    "PARALLELISM_CONFIG_SP_SEQ_LENGTH": NUMBERS, "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE": FLAGS,
    "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": words(
        "eager sdpa SDPA flash_attention_2 flash_attention_3 flash x", "",
    ),
}  # fmt: skip
DYNAMO = {
    "ACCELERATE_DYNAMO_BACKEND": words("no NO inductor INDUCTOR Aot_Eager x", ""),
    "ACCELERATE_DYNAMO_MODE": words("default reduce-overhead max-autotune DEFAULT x", ""),
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": FLAGS, "ACCELERATE_DYNAMO_USE_DYNAMIC": FLAGS,
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": FLAGS,
}  # fmt: skip
FP8 = {
    "ACCELERATE_FP8_OPT_LEVEL": words("O1 O2 O3 o1 x", ""), "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": FLAGS,
    "ACCELERATE_FP8_PAD_INNER_DIM": FLAGS, "ACCELERATE_FP8_MARGIN": NUMBERS,
    "ACCELERATE_FP8_BACKEND": words("te AO msamp x", ""),
}  # fmt: skip


def register(title, covers, variables, build, **given):
    for variable, values in variables.items():

        def run(value, variable=variable):
            os.environ[variable] = value
            return fields_of(build(**given))

        run.__name__ = f"{title}_{variable}"
        probe(covers, value=values)(run)


DATACLASS = "utils.dataclasses:"
register("fsdp1", DATACLASS + "FullyShardedDataParallelPlugin", FSDP, dataclasses.FullyShardedDataParallelPlugin)
register(
    "fsdp2", DATACLASS + "FullyShardedDataParallelPlugin", FSDP, dataclasses.FullyShardedDataParallelPlugin,
    fsdp_version=2,
)  # fmt: skip
for policy_ in ("transformer_based_wrap", "size_based_wrap"):
    which_ = {name: FSDP[name] for name in ("FSDP_TRANSFORMER_CLS_TO_WRAP", "FSDP_MIN_NUM_PARAMS")}
    register(
        policy_, DATACLASS + "FullyShardedDataParallelPlugin", which_, dataclasses.FullyShardedDataParallelPlugin,
        auto_wrap_policy=policy_,
    )  # fmt: skip
register(
    "checkpointing", DATACLASS + "FullyShardedDataParallelPlugin", {"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": FLAGS},
    dataclasses.FullyShardedDataParallelPlugin, activation_checkpointing=True,
)  # fmt: skip
register("deepspeed", DATACLASS + "DeepSpeedPlugin", DEEPSPEED, dataclasses.DeepSpeedPlugin)
register("stage3", DATACLASS + "DeepSpeedPlugin", DEEPSPEED, dataclasses.DeepSpeedPlugin, zero_stage=3)
CONTEXT = {"MEGATRON_LM_CONTEXT_PARALLEL_SIZE": MEGATRON.pop("MEGATRON_LM_CONTEXT_PARALLEL_SIZE")}
register("megatron", DATACLASS + "MegatronLMPlugin", MEGATRON, dataclasses.MegatronLMPlugin, context_parallel_size=1)
register("megatron", DATACLASS + "MegatronLMPlugin", CONTEXT, dataclasses.MegatronLMPlugin)
register("parallelism", "parallelism_config:ParallelismConfig", PARALLELISM, ParallelismConfig)
register("tp2", "parallelism_config:ParallelismConfig", PARALLELISM, ParallelismConfig, tp_size=2)
register("cp2", "parallelism_config:ParallelismConfig", PARALLELISM, ParallelismConfig, cp_size=2)
register("sp2", "parallelism_config:ParallelismConfig", PARALLELISM, ParallelismConfig, sp_size=2)
register("dynamo", DATACLASS + "TorchDynamoPlugin", DYNAMO, dataclasses.TorchDynamoPlugin)
register("msamp", DATACLASS + "MSAMPRecipeKwargs", FP8, dataclasses.MSAMPRecipeKwargs)
register("ao", DATACLASS + "AORecipeKwargs", FP8, dataclasses.AORecipeKwargs)
register("te", DATACLASS + "TERecipeKwargs", FP8, dataclasses.TERecipeKwargs)
register("context", DATACLASS + "TorchContextParallelConfig", PARALLELISM, dataclasses.TorchContextParallelConfig)
register(
    "ulysses", DATACLASS + "DeepSpeedSequenceParallelConfig", PARALLELISM, dataclasses.DeepSpeedSequenceParallelConfig
)


def of_partial_state():
    state = PartialState()
    names = "device debug backend distributed_type num_processes process_index local_process_index fork_launched is_main_process"
    return {name: getattr(state, name, "<absent>") for name in names.split()}


def of_accelerator():
    accelerator = Accelerator()
    state = accelerator.state
    return {
        "mixed_precision": [accelerator.mixed_precision, state.mixed_precision, state._mixed_precision],
        "native_amp": accelerator.native_amp,
        "scaler": type(accelerator.scaler).__name__,
        "accumulation": [accelerator.gradient_accumulation_steps, GradientState().num_steps],
        "distributed_type": accelerator.distributed_type,
        "device": accelerator.device,
        "debug": state.debug,
        "dynamo": plain(fields_of(state.dynamo_plugin)),
        "downcast": getattr(state, "downcast_bfloat", "<absent>"),
        "fp8": [accelerator.fp8_backend, state.use_fp8 if hasattr(state, "use_fp8") else "<absent>"],
        "plugins": [
            type(getattr(state, name, None)).__name__
            for name in ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin")
        ],
        "parallelism": accelerator.parallelism_config and accelerator.parallelism_config.total_size,
        "is_fsdp2": accelerator.is_fsdp2,
    }


STATES = {
    "ACCELERATE_USE_CPU": FLAGS, "ACCELERATE_DEBUG_MODE": FLAGS,
    "ACCELERATE_TORCH_DEVICE": words("cpu CPU meta nonsense", ""),
    "ACCELERATE_MIXED_PRECISION": words("no NO fp16 FP16 bf16 Bf16 fp8 fp32 nonsense", ""),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": NUMBERS, "ACCELERATE_DOWNCAST_BF16": FLAGS,
    "ACCELERATE_DYNAMO_BACKEND": DYNAMO["ACCELERATE_DYNAMO_BACKEND"],
    "ACCELERATE_DYNAMO_MODE": DYNAMO["ACCELERATE_DYNAMO_MODE"], "ACCELERATE_DYNAMO_USE_DYNAMIC": FLAGS,
    "ACCELERATE_USE_FSDP": FLAGS, "ACCELERATE_USE_DEEPSPEED": FLAGS, "ACCELERATE_USE_MEGATRON_LM": FLAGS,
    "ACCELERATE_USE_PARALLELISM_CONFIG": FLAGS, "ACCELERATE_USE_XPU": FLAGS, "ACCELERATE_USE_SAGEMAKER": FLAGS,
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": words("no DATA_PARALLEL x", ""), "ACCELERATE_CPU_AFFINITY": FLAGS,
    "ACCELERATE_LOG_LEVEL": words("info INFO debug nonsense 10", ""),
    "ACCELERATE_FP8_BACKEND": words("te AO ao MSAMP x", ""), "FORK_LAUNCHED": FLAGS,
    "LOCAL_RANK": words("0 -1 1 x", ""), "RANK": words("0 -1 x", ""), "WORLD_SIZE": words("0 1 -1 x", ""),
    "XLA_USE_BF16": FLAGS, "TORCH_DISTRIBUTED_DEBUG": words("OFF INFO DETAIL", ""),
    "CUDA_VISIBLE_DEVICES": Words(["", "0", "-1"]),
}  # fmt: skip


def register_state(title, covers, build, **more):
    for variable, values in STATES.items():

        def run(value, variable=variable):
            os.environ.update(more)
            os.environ[variable] = value
            found = build()
            return {**found, "left": {name: os.environ.get(name) for name in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")}}

        run.__name__ = f"{title}_{variable}"
        probe(*covers, value=values)(run)


register_state("partial", ["state:PartialState"], of_partial_state)
register_state("accelerator", ["accelerator:Accelerator", "state:AcceleratorState"], of_accelerator)
register_state("fp8", ["accelerator:Accelerator"], of_accelerator, ACCELERATE_MIXED_PRECISION="fp8")
register_state("bf16", ["accelerator:Accelerator"], of_accelerator, ACCELERATE_MIXED_PRECISION="bf16")
