"""The option table: every setting of a run, spelled once.

The parser, the reader of configuration files, what the launcher exports and what a worker reads all come from it. It is
data only and imports nothing heavy.
"""

from accelerate.config.options.engines import DEEPSPEED_OPTIONS, FSDP_OPTIONS, MEGATRON_OPTIONS
from accelerate.config.options.features import (
    FEATURES,
    NEEDS_DEVICES,
    PARADIGMS,
    SECTIONS,
    SWITCH_OF_DISTRIBUTED_TYPE,
    Feature,
)
from accelerate.config.options.general import DYNAMO_WORDS
from accelerate.config.options.general import OPTIONS as GENERAL_OPTIONS
from accelerate.config.options.schema import Option
from accelerate.config.options.special import ENVIRONMENT_OPTIONS, FP8_OPTIONS, PARALLELISM_OPTIONS, TPU_OPTIONS

OPTIONS: tuple[Option, ...] = (
    *GENERAL_OPTIONS,
    *TPU_OPTIONS,
    *DEEPSPEED_OPTIONS,
    *FSDP_OPTIONS,
    *MEGATRON_OPTIONS,
    *FP8_OPTIONS,
    *ENVIRONMENT_OPTIONS,
    *PARALLELISM_OPTIONS,
)
BY_NAME: dict[str, Option] = {option.name: option for option in OPTIONS}

__all__ = [
    "BY_NAME",
    "DYNAMO_WORDS",
    "FEATURES",
    "NEEDS_DEVICES",
    "OPTIONS",
    "PARADIGMS",
    "SECTIONS",
    "SWITCH_OF_DISTRIBUTED_TYPE",
    "Feature",
    "Option",
    "of_feature",
]


def of_feature(feature: str) -> tuple[Option, ...]:
    """Return the options that only this feature reads.

    Args:
        feature: a key of `FEATURES`.

    Raises:
        KeyError: there is no such feature.
    """
    FEATURES[feature]
    return tuple(option for option in OPTIONS if option.feature == feature)
