"""The closed vocabularies of the package: hardware, precision, trackers, compilers.

Imports nothing heavy: the command line reads these names without paying for torch.
"""

from enum import Enum, EnumMeta
from typing import Any, TypeVar

T = TypeVar("T", bound=type)

PUBLIC_PATH = "accelerate.utils.dataclasses"


def at_public_path(cls: T) -> T:
    """Give a class the module path that users import it from. Use it as the outermost decorator.

    Pickles store that path (`training_args.bin` of transformers holds a `DistributedType`). So it must stay valid wherever
    the class is defined, and in any other implementation of this interface.
    """
    cls.__module__ = PUBLIC_PATH
    return cls


@at_public_path
class EnumWithContains(EnumMeta):
    """A metaclass whose `in` accepts a member as well as a member's value, on every Python version."""

    def __contains__(cls, item: Any) -> bool:
        """Tell whether `item` is a member or the value of one."""
        return isinstance(item, cls) or any(item == member.value for member in cls)


class _ListsChoices(Enum):
    """Answers an unknown value with the known ones."""

    @classmethod
    def _missing_(cls, value: object) -> None:
        values = ", ".join(repr(member.value) for member in cls)
        raise ValueError(f"{value!r} is not a valid {cls.__name__}. Choose one of: {values}.")


@at_public_path
class BaseEnum(_ListsChoices, metaclass=EnumWithContains):
    """An enumeration that prints as its value, lists its values and supports `value in Enumeration`.

    Example:
        >>> str(PrecisionType.BF16), "fp16" in PrecisionType, PrecisionType.list()
        ('bf16', True, ['no', 'fp8', 'fp16', 'bf16'])
    """

    def __str__(self) -> str:
        return self.value

    def __format__(self, format_spec: str) -> str:
        return format(self.value, format_spec)  # Python 3.10 and 3.12 disagree about `str` members otherwise

    @classmethod
    def list(cls) -> list[Any]:
        """Return the values in the order of their definition."""
        return [member.value for member in cls]


@at_public_path
class DistributedType(str, _ListsChoices):
    """How the processes of a run cooperate.

    Members compare equal to their name as a string. Only `runtime.traits` and `strategies.registry` compare them; ask a
    trait elsewhere.
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"


@at_public_path
class SageMakerDistributedType(str, _ListsChoices):
    """The kinds of distributed training that Amazon SageMaker offers."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


@at_public_path
class FP8BackendType(str, _ListsChoices):
    """The libraries that can run a model in 8-bit floating point."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


@at_public_path
class ComputeEnvironment(str, _ListsChoices):
    """The place of the training according to a configuration file."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


@at_public_path
class DynamoBackend(str, BaseEnum):
    """The compilers that `torch.compile` can hand a graph to.

    Values are upper case; `torch.compile` takes them in lower case. See `torch._dynamo.list_backends` and
    https://pytorch.org/docs/stable/torch.compiler.html for each. `NO` compiles nothing.
    """

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


@at_public_path
class LoggerType(BaseEnum):
    """The experiment trackers that `Accelerator(log_with=...)` knows; `all` means every installed one."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


@at_public_path
class PrecisionType(str, BaseEnum):
    """The numeric formats that mixed precision may compute in."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


@at_public_path
class RNGType(BaseEnum):
    """The random number generators whose state can be synchronised between processes."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


@at_public_path
class CustomDtype(Enum):
    """Element types that weights can have on the device although torch has no dtype of that size."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


@at_public_path
class DDPCommunicationHookType(BaseEnum):
    """How `DistributedDataParallel` may compress the gradients that it exchanges.

    Source: https://pytorch.org/docs/stable/ddp_comm_hooks.html
    """

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"
