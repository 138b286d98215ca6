"""`accelerate to-fsdp2`: a configuration file for FSDP 1 turned into one for FSDP 2."""

import argparse
import enum
import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from accelerate.base.constants import FSDP_SHARDING_STRATEGY
from accelerate.commands import to_fsdp2 as public
from accelerate.commands.utils import make_parser
from accelerate.config.options.engines import FSDP_OPTIONS, ONLY_FSDP_1
from accelerate.launch.errors import LaunchError

logger = logging.getLogger(__name__)


class ConversionStatus(enum.Enum):
    """Why a setting of FSDP 1 has no successor."""

    __module__ = "accelerate.commands.to_fsdp2"

    NOT_YET_IMPLEMENTED = 0
    REMOVED = -1


# The strategies of FSDP 1: whether parameters are freed between forward and backward.
_RESHARDS = {name: name in ("FULL_SHARD", "HYBRID_SHARD") for name in FSDP_SHARDING_STRATEGY}
# The advice for a strategy without a successor.
_COPIES = "For copies of a sharded model set dp_replicate_size and dp_shard_size in parallelism_config."
_WHOLE = "To keep the full model on every process, set distributed_type to MULTI_GPU instead."
_LOST = {"NO_SHARD": _WHOLE, "HYBRID_SHARD": _COPIES, "HYBRID_SHARD_ZERO2": _COPIES}
# A key of FSDP 1 to the key of FSDP 2, or to why there is none.
ARGUMENT_KEY_MAPPING: dict[str, str | ConversionStatus] = {
    **{option.name: option.name for option in FSDP_OPTIONS},
    **dict.fromkeys(ONLY_FSDP_1, ConversionStatus.REMOVED),
    "fsdp_sharding_strategy": "fsdp_reshard_after_forward",
    "fsdp_forward_prefetch": ConversionStatus.NOT_YET_IMPLEMENTED,
}
# The values of a key of FSDP 1 that read differently in FSDP 2.
_RENAMED = ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")
ARGUMENT_VALUE_MAPPING: dict[str, dict[str, bool]] = {key: dict(_RESHARDS) for key in _RENAMED}


