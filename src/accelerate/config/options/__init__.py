"""The option table: every setting of a run, spelled once.

The command-line parser, the reader of configuration files, the launcher's exports and the workers' reads all use it. It
contains only data and imports nothing heavy.
"""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from accelerate import extension
from accelerate.config import strategies
from accelerate.config.options import engines, general
from accelerate.config.options.general import DYNAMO_WORDS as DYNAMO_WORDS
from accelerate.config.options.schema import Chapter, Feature, Option

OPTIONS: list[Option] = [*general.OPTIONS, *engines.OPTIONS]

# Strategies that the launcher can be asked for; FSDP's two have one switch.
_SWITCHED = list({spec.switch: spec for spec in strategies.specs() if spec.switch}.values())

# The features that the launcher can run.
FEATURES: dict[str, Feature] = {
    **{spec.feature: Feature(spec.title, spec.switch) for spec in _SWITCHED},
    "parallelism": Feature("Parallelism along several dimensions", "use_parallelism_config"),
    "machines": Feature("Launching on several machines", "num_machines", wanted=1),
}

# The chapters of the interview, in order. Besides options and chapters, `when` may ask for `kind` (a word of `distributed_type`
# without the engines), `distributed_type` and `picks_devices`, which the interview finds out itself.
CHAPTERS: list[Chapter] = [
    Chapter("machines"),
    Chapter("engine"),
    Chapter("compilation", "Should the model be compiled with torch.compile?", was="dynamo_backend"),
    Chapter("compilation details", "Should its settings be changed?", when={"compilation": (True,)}),
    Chapter("fsdp", when={"distributed_type": ("FSDP",)}),
    Chapter(
        "parallelism",
        "Should several kinds of parallelism be combined (ParallelismConfig)?",
        when={"distributed_type": ("DEEPSPEED", "FSDP"), "fsdp_version": (None, "2")},
        was="use_parallelism_config",
    ),
    Chapter("processes"),
    Chapter("precision"),
    Chapter("other"),
]

# Functions that replace old spellings in the content of a configuration file, and add a line for each to a list.
MODERNISERS: list[Callable[[dict[str, Any], list[str]], None]] = []

R = TypeVar("R", Option, Chapter)


def _insert(table: list[R], row: R) -> None:
    names = [other.name for other in table]
    table.insert(names.index(row.before) if row.before in names else len(names), row)


def _add(module: str) -> None:
    """Add the content of an extension's module: `OPTIONS`, `FEATURES` by name, `CHAPTERS` and `MODERNISERS`, those that it has."""
    added = importlib.import_module(module)
    for option in getattr(added, "OPTIONS", ()):
        _insert(OPTIONS, option)
    for chapter in getattr(added, "CHAPTERS", ()):
        _insert(CHAPTERS, chapter)
    FEATURES.update(getattr(added, "FEATURES", {}))
    MODERNISERS.extend(getattr(added, "MODERNISERS", ()))


for _spec in extension.specs():
    if _spec.options:
        _add(_spec.options)
_elsewhere = [feature.wanted for feature in FEATURES.values() if feature.switch == engines.ENVIRONMENT_OPTION.name]
OPTIONS[OPTIONS.index(engines.ENVIRONMENT_OPTION)] = replace(
    engines.ENVIRONMENT_OPTION, choices=("LOCAL_MACHINE", *_elsewhere)
)
# Without its extension, an option of the core that a feature shares is one of every run.
OPTIONS[:] = [option if option.feature in (None, *FEATURES) else replace(option, feature=None) for option in OPTIONS]
BY_NAME: dict[str, Option] = {option.name: option for option in OPTIONS}

# The options that `distributed_type` of a configuration file stands for; an unknown name is an error.
SWITCH_OF_DISTRIBUTED_TYPE: dict[str, str | None] = {
    "NO": None,
    "MULTI_CPU": None,
    **dict.fromkeys(("MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA"), "multi_gpu"),
    **dict.fromkeys(("MULTI_XPU", "MULTI_HPU", "MULTI_NEURON"), "multi_gpu"),
    **{kind.value: spec.switch for spec in _SWITCHED for kind in spec.kinds},
    **{kind: feature.switch for feature in FEATURES.values() for kind in feature.kinds},
}

# At most one of these is chosen. The ones that need devices exclude `--cpu`.
PARADIGMS = [
    "multi_gpu",
    *(feature.switch for feature in FEATURES.values() if feature.kinds),
    *(spec.switch for spec in _SWITCHED),
]
NEEDS_DEVICES = {
    "multi_gpu": "GPUs",
    **{feature.switch: feature.devices for feature in FEATURES.values() if feature.devices},
}

# The mappings of a configuration file, and the feature that reads each of them (None: every run).
SECTIONS: dict[str, str | None] = {
    "dynamo_config": None,
    **{spec.section: spec.feature for spec in _SWITCHED if spec.section},
    **{feature.section: name for name, feature in FEATURES.items() if feature.section},
    "parallelism_config": "parallelism",
}


def of_feature(feature: str) -> tuple[Option, ...]:
    """Return the options that only this feature, a key of `FEATURES`, reads."""
    FEATURES[feature]  # an unknown one is a KeyError
    return tuple(option for option in OPTIONS if option.feature == feature)


@cache
def add_third_parties() -> None:
    """Add the options of strategies of other packages to the tables, once. The command line calls it before it reads them.

    A package that cannot be imported is a warning here. A run that asks for a strategy raises the error.
    """
    try:
        specs = strategies.third_parties()
    except ImportError as error:
        warnings.warn(str(error), stacklevel=2)
        return
    for spec in specs:
        OPTIONS.extend(spec.options)
        BY_NAME.update({option.name: option for option in spec.options})
        if spec.feature:
            FEATURES[spec.feature] = Feature(spec.title or spec.name, spec.switch)
            PARADIGMS.append(spec.switch)
        if spec.section:
            SECTIONS[spec.section] = spec.feature
