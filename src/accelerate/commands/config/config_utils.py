"""What the subcommands of `accelerate config` share."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from accelerate.commands.config.interview import Asker
from accelerate.commands.utils import CustomArgumentParser, make_parser
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


def add_command(
    commands: Any, parents: list[argparse.ArgumentParser], name: str, description: str, func: Callable[..., Any]
) -> CustomArgumentParser:
    """Add a subcommand of `accelerate config` to what `ArgumentParser.add_subparsers` returned."""
    return make_parser(name, description, commands, func, parents=parents, formatter_class=SubcommandHelpFormatter)


# The questions of other packages use what follows.


def _ask_field(
    input_text: str,
    convert_value: Callable[[str], T] | None = None,
    default: T | None = None,
    error_message: str | None = None,
) -> T | str | None:
    """Ask for a line of text until it can be converted."""

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
    """Ask for one of several lines."""
    at = Asker().choose(input_text.strip(), [str(option) for option in options], default)
    return at if convert_value is None else convert_value(at)


def _convert_yes_no_to_bool(value: str) -> bool:
    return to_bool(value, "The answer")


def _by_number(members: Sequence[T]) -> Callable[[Any], T]:
    """Return a function from an answer, a number, to the member of that number."""
    return lambda value: members[int(value)]


_BACKENDS = [DynamoBackend(word.replace("TORHCHXLA", "TORCHXLA")).value for word in DYNAMO_BACKENDS]
_convert_compute_environment = _by_number(list(ComputeEnvironment))
_convert_distributed_mode = _by_number([DistributedType(word) for word in KIND_WORDS])
_convert_dynamo_backend = _by_number(_BACKENDS)
_convert_mixed_precision = _by_number([PrecisionType(word) for word in ("no", "fp16", "bf16", "fp8")])
_convert_sagemaker_distributed_mode = _by_number(list(SageMakerDistributedType))
_convert_fp8_backend = _by_number([FP8BackendType(word) for word in ("AO", "TE", "MSAMP")])
