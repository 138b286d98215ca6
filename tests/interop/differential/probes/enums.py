"""Enumerations of `accelerate.utils.dataclasses` and the values of `accelerate.utils.constants`."""

from typing import Any

from accelerate.utils import constants, dataclasses
from interop.differential.core import Words, probe

ENUMS = [
    "ComputeEnvironment", "CustomDtype", "DDPCommunicationHookType", "DistributedType", "DynamoBackend",
    "FP8BackendType", "LoggerType", "PrecisionType", "RNGType", "SageMakerDistributedType",
]  # fmt: skip
COVERED = [f"utils.dataclasses:{name}" for name in [*ENUMS, "BaseEnum", "EnumWithContains"]]
WORDS = Words(
    [
        "no",
        "NO",
        "No",
        "fp16",
        "FP16",
        "bf16",
        "fp8",
        "power_sgd",
        "POWER_SGD",
        "batched_power_sgd",
        "inductor",
        "INDUCTOR",
        "eager",
    ]
    + [
        "te",
        "TE",
        "AO",
        "MSAMP",
        "all",
        "ALL",
        "tensorboard",
        "comet_ml",
        "COMETML",
        "wandb",
        "torch",
        "generator",
        "cuda",
        "int4",
    ]
    + [
        "MULTI_GPU",
        "multi_gpu",
        "FSDP",
        "MEGATRON_LM",
        "LOCAL_MACHINE",
        "DATA_PARALLEL",
        "",
        " ",
        "nonsense",
        "TORCHXLA_TRACE_ONCE",
    ]
)


def enumeration(name: str) -> Any:
    return getattr(dataclasses, name)


@probe(*COVERED, kind=ENUMS, word=WORDS)
def by_attribute(kind: str, word: str) -> Any:
    return getattr(enumeration(kind), word)


@probe(
    "utils.dataclasses:BaseEnum", "utils.dataclasses:EnumWithContains", item=["a", "A", "b", 1, "1", None, "FIRST", ""]
)
def own_enumeration(item: object):
    """A subclass of the user's own."""
    own = dataclasses.BaseEnum("Own", {"FIRST": "a", "SECOND": "b"})
    yield "contains", item in own
    yield "member", own.FIRST in own
    yield "text", [str(own.FIRST), f"{own.SECOND}", repr(own.FIRST)]
    yield "listed", own.list()
    yield "metaclass", [type(own).__name__, isinstance(dataclasses.BaseEnum, dataclasses.EnumWithContains)]


CONSTANTS = [
    "BETA_CP_AVAILABLE_PYTORCH_VERSION", "BETA_SP_AVAILABLE_DEEPSPEED_VERSION", "BETA_TP_AVAILABLE_PYTORCH_VERSION",
    "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION", "CUDA_DISTRIBUTED_TYPES", "DEEPSPEED_MULTINODE_LAUNCHERS",
    "DTENSOR_PYTORCH_VERSION", "ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION", "FSDP2_PYTORCH_VERSION",
    "FSDP2_STATE_DICT_TYPE", "FSDP_AUTO_WRAP_POLICY", "FSDP_BACKWARD_PREFETCH", "FSDP_MODEL_NAME",
    "FSDP_PYTORCH_VERSION", "FSDP_SHARDING_STRATEGY", "FSDP_STATE_DICT_TYPE",
    "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION", "MODEL_NAME", "OPTIMIZER_NAME", "PROFILE_PATTERN_NAME",
    "RNG_STATE_NAME", "SAFE_MODEL_NAME", "SAFE_WEIGHTS_INDEX_NAME", "SAFE_WEIGHTS_NAME", "SAFE_WEIGHTS_PATTERN_NAME",
    "SAGEMAKER_PARALLEL_EC2_INSTANCES", "SAGEMAKER_PYTHON_VERSION", "SAGEMAKER_PYTORCH_VERSION",
    "SAGEMAKER_TRANSFORMERS_VERSION", "SAMPLER_NAME", "SCALER_NAME", "SCHEDULER_NAME", "STR_OPERATION_TO_FUNC",
    "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING", "TORCH_DISTRIBUTED_OPERATION_TYPES", "TORCH_DYNAMO_MODES",
    "TORCH_LAUNCH_PARAMS", "WEIGHTS_INDEX_NAME", "WEIGHTS_NAME", "WEIGHTS_PATTERN_NAME",
    "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
]  # fmt: skip


@probe(name=CONSTANTS)
def constant(name: str) -> Any:
    return getattr(constants, name)
