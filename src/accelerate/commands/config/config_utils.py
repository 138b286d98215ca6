"""What the subcommands of `accelerate config` share."""

import argparse
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeVar

from accelerate.commands.config.ask import Asker
from accelerate.config.enums import (
    ComputeEnvironment,
    DistributedType,
    DynamoBackend,
    FP8BackendType,
    PrecisionType,
    SageMakerDistributedType,
)
from accelerate.config.options import DYNAMO_WORDS
from accelerate.config.values import to_bool

T = TypeVar("T")

DYNAMO_BACKENDS = [word.upper() for word in DYNAMO_WORDS.split() if word != "no"]
# In the order in which the kinds of machines are offered.
KIND_WORDS = (
    *("NO", "MULTI_CPU", "MULTI_XPU", "MULTI_HPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA"),
    *("MULTI_NEURON", "XLA"),
)


class SubcommandHelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Prints the usage of a subcommand without the placeholder that stands for the choice among subcommands."""

    def _format_usage(self, usage: str | None, actions: object, groups: object, prefix: str | None) -> str:
        return super()._format_usage(usage, actions, groups, prefix).replace("<command> [<args>] ", "")


def _ask_field(
    input_text: str,
    convert_value: Callable[[str], T] | None = None,
    default: T | None = None,
    error_message: str | None = None,
) -> T | str | None:
    """Ask for a line of text until it can be converted; the questions of other packages use this."""

    def parse(text: str) -> Any:
        try:
            return text if convert_value is None else convert_value(text)
        except Exception as error:  # a stranger's function may raise anything
            raise ValueError(error_message or str(error)) from None

    answer = Asker().text(input_text.strip(), parse, default, optional=default is None and convert_value is None)
    return "" if answer is None else answer


def _ask_options(
    input_text: str, options: Sequence[Any] = (), convert_value: Callable[[int], T] | None = None, default: int = 0
) -> T | int:
    """Ask for one of several lines; the questions of other packages use this."""
    at = Asker().choose(input_text.strip(), [str(option) for option in options], default)
    return at if convert_value is None else convert_value(at)


def _convert_yes_no_to_bool(value: str) -> bool:
    return to_bool(value, "The answer")


def _member(kind: type[Enum], value: Any) -> Any:
    """Return the member of that number, in the order in which they are offered."""
    return list(kind)[int(value)]


def _convert_compute_environment(value: Any) -> ComputeEnvironment:
    return _member(ComputeEnvironment, value)


def _convert_distributed_mode(value: Any) -> DistributedType:
    return DistributedType(KIND_WORDS[int(value)])


def _convert_dynamo_backend(value: Any) -> str:
    return DynamoBackend(DYNAMO_BACKENDS[int(value)].replace("TORHCHXLA", "TORCHXLA")).value


def _convert_mixed_precision(value: Any) -> PrecisionType:
    return PrecisionType(("no", "fp16", "bf16", "fp8")[int(value)])


def _convert_sagemaker_distributed_mode(value: Any) -> SageMakerDistributedType:
    return _member(SageMakerDistributedType, value)


def _convert_fp8_backend(value: Any) -> FP8BackendType:
    return FP8BackendType(("AO", "TE", "MSAMP")[int(value)])
