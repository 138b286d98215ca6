"""The settings of DeepSpeed: from arguments and environment variables to the dictionary that its engine takes."""

import base64
import binascii
import copy
import json
import logging
import math
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate.base.imports import is_deepspeed_available, is_transformers_available
from accelerate.config import env
from accelerate.config.enums import at_public_path
from accelerate.config.fsdp import classes_named
from accelerate.config.options.schema import one_of, to_names
from accelerate.extensions.deepspeed.options import FIELDS

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

# The plugin that was selected last, weakly.
_REGISTERED: list["weakref.ref[DeepSpeedPlugin]"] = []


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; ValueError for a key that it has twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"The DeepSpeed configuration has the key {twice!r} twice in one section. Remove one of them."
        )
    return content


def read_deepspeed_config(source: Any) -> dict[str, Any]:
    """Return the configuration in a dictionary (a deep copy), a JSON file or base64 of JSON; else a ValueError."""
    if isinstance(source, dict):
        return copy.deepcopy(source)
    if isinstance(source, os.PathLike) or (isinstance(source, str) and os.path.exists(source)):
        with open(source, encoding="utf-8") as file:
            return json.load(file, object_pairs_hook=_without_duplicates)
    if isinstance(source, str):
        try:
            decoded = json.loads(base64.urlsafe_b64decode(source))
            if isinstance(decoded, dict):
                return decoded
        except (binascii.Error, ValueError):  # bad base64, or no text, or no JSON: the error below covers them all
            pass
    raise ValueError(f"hf_ds_config is {source!r}; give a dictionary, an existing JSON file, or JSON in base64.")


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

    __module__ = "accelerate.utils.deepspeed"  # the path in pickles

    config: dict[str, Any]

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config = read_deepspeed_config(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Note the ZeRO stage and whether anything is offloaded, as they are now, for `is_zero2`, `is_zero3`, `is_offload`."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = [self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param")]
        self._offload = self._stage in (2, 3) and ("cpu" in devices or "nvme" in devices)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the dictionary that would hold a key (None where there is none), and the last part of the key."""
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
        """Delete a key and everything below it; with `must_exist`, a missing one is a ValueError."""
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


@at_public_path
@dataclass
class DeepSpeedPlugin:
    """How DeepSpeed runs the training.

    Settings come from `hf_ds_config`, or else from the other arguments. Each of these falls back to the environment variable
    in parentheses and then to its default. In a configuration file, "auto" is filled in from the arguments here, and in
    `prepare` from the objects. DeepSpeed itself is only needed there.

    No method is a collective.

    Args:
        hf_ds_config: a DeepSpeed configuration as a dictionary, a path, a base64 string or an `HfDeepSpeedConfig`, which
            is kept as it is (ACCELERATE_DEEPSPEED_CONFIG_FILE).
        gradient_accumulation_steps: (ACCELERATE_GRADIENT_ACCUMULATION_STEPS), "auto" leaves it to the Accelerator.
        gradient_clipping: the largest gradient norm (ACCELERATE_GRADIENT_CLIPPING), by default "auto", which becomes 1.0;
            0 means no limit.
        zero_stage: 0 to 3 (ACCELERATE_DEEPSPEED_ZERO_STAGE), 2 by default.
        is_train_batch_min: of several data loaders the smallest batch size counts, not the largest.
        offload_optimizer_device: none, cpu or nvme (ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE).
        offload_param_device: the same for parameters, stage 3 (ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE).
        offload_optimizer_nvme_path: a folder (ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH).
        offload_param_nvme_path: a folder (ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH).
        zero3_init_flag: let transformers build models sharded (ACCELERATE_DEEPSPEED_ZERO3_INIT), True by default in
            stage 3.
        zero3_save_16bit_model: gather 16-bit weights to save them in stage 3 (ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL).
        transformer_moe_cls_names: comma-joined classes of mixture-of-experts layers, which stage 3 then gathers at once
            (ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES).
        enable_msamp: 8-bit training with MS-AMP (ACCELERATE_FP8_BACKEND=MSAMP), which `prepare` refuses.
        msamp_opt_level: O1 or O2 (ACCELERATE_FP8_OPT_LEVEL).

    Raises:
        ValueError: a value is malformed, the configuration has no `zero_optimization`, or launcher settings contradict it.
        NotImplementedError: MS-AMP with ZeRO stage 3.

    Example:
        >>> plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=4)
        >>> plugin.deepspeed_config["zero_optimization"]["stage"], plugin.is_auto("train_batch_size")
        (2, True)

    Source: https://www.deepspeed.ai/docs/config-json/, https://arxiv.org/abs/1910.02054
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None

    def __post_init__(self) -> None:
        self._selected = False
        steps_given = self.gradient_accumulation_steps is not None
        for name, (_, default) in FIELDS.items():
            setattr(self, name, env.setting(getattr(self, name), name, default))
        source = env.setting(self.hf_ds_config, "deepspeed_config_file")
        if source is None or (isinstance(source, str) and source == "none"):
            self.hf_ds_config = HfDeepSpeedConfig(self._default_config())
            self.deepspeed_config = self.hf_ds_config.config
        else:
            self._read_config(source, steps_given)
        self.deepspeed_config.setdefault("steps_per_print", math.inf)  # trackers print; DeepSpeed need not
        self.zero3_init_flag = env.setting(self.zero3_init_flag, "zero3_init_flag", self.zero_stage == 3)
        if self.zero3_init_flag and self.zero_stage != 3:
            warnings.warn(f"zero3_init_flag=True is ignored: the ZeRO stage is {self.zero_stage}.", stacklevel=3)
            self.zero3_init_flag = False
        self._resolve_msamp()

    # -- one step of construction each ---------------------------------------------------------------------------

    def _default_config(self) -> dict[str, Any]:
        one_of("zero_stage", self.zero_stage, (0, 1, 2, 3))
        config: dict[str, Any] = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
        # gradient_clipping=0 means no limit, and an unset one is 1.0.
        for name, (place, _) in FIELDS.items():
            *path, key = place.split(".")
            node = config
            for part in path:
                node = node.setdefault(part, {})
            node[key] = getattr(self, name)
        for what in ("offload_optimizer", "offload_param"):
            offload = config["zero_optimization"][what]
            offload["nvme_path"] = offload["nvme_path"] if offload["device"] == "nvme" else None
        return config

    def _read_config(self, source: Any, steps_given: bool) -> None:
        # Settings of the launcher that have no effect next to a configuration file.
        launcher_fields = os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
        if ignored := [name for name in launcher_fields if name in FIELDS or name == "mixed_precision"]:
            raise ValueError(f"The launcher sets {', '.join(ignored)}; set them in the DeepSpeed config file instead.")
        self.hf_ds_config = source if isinstance(source, HfDeepSpeedConfig) else HfDeepSpeedConfig(source)
        self.deepspeed_config = self.hf_ds_config.config
        if "zero_optimization" not in self.deepspeed_config:
            raise ValueError("The DeepSpeed config has no zero_optimization; add it (stage 0 is no ZeRO).")
        if "gradient_accumulation_steps" not in self.deepspeed_config:
            steps = self.gradient_accumulation_steps if steps_given else 1
            self.deepspeed_config["gradient_accumulation_steps"] = 1 if steps == "auto" else steps
        for name, (key, _) in FIELDS.items():
            value = self.get_value(key)
            if value == "auto":
                self.fill_match(key, must_match=False, **{key: getattr(self, name)})
            elif value is not None:
                setattr(self, name, value)
        self.hf_ds_config.set_stage_and_offload()

    def _resolve_msamp(self) -> None:
        env.fill(self, {"msamp_opt_level": ("fp8_opt_level", "O1")})
        if self.enable_msamp is None:
            self.enable_msamp = env.setting(None, "fp8_backend") == "MSAMP"
        if not self.enable_msamp:
            return
        if self.zero_stage == 3:
            raise NotImplementedError("MS-AMP does not work with ZeRO stage 3; set zero_stage to 0, 1 or 2.")
        one_of("msamp_opt_level", self.msamp_opt_level, ("O1", "O2"))
        self.deepspeed_config["msamp"] = {"enabled": True, "opt_level": self.msamp_opt_level}

    # -- the configuration ---------------------------------------------------------------------------------------

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the configuration's value at a dotted path, or `default`."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the value at a dotted path is still "auto"."""
        return self.get_value(ds_key_long) == "auto"

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Fill in one value that says "auto", or compare it.

        Args:
            ds_key_long: the dotted path.
            mismatches: receives a line if the value is set and differs.
            must_match: whether to compare at all.
            kwargs: known values by dotted path.

        Raises:
            ValueError: the value is "auto" and `kwargs` does not have it.
        """
        node, key = self.hf_ds_config.find_config_node(ds_key_long)
        if node is None:
            return
        value = node.get(key)
        if value == "auto":
            if ds_key_long not in kwargs:
                raise ValueError(f"`{ds_key_long}` is 'auto' in the DeepSpeed config, and unknown here; set it.")
            node[key] = kwargs[ds_key_long]
        elif must_match and value is not None and mismatches is not None:
            if ds_key_long in kwargs and value != kwargs[ds_key_long]:
                mismatches.append(f"- ds {ds_key_long}={value} vs arg {ds_key_long}={kwargs[ds_key_long]}")

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill in every "auto" below a part of the configuration, and compare the rest with known values.

        Args:
            prefix: the dotted path of `config`, with a dot at its end; empty for the full configuration.
            mismatches: collects differences; with an empty `prefix` they are raised at the end.
            config: the part to walk; the full configuration by default.
            must_match: whether values that are set must equal those in `kwargs`.
            kwargs: known values by dotted path.

        Raises:
            ValueError: a value is "auto" and unknown, or values differ; the message lists them all.
        """
        mismatches = [] if mismatches is None else mismatches
        for key, value in (self.deepspeed_config if config is None else config).items():
            if isinstance(value, dict):
                self.deepspeed_config_process(f"{prefix}{key}.", mismatches, value, must_match, **kwargs)
            else:
                self.fill_match(prefix + key, mismatches, must_match=must_match, **kwargs)
        if mismatches and not prefix:
            report = "\n".join(mismatches)
            raise ValueError(f"The DeepSpeed config disagrees with this run; 'auto' takes the run's values:\n{report}")

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Write the Accelerator's precision into the configuration, where that leaves it open.

        Args:
            mixed_precision: no, fp16, bf16 or fp8 (which DeepSpeed runs on top of bf16).

        Raises:
            ValueError: the configuration enables the other half precision.
        """
        config = self.deepspeed_config
        half_of_run = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}.get(mixed_precision)
        for half in ("fp16", "bf16"):
            if config.get(half) is None:
                config[half] = {"enabled": "auto", **({"auto_cast": True} if half == half_of_run == "fp16" else {})}
            section = config[half]
            if section.get("enabled", "auto") == "auto":
                section["enabled"] = half == half_of_run
            if section["enabled"] and half_of_run not in (None, half):
                wrong = f"mixed_precision is {mixed_precision!r}, but the DeepSpeed config enables {half}"
                raise ValueError(f"{wrong}. Set {half}.enabled to 'auto' or false there, or change mixed_precision.")
            if half == half_of_run and not section["enabled"]:
                logger.warning("mixed_precision=%s is ignored: the config disables %s.", mixed_precision, half)

    # -- transformers' view of the configuration -----------------------------------------------------------------

    def is_zero3_init_enabled(self) -> bool:
        """Whether transformers builds models sharded at the moment."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Switch the sharded construction of models on or off for a while.

        Args:
            enable: whether transformers builds models sharded inside the context.

        Example:
            >>> with DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True).zero3_init_context_manager(enable=False):
            ...     pass  # models built in here are complete
        """
        flag, is_registered = self.zero3_init_flag, "dschf" in vars(self)
        changes = self.zero_stage == 3 and (not flag if enable else is_registered)
        self.zero3_init_flag = enable
        if changes:
            self._tell_transformers(enable)
        try:
            yield
        finally:
            self.zero3_init_flag = flag
            if changes:
                self._tell_transformers(is_registered)

    def set_deepspeed_weakref(self) -> None:
        """Register the configuration with transformers: `generate` and PEFT look at it, and at stage 3 `from_pretrained` builds sharded models.

        transformers remembers it weakly: it forgets it with `dschf`, at the latest when this plugin goes.

        Raises:
            ImportError: `zero3_init_flag` is set, and transformers is not installed.
        """
        if not is_transformers_available():
            if self.zero3_init_flag:
                raise ImportError("zero3_init_flag=True needs transformers, which builds the models; install it.")
            return
        from transformers.integrations import HfDeepSpeedConfig as Registered

        config = copy.deepcopy(self.deepspeed_config)
        # zero.Init insists on numbers, which are not known before `prepare`; it does not use them.
        for key in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
            if config.get(key, "auto") == "auto":
                config[key] = 1
        if config.get("train_batch_size") == "auto":
            del config["train_batch_size"]
        self.dschf = Registered(config)

    def _tell_transformers(self, register: bool | None) -> None:
        """Let transformers forget what plugins have registered, which a user's own configuration outlives, and register this one."""
        for plugin in filter(None, (reference() for reference in _REGISTERED)):
            vars(plugin).pop("dschf", None)
        _REGISTERED[:] = [weakref.ref(self)]
        if register and is_transformers_available() and is_deepspeed_available():
            self.set_deepspeed_weakref()

    def contradictions(self, live: "DeepSpeedPlugin") -> list[str]:
        """Return the settings, as "zero_optimization.stage=3", that this plugin asks for and a live one has otherwise."""

        def leaves(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
            for key, value in config.items():
                yield from leaves(value, f"{path}{key}.") if isinstance(value, Mapping) else [(path + key, value)]

        live_settings = dict(leaves(live.deepspeed_config))
        asked = [(key, value) for key, value in leaves(self.deepspeed_config) if value != "auto"]
        return [f"{key}={value!r}" for key, value in asked if live_settings.get(key) != value]

    # -- several plugins -----------------------------------------------------------------------------------------

    @property
    def selected(self) -> bool:
        """Whether this plugin is the active one of several."""
        return self._selected

    @selected.setter
    def selected(self, value: Any) -> None:
        raise NotImplementedError("`selected` is read-only; call `AcceleratorState().select_deepspeed_plugin(name)`.")

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Make this plugin the active one; for `AcceleratorState` only, which unselects the others.

        Raises:
            ValueError: called by anyone else.
        """
        if not _from_accelerator_state:
            raise ValueError("Select a plugin with `AcceleratorState().select_deepspeed_plugin(name)`.")
        self._selected = True
        # At stage 3, `from_pretrained` would shard models: without the flag they are unsharded, and `prepare` registers.
        self._tell_transformers(self.zero_stage != 3 or self.zero3_init_flag)

    def _unselect(self) -> None:
        self._selected = False

    def set_moe_leaf_modules(self, model: "nn.Module") -> None:
        """Tell ZeRO stage 3 to gather mixture-of-experts layers at once, because not every rank runs the same experts.

        Nothing happens without `transformer_moe_cls_names`.

        Args:
            model: the model about to be prepared.

        Raises:
            ImportError: DeepSpeed is not installed.
            ValueError: a class does not occur in the model.
        """
        names = env.setting(self.transformer_moe_cls_names, "deepspeed_moe_layer_cls_names")
        if names is None:
            return
        self.transformer_moe_cls_names = names
        if not is_deepspeed_available():
            raise ImportError("transformer_moe_cls_names needs DeepSpeed 0.14.0 or newer; install `deepspeed`.")
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, classes_named(model, to_names(names), "transformer_moe_cls_names"))
