"""A DeepSpeed configuration as nested dictionaries, with access by dotted path."""

import base64
import binascii
import copy
import json
import os
from typing import Any

OFFLOAD_DEVICES = ("cpu", "nvme")


def read_deepspeed_config(source: Any) -> dict[str, Any]:
    """Return the configuration in a dictionary (as a deep copy), a JSON file, or a base64 string of JSON.

    Raises:
        ValueError: `source` is none of these.
    """
    if isinstance(source, dict):
        return copy.deepcopy(source)
    if isinstance(source, os.PathLike) or (isinstance(source, str) and os.path.exists(source)):
        with open(source, encoding="utf-8") as file:
            return json.load(file)
    if isinstance(source, str):
        try:
            decoded = json.loads(base64.urlsafe_b64decode(source))
            if isinstance(decoded, dict):
                return decoded
        except (binascii.Error, ValueError):  # bad base64, or no text, or no JSON: the error below covers them all
            pass
    raise ValueError(
        f"hf_ds_config is {source!r}; it must be a dictionary, the path of an existing JSON file, or a base64 string of JSON."
    )


class HfDeepSpeedConfig:
    """A DeepSpeed configuration that answers questions about itself.

    Keys are written as dotted paths: `"zero_optimization.offload_param.device"`. Subclasses and callers may change
    `config` at will.

    Args:
        config_file_or_dict: a dictionary (it is copied), the path of a JSON file, or a base64 string of JSON.

    Raises:
        ValueError: it is none of these.

    Example:
        >>> config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
        >>> config.is_zero3(), config.is_offload(), config.get_value("zero_optimization.stage")
        (True, True, 3)

    Source: https://www.deepspeed.ai/docs/config-json/
    """

    config: dict[str, Any]

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config = read_deepspeed_config(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Note the ZeRO stage and whether anything is offloaded, as they are now, for `is_zero2`, `is_zero3`, `is_offload`."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = [self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param")]
        self._offload = self._stage in (2, 3) and any(device in OFFLOAD_DEVICES for device in devices)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the dictionary that would hold a key, and the last part of the key.

        Returns:
            The dictionary (None when the path to it does not exist) and the last part of the path.
        """
        *path, key = ds_key_long.split(".")
        node: Any = self.config
        for part in path:
            node = node.get(part) if isinstance(node, dict) else None
        return (node if isinstance(node, dict) else None), key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value at a path, or `default` where there is none."""
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete a key and everything below it.

        Raises:
            ValueError: there is no such key, and `must_exist` is set.
        """
        node, key = self.find_config_node(ds_key_long)
        if node is not None and key in node:
            del node[key]
        elif must_exist:
            raise ValueError(f"{ds_key_long} is not in the DeepSpeed config, whose keys are {sorted(self.config)}.")

    def is_true(self, ds_key_long: str) -> bool:
        """Whether the value at a path is set and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether the value at a path is set and false; a missing value is neither true nor false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Whether ZeRO stage 2 was set when the configuration was read."""
        return self._stage == 2

    def is_zero3(self) -> bool:
        """Whether ZeRO stage 3 was set when the configuration was read."""
        return self._stage == 3

    def is_offload(self) -> bool:
        """Whether ZeRO stage 2 or 3 offloaded parameters or optimizer states when the configuration was read."""
        return self._offload


HfDeepSpeedConfig.__module__ = "accelerate.utils.deepspeed"  # where pickles and users look for it
