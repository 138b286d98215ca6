"""`accelerate to-fsdp2`: a configuration file for FSDP 1 turned into one for FSDP 2."""

import argparse
import enum
import logging
import pathlib
from typing import Any

from accelerate.commands.utils import make_parser, or_exit
from accelerate.launch.errors import LaunchError

logger = logging.getLogger(__name__)


class ConversionStatus(enum.Enum):
    """Why a setting of FSDP 1 has no successor."""

    NOT_YET_IMPLEMENTED = 0
    REMOVED = -1


_RESHARDS = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": False,
}
_KEPT = (
    "fsdp_version",
    "fsdp_reshard_after_forward",
    "fsdp_auto_wrap_policy",
    "fsdp_cpu_ram_efficient_loading",
    "fsdp_offload_params",
    "fsdp_state_dict_type",
    "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_min_num_params",
    "fsdp_activation_checkpointing",
)

# A key of FSDP 1 to the key of FSDP 2, or to why there is none.
ARGUMENT_KEY_MAPPING: dict[str, str | ConversionStatus] = {
    **{key: key for key in _KEPT},
    "fsdp_sharding_strategy": "fsdp_reshard_after_forward",
    "fsdp_backward_prefetch": ConversionStatus.REMOVED,
    "fsdp_forward_prefetch": ConversionStatus.NOT_YET_IMPLEMENTED,
    "fsdp_sync_module_states": ConversionStatus.REMOVED,
    "fsdp_use_orig_params": ConversionStatus.REMOVED,
}
# The values of a key of FSDP 1 that read differently in FSDP 2.
ARGUMENT_VALUE_MAPPING: dict[str, dict[str, bool]] = {
    "fsdp_sharding_strategy": dict(_RESHARDS),
    "fsdp_reshard_after_forward": dict(_RESHARDS),
}
# FSDP 1 also takes a strategy as the number of torch's enumeration.
_STRATEGY_NUMBERS = {1: "FULL_SHARD", 2: "SHARD_GRAD_OP", 3: "NO_SHARD", 4: "HYBRID_SHARD", 5: "HYBRID_SHARD_ZERO2"}


def load_config(config_file: str) -> dict[str, Any]:
    """Read a configuration file as it stands.

    Args:
        config_file: the file.

    Raises:
        FileNotFoundError: there is no such file.
    """
    from accelerate.launch.config_file import load_mapping

    if not pathlib.Path(config_file).is_file():
        raise FileNotFoundError(f"There is no configuration file {config_file!r}.")
    return load_mapping(config_file)


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Turn the content of a configuration file for FSDP 1 into one for FSDP 2.

    Settings without a successor are dropped, with a warning. Files without an `fsdp_config`, or for FSDP 2 already, stay
    as they are.

    Args:
        config: the content; it is not changed.

    Returns:
        The new content.

    Example:
        >>> convert_config_to_fsdp2({"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}})
        {'fsdp_config': {'fsdp_version': 2, 'fsdp_reshard_after_forward': True}}
    """
    old = config.get("fsdp_config") or {}
    if not old:
        logger.info("There is no fsdp_config, so nothing is converted.")
        return config
    if str(old.get("fsdp_version", 1)) == "2":
        logger.warning("The file says fsdp_version: 2 already and stays as it is. Write 1 there to convert its keys.")
        return config
    new: dict[str, Any] = {"fsdp_version": 2}
    for key, value in old.items():
        if key == "fsdp_version":
            continue
        target = ARGUMENT_KEY_MAPPING.get(key, key)
        if isinstance(target, ConversionStatus):
            gone = target is ConversionStatus.REMOVED
            logger.warning(
                "%s %s FSDP 2; it is dropped.", key, "does not exist in" if gone else "is not possible yet with"
            )
            continue
        if key in ARGUMENT_VALUE_MAPPING:
            value = ARGUMENT_VALUE_MAPPING[key].get(_strategy(value), value)
        new[target] = value
    return {**config, "fsdp_config": new}


def _strategy(value: Any) -> str:
    if isinstance(value, bool):
        return str(value)
    text = str(value)
    return _STRATEGY_NUMBERS.get(int(text), text) if text.isdigit() else text.upper()


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate to-fsdp2`.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` returned, or None for a parser of its own.
    """
    parser = make_parser(
        "to-fsdp2", "Turn a configuration file for FSDP 1 into one for FSDP 2.", subparsers, to_fsdp2_command
    )
    parser.add_argument("--config_file", required=True, help="The file to convert.")
    parser.add_argument("--overwrite", action="store_true", help="Replace that file.")
    parser.add_argument("--output_file", help="The file to write instead; it must not exist.")
    return parser


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Convert a file.

    Args:
        args: what `to_fsdp2_command_parser` parsed.

    Raises:
        LaunchError: neither `--overwrite` nor `--output_file` says where the result goes, or the output file exists.
        FileNotFoundError: there is no file to convert.
    """
    import yaml

    if not args.overwrite and args.output_file is None:
        raise LaunchError("Say where the result goes: --output_file FILE, or --overwrite.")
    config = load_config(args.config_file)
    target = pathlib.Path(args.config_file if args.output_file is None else args.output_file)
    if target.exists() and not args.overwrite:
        raise LaunchError(f"{target} exists already. Name another --output_file, or add --overwrite.")
    with open(target, "w", encoding="utf-8") as stream:
        yaml.safe_dump(convert_config_to_fsdp2(config), stream)
    print(f"accelerate configuration saved at {target}")


def main() -> None:
    """Run `accelerate to-fsdp2` as a program of its own.

    Raises:
        SystemExit: with status 2 for a request that cannot be run.
    """
    or_exit("accelerate to-fsdp2", to_fsdp2_command, to_fsdp2_command_parser().parse_args())


if __name__ == "__main__":
    main()
