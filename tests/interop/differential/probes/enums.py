"""Enumerations of `accelerate.utils.dataclasses` and the values of `accelerate.utils.constants`."""

import copy
import enum
import json
import pickle
from typing import Any

from accelerate.utils import constants, dataclasses
from interop.differential.core import Words, probe

ENUMS = [
    "ComputeEnvironment",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DistributedType",
    "DynamoBackend",
    "FP8BackendType",
    "LoggerType",
    "PrecisionType",
    "RNGType",
    "SageMakerDistributedType",
]
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
OTHERS = [None, 0, 1, True, b"no", 1.5, (), ["no"], {"no": 1}]


def enumeration(name: str) -> Any:
    return getattr(dataclasses, name)


@probe(*COVERED, kind=ENUMS)
def members(kind: str):
    """What each member looks like to a caller, in every way that it may be printed, compared and copied."""
    which = enumeration(kind)
    yield "members", list(which)
    yield "names", list(which.__members__)
    yield "values", [member.value for member in which]
    yield "bases", [base.__name__ for base in which.__mro__ if not base.__name__.startswith("_")]
    yield "path", [which.__module__, which.__qualname__, len(which), bool(which)]
    for member in which:
        yield (
            f"{member.name} text",
            [str(member), repr(member), f"{member}", f"{member:>12}", f"{member!s}", f"{member!r}", f"{member:<3}"],
        )
        yield (
            f"{member.name} compared",
            [member == member.value, member == member.name, member == member.value.lower()],
        )
        yield f"{member.name} contained", [member in which, member.name in which.__members__, member in list(which)]
        yield f"{member.name} string", [isinstance(member, str), isinstance(member, enum.Enum), member in {member: 1}]
        yield f"{member.name} key", [{member: 1}.get(member.value), {member.value: 1}.get(member)]
        yield f"{member.name} copies", [copied is member for copied in (copy.copy(member), copy.deepcopy(member))]
        yield f"{member.name} pickled", pickle.loads(pickle.dumps(member)) is member


@probe(*COVERED, kind=ENUMS, word=WORDS)
def by_value(kind: str, word: str) -> Any:
    return enumeration(kind)(word)


@probe(*COVERED, kind=ENUMS, value=OTHERS)
def by_other_value(kind: str, value: object) -> Any:
    return enumeration(kind)(value)


@probe(*COVERED, kind=ENUMS, word=WORDS)
def by_name(kind: str, word: str) -> Any:
    return enumeration(kind)[word]


@probe(*COVERED, kind=ENUMS, word=WORDS)
def by_attribute(kind: str, word: str) -> Any:
    return getattr(enumeration(kind), word)


@probe(*COVERED, kind=ENUMS, word=[*WORDS, *OTHERS])
def contains(kind: str, word: object) -> Any:
    return word in enumeration(kind)


@probe(*COVERED, kind=ENUMS)
def listed(kind: str) -> Any:
    return enumeration(kind).list()


@probe(*COVERED, kind=ENUMS, do=["json", "join", "sorted", "upper", "add", "length", "startswith", "iterate"])
def as_text(kind: str, do: str) -> Any:
    """Members where callers expect strings."""
    first = next(iter(enumeration(kind)))
    does = {
        "json": lambda: json.dumps({"a": first}),
        "join": lambda: ",".join(enumeration(kind)),
        "sorted": lambda: sorted(enumeration(kind)),
        "upper": lambda: first.upper(),
        "add": lambda: "a " + first,
        "length": lambda: len(first),
        "startswith": lambda: first.startswith("N"),
        "iterate": lambda: [len(list(first))],
    }
    return does[do]()


@probe(*COVERED, kind=ENUMS, do=["set value", "delete member", "call bare", "add member", "subclass"])
def changed(kind: str, do: str) -> Any:
    """What is refused."""
    which = enumeration(kind)
    first = next(iter(which))
    if do == "set value":
        first.value = "other"
    elif do == "delete member":
        delattr(which, first.name)
    elif do == "call bare":
        which()
    elif do == "add member":
        which.OTHER = "other"
        return "OTHER" in which.__members__
    else:
        type("Sub", (which,), {})
    return "done"


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


@probe("utils.dataclasses:BaseEnum", item=["a", "A", "", None, 3, "FIRST"])
def own_value(item: object) -> Any:
    return dataclasses.BaseEnum("Own", {"FIRST": "a", "SECOND": "b"})(item)


@probe("utils.dataclasses:BaseEnum", item=[1, 2, None])
def own_number_as_text(item: object) -> Any:
    return str(dataclasses.BaseEnum("Own", {"FIRST": item}).FIRST)


CONSTANTS = [
    "BETA_CP_AVAILABLE_PYTORCH_VERSION",
    "BETA_SP_AVAILABLE_DEEPSPEED_VERSION",
    "BETA_TP_AVAILABLE_PYTORCH_VERSION",
    "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION",
    "CUDA_DISTRIBUTED_TYPES",
    "DEEPSPEED_MULTINODE_LAUNCHERS",
    "DTENSOR_PYTORCH_VERSION",
    "ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION",
    "FSDP2_PYTORCH_VERSION",
    "FSDP2_STATE_DICT_TYPE",
    "FSDP_AUTO_WRAP_POLICY",
    "FSDP_BACKWARD_PREFETCH",
    "FSDP_MODEL_NAME",
    "FSDP_PYTORCH_VERSION",
    "FSDP_SHARDING_STRATEGY",
    "FSDP_STATE_DICT_TYPE",
    "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION",
    "MODEL_NAME",
    "OPTIMIZER_NAME",
    "PROFILE_PATTERN_NAME",
    "RNG_STATE_NAME",
    "SAFE_MODEL_NAME",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "SAFE_WEIGHTS_PATTERN_NAME",
    "SAGEMAKER_PARALLEL_EC2_INSTANCES",
    "SAGEMAKER_PYTHON_VERSION",
    "SAGEMAKER_PYTORCH_VERSION",
    "SAGEMAKER_TRANSFORMERS_VERSION",
    "SAMPLER_NAME",
    "SCALER_NAME",
    "SCHEDULER_NAME",
    "STR_OPERATION_TO_FUNC",
    "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
    "TORCH_DISTRIBUTED_OPERATION_TYPES",
    "TORCH_DYNAMO_MODES",
    "TORCH_LAUNCH_PARAMS",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "WEIGHTS_PATTERN_NAME",
    "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
]


@probe(name=CONSTANTS)
def constant(name: str) -> Any:
    return getattr(constants, name)
