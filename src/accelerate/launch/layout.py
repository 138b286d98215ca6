"""Whether the processes of a launch can be laid out as its options say: the sizes of parallel dimensions, and FSDP's versions."""

import math
from collections.abc import Mapping

from accelerate.config.options import BY_NAME, FEATURES
from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import Resolved, Source

_AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")

# Options that only one version of FSDP reads, and what the other has in their place.
_OF_ONE_VERSION = {
    "fsdp_sharding_strategy": ("1", "--fsdp_reshard_after_forward says whether gathered parameters are freed"),
    "fsdp_forward_prefetch": ("1", "version 2 has no such switch"),
    "fsdp_backward_prefetch": ("1", "version 2 always prefetches"),
    "fsdp_use_orig_params": ("1", "version 2 always keeps the original parameters"),
    "fsdp_sync_module_states": ("1", "--fsdp_cpu_ram_efficient_loading sends the weights of the first process"),
    "fsdp_reshard_after_forward": ("2", "--fsdp_sharding_strategy says what is sharded"),
}


def check(values: Mapping[str, Resolved], num_processes: int) -> list[str]:
    """Refuse sizes that do not multiply to the number of processes, and name settings that this version of FSDP does not read.

    Args:
        values: option name to resolved value.
        num_processes: how many are started, over all machines.

    Returns:
        Notes for the user, one for each setting without effect.

    Raises:
        LaunchError: a size is below 1, or the sizes do not fit the processes; the message shows the arithmetic.
    """
    on = {name for name in ("fsdp", "parallelism") if FEATURES[name].is_on(values[FEATURES[name].switch].value)}
    if "parallelism" in on:
        _check_sizes(values, num_processes, sharded="fsdp" in on and values["fsdp_version"].value == "2")
    return _of_the_other_version(values) if "fsdp" in on else []


def _check_sizes(values: Mapping[str, Resolved], num_processes: int, sharded: bool) -> None:
    settings = {f"{axis}_size": values[f"parallelism_config_{axis}_size"] for axis in _AXES}
    sizes = {name: 1 if setting.value is None else setting.value for name, setting in settings.items()}
    for name, size in sizes.items():
        if size < 1:
            raise LaunchError(
                f"--parallelism_config_{name} is {size} ({settings[name].origin}); it must be at least 1."
            )
    total = math.prod(sizes.values())
    processes = f"--num_processes is {num_processes} ({values['num_processes'].origin})"
    if total == 1:
        if sharded and num_processes > 1:
            raise LaunchError(
                f"{processes}, and with --use_parallelism_config and --fsdp_version 2 nothing says over how many of them "
                f"parameters are sharded. Add --parallelism_config_dp_shard_size {num_processes}, or leave out "
                "--use_parallelism_config."
            )
        return  # the worker takes all processes for copies
    # Beside DeepSpeed's sequence parallelism, the processes left over are its data parallelism.
    by_deepspeed = sizes["sp_size"] > 1 and values["parallelism_config_sp_backend"].value == "deepspeed"
    if num_processes == total or (by_deepspeed and num_processes % total == 0):
        return
    arithmetic = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
    told = f"{arithmetic} = {total}" if arithmetic.count(" x ") else arithmetic
    raise LaunchError(
        f"The sizes of --use_parallelism_config are for {told} processes, and {processes}. Launch {total} processes, or change "
        "the --parallelism_config_*_size options so that they multiply to the number of processes."
    )


def _of_the_other_version(values: Mapping[str, Resolved]) -> list[str]:
    version = values["fsdp_version"].value
    return [
        f"--{name} ({values[name].origin}) has no effect with --fsdp_version {version}: {instead}."
        for name, (owner, instead) in _OF_ONE_VERSION.items()
        if version != owner
        and values[name].source is not Source.DEFAULT
        and values[name].value not in (None, BY_NAME[name].default)
    ]
