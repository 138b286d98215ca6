"""The configuration of an engine: "auto" filled in from the objects of `prepare`, and contradictions refused."""

import copy
import logging
import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from accelerate.config.deepspeed import DeepSpeedPlugin
from accelerate.runtime.run import Run
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler

logger = logging.getLogger(__name__)

_MICRO, _TRAIN, _STEPS = "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"
# The width of the model decides these: where they are in the configuration, and the value for a width.
_BY_WIDTH = {
    "zero_optimization.reduce_bucket_size": lambda width: width * width,
    "zero_optimization.stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
    "zero_optimization.stage3_param_persistence_threshold": lambda width: 10 * width,
}


def check(plugin: DeepSpeedPlugin, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Refuse what the engine cannot do or would do otherwise: two optimizers, one of another model, a disk that is not there.

    Raises:
        ValueError: they contradict the configuration; the message names the key.
    """
    import deepspeed

    config, stage = plugin.deepspeed_config, plugin.zero_stage
    if plugin.enable_msamp:
        raise NotImplementedError("enable_msamp=True: DeepSpeed has no MS-AMP any more. Leave it out, and use bf16.")
    if plugin.get_value("fp16.enabled") is True and not deepspeed.get_accelerator().is_fp16_supported():
        raise ValueError(
            "mixed_precision='fp16' (fp16.enabled in the DeepSpeed configuration): DeepSpeed has no float16 on this processor. Take 'bf16'."
        )
    if hasattr(optimizer, "fused_backward"):
        raise NotImplementedError(
            f"{type(optimizer).__name__} updates weights in its own backward pass, and the engine in its step. Pass a torch optimizer to prepare."
        )
    # A scheduler that is made by a function stands for none of the configuration.
    made = getattr(scheduler, "lr_scheduler_callable", None) is not None
    for name, given, dummy in (("optimizer", optimizer, DummyOptim), ("scheduler", scheduler, DummyScheduler)):
        stands = isinstance(given, dummy)
        if stands and name not in config and not (made and given is scheduler):
            raise ValueError(
                f"{dummy.__name__} stands for the {name} of the DeepSpeed configuration, which has no `{name}`. Add it there, or pass "
                f"a torch {name} to prepare" + (", or `lr_scheduler_callable`." if given is scheduler else ".")
            )
        if given is not None and not stands and name in config:
            raise ValueError(
                f"The DeepSpeed configuration has `{name}`, and prepare got a {type(given).__name__}. Pass "
                f"accelerate.utils.{dummy.__name__} to prepare, or take `{name}` out of the configuration."
            )
    if isinstance(optimizer, DummyOptim) and not isinstance(scheduler, DummyScheduler | None):
        raise ValueError(
            f"prepare got DummyOptim and a {type(scheduler).__name__}: a torch scheduler needs the torch optimizer that it was made for. "
            "Pass DummyScheduler as well, or a torch optimizer."
        )
    held = {id(parameter) for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]}
    if held and held.isdisjoint(map(id, model.parameters())):
        raise ValueError(
            f"The optimizer ({type(optimizer).__name__}) holds no parameter of {type(model).__name__}: its steps would change nothing. Make "
            "it from `model.parameters()` of the model as it is now."
        )
    _check_disk(plugin)
    if optimizer is None and stage in (1, 2):
        raise ValueError(
            f"prepare got a model without an optimizer, and ZeRO stage {stage} shards the optimizer's state. Pass the optimizer with the "
            "model, or set zero_stage to 3 (or 0) for inference."
        )


def _check_disk(plugin: DeepSpeedPlugin) -> None:
    """Refuse nvme where DeepSpeed would keep the host's memory instead, has no folder, or cannot build what reads and writes."""
    for key in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
        if plugin.get_value(f"{key}.device") != "nvme":
            continue
        if plugin.zero_stage != 3:
            raise ValueError(f"{key}.device is 'nvme' at ZeRO stage {plugin.zero_stage}: take stage 3, or 'cpu'.")
        if plugin.get_value(f"{key}.nvme_path") in (None, "none"):
            raise ValueError(f"{key}.device is 'nvme', and {key}.nvme_path names no folder. Set it.")
        import deepspeed

        if not deepspeed.ops.__compatible_ops__["async_io"]:
            raise RuntimeError(
                f"{key}.device is 'nvme', for which DeepSpeed builds async_io, and this machine has no libaio. Install it with its headers "
                "(libaio-dev, libaio-devel), or set the device to 'cpu'."
            )


def is_schedule(scheduler: Any) -> bool:
    """Whether this is one of DeepSpeed's schedulers, which derive from none of torch's."""
    return any(kind.__module__ == "deepspeed.runtime.lr_schedules" for kind in type(scheduler).__mro__)


def batch_size(loaders: Sequence[Any], smallest: bool, processes: int) -> int | None:
    """Return the batch size of a process in the loaders that have one; of several the smallest or the largest."""
    # A loader whose batches the main process reads and cuts has the size of whole ones.
    sizes = [(getattr(loader, "batch_size", None), getattr(loader, "split_batches", False)) for loader in loaders]
    sizes = [size // processes if cut else size for size, cut in sizes if isinstance(size, int)]
    return (min if smallest else max)(sizes) if sizes else None


def resolve(
    accelerator: Run, plugin: DeepSpeedPlugin, model: nn.Module, optimizer: Any, scheduler: Any, loaders: Sequence[Any]
) -> dict[str, Any]:
    """Fill in every "auto" of the plugin's configuration, and return what the engine gets.

    Raises:
        ValueError: nothing determines a value, or values contradict each other.
    """
    config = plugin.deepspeed_config
    steps = accelerator.gradient_accumulation_steps
    if config[_STEPS] == "auto":
        config[_STEPS] = steps
    elif config[_STEPS] != steps:
        if steps != 1 and accelerator.process_index == 0:  # 1 is what nobody has set, as under transformers' Trainer
            logger.warning(
                f"gradient_accumulation_steps is {config[_STEPS]} in the DeepSpeed configuration and {steps} in the Accelerator: "
                "the configuration holds."
            )
        accelerator.gradient_accumulation_steps = config[_STEPS]
    micro = config.get(_MICRO, "auto")
    if micro == "auto":
        micro = batch_size(loaders, plugin.is_train_batch_min, accelerator.num_processes)
    if micro is None:
        raise ValueError(
            f"{_MICRO} is 'auto' in the DeepSpeed configuration, and no data loader has a batch size. Pass a loader with a batch size to "
            f"prepare, or set AcceleratorState().deepspeed_plugin.deepspeed_config[{_MICRO!r}]."
        )
    layout = accelerator.parallelism_config
    replicas = accelerator.num_processes // (layout.sp_size if layout is not None else 1)
    known: dict[str, Any] = {
        _MICRO: micro,
        _TRAIN: micro * config[_STEPS] * replicas,
        "gradient_clipping": 1.0,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
        **_widths(model, plugin),
        **_optimizer(optimizer),
        **_schedule(scheduler, 1 if accelerator.split_batches else replicas),
    }
    if optimizer is not None and not isinstance(optimizer, DummyOptim):
        config.setdefault("zero_allow_untested_optimizer", True)
        # The optimizer that was given is the one that trains; DeepSpeed would refuse it beside an offload otherwise.
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    if layout is not None and layout._sp_by_deepspeed:
        config[_TRAIN] = known[_TRAIN]  # the Trainer has counted ranks that share sequences apart
    plugin.deepspeed_config_process(must_match=False, **known)
    return {"steps_per_print": math.inf, **copy.deepcopy(config)}


def _widths(model: nn.Module, plugin: DeepSpeedPlugin) -> dict[str, int]:
    """Return sizes of buckets for the model's width, where the configuration asks for them."""
    asked = [key for key in _BY_WIDTH if plugin.is_auto(key)]
    if not asked:
        return {}
    found = getattr(model, "config", None)
    for config in (found, getattr(found, "text_config", None)):
        sizes = [getattr(config, "hidden_size", None), *(getattr(config, "hidden_sizes", None) or ())]
        if widths := [size for size in sizes if isinstance(size, int)]:
            return {key: _BY_WIDTH[key](max(widths)) for key in asked}
    raise ValueError(
        f"{', '.join(asked)}: 'auto' in the DeepSpeed configuration, and {type(model).__name__} has no config.hidden_size to compute it "
        "from. Set it."
    )


def _optimizer(optimizer: Any) -> dict[str, Any]:
    if not isinstance(optimizer, DummyOptim):
        return {}
    return {"optimizer.params.lr": optimizer.lr, "optimizer.params.weight_decay": optimizer.weight_decay}


def _schedule(scheduler: Any, replicas: int) -> dict[str, Any]:
    if not isinstance(scheduler, DummyScheduler) or scheduler.lr_scheduler_callable is not None:
        return {}
    optimizer = scheduler.optimizer
    rate = optimizer.lr if hasattr(optimizer, "lr") else optimizer.defaults["lr"]
    known = {
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": rate,
        # DeepSpeed refuses a warm-up of no steps since 0.19.6.
        "scheduler.params.warmup_num_steps": scheduler.warmup_num_steps or 1,
    }
    if scheduler.total_num_steps is not None:
        # It counts batches of one process, as other schedulers do; the engine steps once for those of all. A warm-up counts steps.
        known["scheduler.params.total_num_steps"] = math.ceil(scheduler.total_num_steps / replicas)
    return known