def load_config(config_file: str) -> dict[str, Any]:
    """Read a configuration file without converting it.

    Args:
        config_file: the file.

    Raises:
        FileNotFoundError: there is no such file.
        LaunchError: it is no YAML or JSON, or holds no keys and values.
    """
    from accelerate.extensions.configure.config_utils import find_required  # not for --help
    from accelerate.launch.config_file import load_mapping

    return load_mapping(find_required(config_file))


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Turn the content of a configuration file for FSDP 1 into one for FSDP 2.

    Settings that FSDP 2 does not have are dropped, and settings with another meaning are converted to the nearest one, both
    with a warning. Files without an `fsdp_config`, or for FSDP 2 already, are not changed.

    Args:
        config: the content; it is not changed.

    Returns:
        The new content.

    Raises:
        LaunchError: a value means nothing to FSDP 1, so that it has no successor.

    Example:
        >>> convert_config_to_fsdp2({"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}})
        {'fsdp_config': {'fsdp_version': 2, 'fsdp_reshard_after_forward': True}}
    """
    old = config.get("fsdp_config") or {}
    if not isinstance(old, Mapping):
        raise LaunchError(f"fsdp_config is {old!r}; it must hold keys and values.")
    if not old:
        if (kind := config.get("distributed_type")) not in (None, "FSDP"):
            zero = (
                "Answer `accelerate config` for FSDP 2: ZeRO 3 is fsdp_reshard_after_forward true there, ZeRO 2 false."
            )
            text = "The file is for %s and is not changed: only files with an fsdp_config are converted. %s"
            logger.warning(text, kind, zero if kind == "DEEPSPEED" else "")
        return config
    old = _by_full_name(old)
    version = str(old.pop("fsdp_version", None) or 1)
    if version == "2":
        logger.warning("The file says fsdp_version: 2 already and stays as it is. Write 1 there to convert its keys.")
        return config
    if version != "1":
        raise LaunchError(f"fsdp_version is {version}; there are 1 and 2.")
    if old.get("fsdp_sharding_strategy") is not None:
        old.pop("fsdp_reshard_after_forward", None)  # FSDP 1 reads the other name
    new: dict[str, Any] = {"fsdp_version": 2}
    for key, value in old.items():
        target = ARGUMENT_KEY_MAPPING.get(key, key)
        if isinstance(target, ConversionStatus):
            logger.warning("%s is dropped: %s.", key, ONLY_FSDP_1[key])
        elif key not in ARGUMENT_VALUE_MAPPING:
            new[target] = value
        elif value is not None:
            new[target] = _reshards(key, value)
    if str(new.get("fsdp_state_dict_type")).upper() in ("LOCAL_STATE_DICT", "2"):
        new["fsdp_state_dict_type"] = "SHARDED_STATE_DICT"
        logger.warning("LOCAL_STATE_DICT does not exist in FSDP 2: SHARDED_STATE_DICT cannot read its checkpoints.")
    return {**config, "fsdp_config": new}


def _by_full_name(section: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under today's names: files may leave the prefix out, or be old."""
    from accelerate.launch.config_file import modernise, of_section

    named = {}
    for key, value in modernise({"fsdp_config": dict(section)})["fsdp_config"].items():
        option = of_section("fsdp_config", key)
        if option is None:
            logger.warning("fsdp_config.%s is unknown; it stays as it is.", key)
        named[str(key) if option is None else option.file_key or option.name] = value
    return named


def _reshards(key: str, value: Any) -> bool:
    """Return whether parameters are freed between forward and backward, and what else of a strategy gets lost."""
    name = str(value).strip().upper()
    if name in ("TRUE", "FALSE"):
        return name == "TRUE"
    # FSDP 1 also takes a strategy as the number of torch's enumeration.
    numbered = {str(number): strategy for number, strategy in enumerate(FSDP_SHARDING_STRATEGY, 1)}
    name = numbered.get(name, name)
    if name not in _RESHARDS:
        raise LaunchError(f"fsdp_config.{key} is {value!r}; FSDP 1 knows {', '.join(_RESHARDS)}.")
    if name in _LOST:
        logger.warning("%s: %s does not exist in FSDP 2: all processes share the shards. %s", key, name, _LOST[name])
    return _RESHARDS[name]


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate to-fsdp2`, or add it to what `add_subparsers` returned."""
    description = "Turn a configuration file for FSDP 1 into one for FSDP 2."
    parser = make_parser("to-fsdp2", description, subparsers, to_fsdp2_command)
    parser.add_argument("--config_file", required=True, help="The file to convert.")
    parser.add_argument("--overwrite", action="store_true", help="Replace that file, or --output_file.")
    parser.add_argument("--output_file", help="The file to write instead; without --overwrite it must not exist.")
    return parser


def _validate_to_fsdp2_args(args: argparse.Namespace) -> None:
    """Refuse arguments that name no file to convert, or no place for the result; raises as `to_fsdp2_command`."""
    if not os.path.isfile(args.config_file):
        raise FileNotFoundError(f"There is no configuration file {args.config_file!r}.")
    if not args.overwrite and args.output_file is None:
        raise LaunchError("Say where the result goes: --output_file FILE, or --overwrite.")
    if not args.overwrite and os.path.exists(args.output_file):
        raise FileExistsError(f"{args.output_file} exists already. Name another --output_file, or add --overwrite.")


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Convert a file, for what `to_fsdp2_command_parser` parsed. The result takes its place in one step.

    Raises:
        LaunchError: neither `--overwrite` nor `--output_file` says where the result goes, or the file cannot be converted.
        FileNotFoundError: there is no file to convert.
        FileExistsError: the output file exists.
    """
    _validate_to_fsdp2_args(args)
    target = pathlib.Path(args.config_file if args.output_file is None else args.output_file)
    converted = convert_config_to_fsdp2(public.load_config(args.config_file))
    from accelerate.extensions.configure import config_utils  # not for --help

    config_utils.check_writable(target)
    config_utils.write(target, converted)
    print(f"accelerate configuration saved at {target}")
