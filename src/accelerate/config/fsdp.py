"""The settings of Fully Sharded Data Parallel, for torch's wrapper class (version 1) and `fully_shard` (version 2)."""

import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from accelerate.base.constants import FSDP_AUTO_WRAP_POLICY
from accelerate.config import env
from accelerate.config.enums import at_public_path
from accelerate.config.options import BY_NAME
from accelerate.config.options.schema import one_of, to_bool, to_enum, to_int, to_mapping, to_names
from accelerate.runtime import torch_private

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger(__name__)

_PRECISIONS = {"fp8": "bfloat16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def get_module_class_from_name(module: "nn.Module", name: str) -> "type[nn.Module] | None":
    """Return the class of that name among a module and all its submodules.

    Args:
        module: the module to search.
        name: the bare class name, such as `"GPT2Block"`.

    Returns:
        The class, or None when no submodule is of a class of that name.

    Example:
        >>> import torch
        >>> get_module_class_from_name(torch.nn.Sequential(torch.nn.ReLU()), "ReLU")
        <class 'torch.nn.modules.activation.ReLU'>
    """
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


def layer_classes(plugin: "FullyShardedDataParallelPlugin", model: "nn.Module") -> "set[type[nn.Module]]":
    """Return the classes that the plugin names, or those of the model's `_no_split_modules` that it contains.

    A named class that does not occur in the model is a ValueError.
    """
    if (names := plugin.transformer_cls_names_to_wrap) is not None:
        classes = set(classes_named(model, names, "transformer_cls_names_to_wrap"))
    else:
        declared = getattr(model, "_no_split_modules", None) or ()
        classes = {get_module_class_from_name(model, name) for name in declared} - {None}
    if not classes:
        logger.warning("The model has no _no_split_modules: name transformer_cls_names_to_wrap, or it is one shard.")
    return classes


def classes_named(model: "nn.Module", names: Iterable[str], field: str) -> "list[type[nn.Module]]":
    """Return the classes of these names in a model; a ValueError lists the missing names and the model's classes."""
    classes = {name: get_module_class_from_name(model, name) for name in names}
    if missing := [name for name, cls in classes.items() if cls is None]:
        present = sorted({type(part).__name__ for part in model.modules()})
        raise ValueError(f"{field} holds {', '.join(missing)}; the model has {', '.join(present)}.")
    return list(classes.values())


def _materialize(module: "nn.Module") -> None:
    """Give a module on the meta device uninitialised storage where this process trains; rank 0 broadcasts into it."""
    import torch

    device = None
    if not env.setting(None, "cpu", False) and torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    if device is None or device.type == "mps":
        device = torch.device("cpu")
    module.to_empty(device=device, recurse=False)


def _to_dtype(value: Any, name: str) -> "torch.dtype | None":
    import torch

    if value is None or isinstance(value, torch.dtype):
        return value
    word = str(value).removeprefix("torch.").lower()
    dtype = getattr(torch, _PRECISIONS.get(word, word), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is {value!r}; choose one of {sorted(_PRECISIONS)} or a torch.dtype.")
    return dtype


@at_public_path
@dataclass
class FullyShardedDataParallelPlugin:
    """How models are sharded across data-parallel ranks.

    An argument that is None falls back to the environment variable in parentheses, which `accelerate launch` sets, and
    then to its default. Words are accepted wherever torch has an enumeration or a class. After construction each field
    holds torch's own object.

    No method is a collective.

    Args:
        fsdp_version: 1 for the `FullyShardedDataParallel` wrapper, 2 for `fully_shard` (FSDP_VERSION).
        sharding_strategy: version 1, the sharded tensors: FULL_SHARD (default), SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or
            HYBRID_SHARD_ZERO2 (FSDP_SHARDING_STRATEGY).
        reshard_after_forward: version 2, whether parameters are sharded again between forward and backward, True by
            default (FSDP_RESHARD_AFTER_FORWARD); or over how many ranks, such as those of a machine, so that backward gathers
            within it. In version 1 another name of `sharding_strategy`.
        backward_prefetch: version 1: BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH; version 2: how many units backward gathers
            ahead, by default torch's one (FSDP_BACKWARD_PREFETCH).
        mixed_precision_policy: a precision (fp16, bf16, fp8, fp32), a dictionary of dtypes, or torch's policy object.
        auto_wrap_policy: transformer_based_wrap, size_based_wrap, no_wrap, a callable, or one of torch's policy objects
            (FSDP_AUTO_WRAP_POLICY).
        cpu_offload: keep parameters in host memory (FSDP_OFFLOAD_PARAMS).
        ignored_modules: modules left unsharded, or a regular expression for their names (FSDP_IGNORED_MODULES).
        state_dict_type: FULL_STATE_DICT, SHARDED_STATE_DICT or (version 1) LOCAL_STATE_DICT (FSDP_STATE_DICT_TYPE).
        state_dict_config: version 1, torch's configuration object for that type.
        optim_state_dict_config: version 1, the same for the optimizer.
        limit_all_gathers: version 1, bound the memory of parameters in flight.
        use_orig_params: version 1, expose the original parameters (FSDP_USE_ORIG_PARAMS).
        param_init_fn: moves a module off the meta device.
        sync_module_states: version 1, broadcast the weights of rank 0 while wrapping (FSDP_SYNC_MODULE_STATES).
        forward_prefetch: version 1, gather the next parameters during forward; version 2: how many units forward gathers ahead,
            by default none before it comes to them (FSDP_FORWARD_PREFETCH).
        activation_checkpointing: recompute activations in backward (FSDP_ACTIVATION_CHECKPOINTING). "selective" keeps the
            results of matrix products and attention.
        activation_checkpointing_offload: keep checkpointed activations on the host
            (FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD).
        cpu_ram_efficient_loading: only rank 0 reads the weights of a transformers model, the others receive them
            (FSDP_CPU_RAM_EFFICIENT_LOADING, which is also set from the argument).
        transformer_cls_names_to_wrap: class names for transformer_based_wrap, a list or comma-joined
            (FSDP_TRANSFORMER_CLS_TO_WRAP); by default the model's `_no_split_modules`.
        min_num_params: smallest number of parameters that size_based_wrap makes a shard of (FSDP_MIN_NUM_PARAMS).
        module_precision: version 2, the precision of modules, by patterns of their names (those of `fnmatch`, where `*` also
            matches dots): a mapping, or its JSON text (FSDP_MODULE_PRECISION). The first matching pattern applies to a module
            and its submodules. A value is a precision or a dtype, a dictionary, or torch's policy object, used as it is. A
            dtype is that of parameters in computation and of reduced gradients; outputs get the dtype of the modules around.

    Raises:
        ValueError: a value is unknown, or does not exist in this version of FSDP.

    Example:
        >>> plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True, mixed_precision_policy="bf16")
        >>> plugin.reshard_after_forward, plugin.mixed_precision_policy.param_dtype
        (True, torch.bfloat16)

    Source: https://pytorch.org/docs/stable/distributed.fsdp.fully_shard.html, https://arxiv.org/abs/2304.11277
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: str | Callable | None = None
    cpu_offload: Any = None
    ignored_modules: Iterable[Any] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[Any], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | int | None = None
    activation_checkpointing: bool | Literal["selective"] | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | str | None = None
    min_num_params: int | None = None
    module_precision: Any = None

    def __post_init__(self) -> None:
        version = to_int(env.setting(self.fsdp_version, "fsdp_version", 1), "fsdp_version")
        self.fsdp_version = one_of("fsdp_version", version, (1, 2))
        if self.fsdp_version == 1:
            self._resolve_sharding()
        else:
            self._resolve_resharding()
        self._resolve_prefetch()
        self.set_cpu_offload()
        self.validate_cpu_offload()
        self.set_state_dict_type()
        self._resolve_wrapping()
        self._resolve_flags()
        if isinstance(self.mixed_precision_policy, (str, dict)):
            self.set_mixed_precision(self.mixed_precision_policy, override=True)
        if self.mixed_precision_policy is not None:
            self.validate_mixed_precision_policy()
        rules = to_mapping(self._read_setting("module_precision", {}), "module_precision")
        if rules and self.fsdp_version == 1:
            raise ValueError(f"module_precision is {rules}; fsdp_version=1 has one policy for a model.")
        self.module_precision = {key: self._rule(f"module_precision[{key!r}]", value) for key, value in rules.items()}
        if self.ignored_modules is None:  # no option of the launcher
            self.ignored_modules = os.environ.get("FSDP_IGNORED_MODULES", "").strip() or None

    # -- one step of construction each ---------------------------------------------------------------------------

    def _read_setting(self, field: str, default: Any = None) -> Any:
        """Return a field's argument, else the environment's value of its option."""
        return env.setting(getattr(self, field), f"fsdp_{field}", default, field)

    def _resolve_sharding(self) -> None:
        from torch.distributed.fsdp import ShardingStrategy

        aliases = {"HYBRID_SHARD_ZERO2": ShardingStrategy._HYBRID_SHARD_ZERO2}
        same = self.reshard_after_forward
        if isinstance(same, bool):
            raise ValueError(f"reshard_after_forward is {same}; with fsdp_version=1 set sharding_strategy instead.")
        if same is not None:
            same = self.reshard_after_forward = to_enum(ShardingStrategy, same, "reshard_after_forward", aliases)
            self.sharding_strategy = same if self.sharding_strategy is None else self.sharding_strategy
        chosen = self._read_setting("sharding_strategy", "FULL_SHARD")
        self.sharding_strategy = to_enum(ShardingStrategy, chosen, "sharding_strategy", aliases)
        if same not in (None, self.sharding_strategy):
            used = f"sharding_strategy={self.sharding_strategy.name} is used"
            warnings.warn(f"{used}; reshard_after_forward={same.name} disagrees and is ignored.", stacklevel=4)

    def _resolve_resharding(self) -> None:
        if self.sharding_strategy is not None and self.reshard_after_forward is None:
            name = str(getattr(self.sharding_strategy, "name", self.sharding_strategy)).upper()
            means = {"FULL_SHARD": True, "1": True, "SHARD_GRAD_OP": False, "2": False}
            if name not in means:
                instead = (
                    "Set reshard_after_forward; replicas of shards come from "
                    "ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)"
                )
                raise ValueError(f"sharding_strategy={name} does not exist with fsdp_version=2. {instead}.")
            self.reshard_after_forward = means[name]
            logger.warning("sharding_strategy is now reshard_after_forward=%s (FSDP version 2).", means[name])
        setting = self.reshard_after_forward
        ranks = type(setting) is int and setting > 1
        if setting is not None and not ranks and not isinstance(setting, (bool, str)):
            true = "true, false, or over how many ranks, two at least"
            raise ValueError(f"reshard_after_forward is {setting!r}; with fsdp_version=2 it must be {true}.")
        self.sharding_strategy = None
        self.reshard_after_forward = setting if ranks else self._read_setting("reshard_after_forward", True)

    def _depth(self, field: str) -> int | None:
        """Return how many units version 2 gathers ahead, None if that is not said as a number."""
        setting = getattr(self, field)
        text = str(env.environment().get(BY_NAME[f"fsdp_{field}"].env or "") if setting is None else setting).strip()
        if setting is not None and (text == "0" or text.startswith("-")):
            raise ValueError(f"{field} is {text}; with fsdp_version=2 at least one unit is gathered ahead.")
        return int(text) or None if text.isdigit() else None

    def _resolve_prefetch(self) -> None:
        from torch.distributed.fsdp import BackwardPrefetch

        if self.fsdp_version == 2 and (depth := self._depth("backward_prefetch")) is not None:
            self.backward_prefetch = depth
            if str(self.reshard_after_forward).lower() == "false":
                logger.warning("backward_prefetch=%s has no effect with reshard_after_forward=False.", depth)
            return
        chosen = self._read_setting("backward_prefetch", "NO_PREFETCH")
        prefetch = to_enum(BackwardPrefetch, chosen, "backward_prefetch", {"NO_PREFETCH": None})
        self.backward_prefetch = prefetch if self.fsdp_version == 1 else None
        if prefetch is not self.backward_prefetch:
            logger.warning("backward_prefetch=%s is ignored: FSDP version 2 always prefetches in backward.", chosen)

    def _resolve_wrapping(self) -> None:
        from torch.distributed.fsdp import wrap

        named = (wrap.transformer_auto_wrap_policy, wrap.size_based_auto_wrap_policy, None)
        policies = dict(zip(FSDP_AUTO_WRAP_POLICY, named, strict=True))
        policy = self._read_setting("auto_wrap_policy", "NO_WRAP")
        is_policy_name = isinstance(policy, str) and policy.upper() in policies
        if not is_policy_name and not callable(policy) and not torch_private.is_wrap_policy(policy):
            others = "a callable or one of torch's policies"
            raise ValueError(f"auto_wrap_policy is {policy!r}; choose one of {FSDP_AUTO_WRAP_POLICY}, {others}.")
        self.auto_wrap_policy = policy = policies[policy.upper()] if is_policy_name else policy

        if policy is wrap.transformer_auto_wrap_policy:
            named = env.setting(self.transformer_cls_names_to_wrap, "fsdp_transformer_layer_cls_to_wrap")
            self.transformer_cls_names_to_wrap = named
        elif policy is wrap.size_based_auto_wrap_policy:
            self.min_num_params = self._read_setting("min_num_params", 0)
        if self.transformer_cls_names_to_wrap is not None:
            self.transformer_cls_names_to_wrap = to_names(self.transformer_cls_names_to_wrap)
        if self.min_num_params is not None:
            self.min_num_params = to_int(self.min_num_params, "min_num_params")
        if policy is None and (self.transformer_cls_names_to_wrap or self.min_num_params):
            settings = (self.transformer_cls_names_to_wrap, self.min_num_params)
            logger.warning("transformer_cls_names_to_wrap=%s, min_num_params=%s need an auto_wrap_policy.", *settings)

    def _resolve_flags(self) -> None:
        if self.cpu_ram_efficient_loading is not None:
            # transformers reads this variable while it loads weights, which may be before or after this plugin exists.
            loads_on_one = to_bool(self.cpu_ram_efficient_loading, "cpu_ram_efficient_loading")
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(loads_on_one)
        switches = ["activation_checkpointing_offload", "cpu_ram_efficient_loading"]
        switches += ["activation_checkpointing"] if self.activation_checkpointing != "selective" else []
        switches += ["use_orig_params", "sync_module_states", "forward_prefetch"] if self.fsdp_version == 1 else []
        for name in switches:
            setattr(self, name, self._read_setting(name, False))
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ValueError("activation_checkpointing_offload=True needs activation_checkpointing=True as well.")
        self.limit_all_gathers = to_bool(self.limit_all_gathers, "limit_all_gathers")
        if self.fsdp_version == 1:
            if self.cpu_ram_efficient_loading and not self.sync_module_states:
                why = "cpu_ram_efficient_loading leaves the weights on rank 0 only"
                warnings.warn(f"{why}, so sync_module_states is set to True.", stacklevel=4)
                self.sync_module_states = True
            if self.sync_module_states and self.param_init_fn is None:
                self.param_init_fn = _materialize
            return
        depth = self._depth("forward_prefetch")
        if depth is None and self.forward_prefetch is not None:
            how = "with fsdp_version=2 it is how many units are gathered ahead"
            raise ValueError(f"forward_prefetch is {self.forward_prefetch}; {how}.")
        self.forward_prefetch = depth
        for name in ("use_orig_params", "sync_module_states"):
            if getattr(self, name) is not None:
                logger.warning("%s=%s is ignored: FSDP version 2 needs none.", name, getattr(self, name))
                setattr(self, name, None)

    # -- public --------------------------------------------------------------------------------------------------

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Choose the form of checkpoints, and the configuration objects that belong to it.

        Args:
            state_dict_type: FULL_STATE_DICT, SHARDED_STATE_DICT or LOCAL_STATE_DICT, as a name or torch's enumeration;
                None keeps the present choice.

        Raises:
            ValueError: the type is unknown, or LOCAL_STATE_DICT with version 2.
        """
        from torch.distributed import fsdp

        kind = fsdp.StateDictType
        chosen = state_dict_type if state_dict_type is not None else self.state_dict_type
        usual = kind.FULL_STATE_DICT if self.fsdp_version == 1 else kind.SHARDED_STATE_DICT
        chosen = to_enum(kind, env.setting(chosen, "fsdp_state_dict_type", usual), "state_dict_type")
        if self.fsdp_version == 2 and chosen is kind.LOCAL_STATE_DICT:
            raise ValueError("fsdp_version=2 has no state_dict_type=LOCAL_STATE_DICT; use SHARDED_STATE_DICT.")
        self.state_dict_type = chosen
        options = {"offload_to_cpu": True}
        if chosen is kind.FULL_STATE_DICT:
            options["rank0_only"] = True
        word = chosen.name.partition("_")[0].capitalize()
        for name, part in (("state_dict_config", ""), ("optim_state_dict_config", "Optim")):
            present, config = getattr(self, name), getattr(fsdp, f"{word}{part}StateDictConfig")
            if isinstance(present, config):
                continue
            if present is not None and state_dict_type is None:  # given next to a type that it does not fit
                logger.warning("%s=%s is ignored: state_dict_type is %s.", name, present, chosen.name)
            setattr(self, name, None if chosen is kind.LOCAL_STATE_DICT else config(**options))

    def set_auto_wrap_policy(self, model: "nn.Module") -> None:
        """Bind the named wrapping policy to the layer classes or the size that a model's shards have.

        A callable that the user gave stays as it is.

        Args:
            model: the model about to be sharded.

        Raises:
            ValueError: a class in `transformer_cls_names_to_wrap` does not occur in the model.
        """
        from torch.distributed.fsdp import wrap

        if self.auto_wrap_policy is wrap.transformer_auto_wrap_policy:
            classes = layer_classes(self, model)
            self.auto_wrap_policy = functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls=classes)
        elif self.auto_wrap_policy is wrap.size_based_auto_wrap_policy:
            size, policy = self.min_num_params, self.auto_wrap_policy
            if not size:
                logger.warning("min_num_params is not set, so size_based_wrap makes the full model one shard.")
            self.auto_wrap_policy = functools.partial(policy, min_num_params=size) if size else None

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Set the precision of shards, gradients' reduction and buffers (version 1) or outputs (version 2).

        Args:
            mixed_precision: fp16, bf16, fp8 or fp32, a torch.dtype for everything, or a dictionary with any of
                `param_dtype`, `reduce_dtype` and `buffer_dtype` (version 1) or `output_dtype` (version 2).
            buffer_autocast: version 1, keep buffers in float32.
            override: replace a policy that is already set.

        Raises:
            ValueError: an unknown precision or dictionary key.
        """
        if self.mixed_precision_policy is None or override:
            self.mixed_precision_policy = self._policy(mixed_precision, "mixed_precision", buffer_autocast)

    def _rule(self, source: str, value: Any) -> Any:
        """Return the dtype or the policy of a pattern of `module_precision`."""
        if isinstance(value, dict):
            return self._policy(value, source)
        return value if hasattr(value, "cast_forward_inputs") else _to_dtype(value or "None", source)

    def _policy(self, mixed_precision: Any, source: str, buffer_autocast: bool = False) -> Any:
        import torch
        from torch.distributed import fsdp

        first = self.fsdp_version == 1
        keys = ["param_dtype", "reduce_dtype", "buffer_dtype" if first else "output_dtype"]
        if isinstance(mixed_precision, dict):
            others = () if first else ("cast_forward_inputs",)
            unknown = sorted(set(mixed_precision) - {*keys, *others})
            if unknown:
                expected = f"with fsdp_version={self.fsdp_version} its keys are {', '.join(keys)}"
                raise ValueError(f"{source} has {', '.join(map(repr, unknown))}; {expected}.")
            dtypes = {key: _to_dtype(value, key) if key in keys else value for key, value in mixed_precision.items()}
        elif isinstance(mixed_precision, str) and mixed_precision not in _PRECISIONS:
            raise ValueError(f"mixed_precision is {mixed_precision!r}; choose one of {sorted(_PRECISIONS)}.")
        else:
            dtypes = dict.fromkeys(keys, _to_dtype(mixed_precision, source))
            if buffer_autocast and first:
                dtypes["buffer_dtype"] = torch.float32
        return (fsdp.MixedPrecision if first else fsdp.MixedPrecisionPolicy)(**dtypes)

    def validate_mixed_precision_policy(self) -> None:
        """Raise a ValueError unless the policy is of the class that this version of FSDP takes."""
        self._expect("mixed_precision_policy", "MixedPrecision", "MixedPrecisionPolicy")

    def set_cpu_offload(self) -> None:
        """Replace a truth value in `cpu_offload` by torch's object for this version of FSDP."""
        from torch.distributed import fsdp

        if not isinstance(self.cpu_offload, (bool, int, str, type(None))):
            return
        offloads = env.setting(self.cpu_offload, "fsdp_offload_params", False, "cpu_offload")
        if self.fsdp_version == 1:
            self.cpu_offload = fsdp.CPUOffload(offload_params=offloads)
        else:
            self.cpu_offload = fsdp.CPUOffloadPolicy() if offloads else fsdp.OffloadPolicy()

    def validate_cpu_offload(self) -> None:
        """Raise a ValueError unless `cpu_offload` is of the class that this version of FSDP takes."""
        self._expect("cpu_offload", "CPUOffload", "OffloadPolicy")

    def _expect(self, name: str, first: str, second: str) -> None:
        from torch.distributed import fsdp

        value, expected = getattr(self, name), first if self.fsdp_version == 1 else second
        if not isinstance(value, getattr(fsdp, expected)):
            class_name = f"torch.distributed.fsdp.{expected}"
            raise ValueError(f"{name} is {value!r}; with fsdp_version={self.fsdp_version} it must be a {class_name}.")
