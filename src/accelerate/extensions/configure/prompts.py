"""Single prompts, for programs that ask their own questions; they import them from `accelerate.commands.config.config_utils`."""

from collections.abc import Callable, Sequence
from typing import Any

from accelerate.config.enums import (
    ComputeEnvironment,
    DistributedType,
    DynamoBackend,
    FP8BackendType,
    PrecisionType,
    SageMakerDistributedType,
)
from accelerate.extensions.configure.config_utils import DYNAMO_BACKENDS
from accelerate.extensions.configure.interview import Asker

# The menus' choices, in the order of their lines.
_KINDS = [
    "NO",
    "MULTI_CPU",
    "MULTI_XPU",
    "MULTI_HPU",
    "MULTI_GPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_NEURON",
    "XLA",
]


class BulletMenu:
    """A question with lines to choose from.

    Args:
        prompt: The question.
        choices: The lines.
    """

    def __init__(self, prompt: str | None = None, choices: Sequence[str] = ()) -> None:
        self.prompt = prompt
        self.choices = list(choices)

    def run(self, default_choice: int = 0) -> int:
        """Ask, and return the index of the chosen line; Enter takes `default_choice`."""
        return Asker().choose(self.prompt or "", self.choices, default_choice)


def _ask_options(
    input_text: str,
    options: Sequence[str] = (),
    convert_value: Callable[[int], Any] | None = None,
    default: int = 0,
) -> Any:
    """Let the user choose a line, and return its index or what `convert_value` makes of it."""
    index = BulletMenu(input_text, options).run(default)
    return index if convert_value is None else convert_value(index)


def _ask_field(
    input_text: str,
    convert_value: Callable[[str], Any] | None = None,
    default: Any = None,
    error_message: str | None = None,
) -> Any:
    """Ask until `convert_value` accepts the answer, and return its result; Enter takes the default if there is one."""
    while True:
        answer = input(input_text)
        if not answer and default is not None:
            return default
        try:
            return answer if convert_value is None else convert_value(answer)
        except Exception:  # whatever the caller's function raises for a wrong answer
            if error_message is not None:
                print(error_message)


def _convert_yes_no_to_bool(value: str) -> bool:
    """Return whether an answer is "yes"; anything but "yes" and "no" is a KeyError."""
    return {"yes": True, "no": False}[value.lower()]


def _convert_compute_environment(value: int | str) -> ComputeEnvironment:
    """Return the environment of a line: this machine, SageMaker."""
    return list(ComputeEnvironment)[int(value)]


def _convert_distributed_mode(value: int | str) -> DistributedType:
    """Return the distributed type of a line."""
    return DistributedType(_KINDS[int(value)])


def _convert_dynamo_backend(value: int | str) -> str:
    """Return the word of a line of `DYNAMO_BACKENDS`."""
    return DynamoBackend(DYNAMO_BACKENDS[int(value)]).value


def _convert_mixed_precision(value: int | str) -> PrecisionType:
    """Return the precision of a line: no, fp16, bf16, fp8."""
    return PrecisionType(("no", "fp16", "bf16", "fp8")[int(value)])


def _convert_fp8_backend(value: int | str) -> FP8BackendType:
    """Return the FP8 library of a line: AO, TE, MSAMP."""
    return FP8BackendType(("AO", "TE", "MSAMP")[int(value)])


def _convert_sagemaker_distributed_mode(value: int | str) -> SageMakerDistributedType:
    """Return SageMaker's kind of parallelism of a line: none, of data, of the model."""
    return SageMakerDistributedType(("NO", "DATA_PARALLEL", "MODEL_PARALLEL")[int(value)])
