"""Commands and environments of the processes that `accelerate launch` starts, for programs that start them themselves."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from accelerate.base import _lazy
from accelerate.base.constants import DEEPSPEED_MULTINODE_LAUNCHERS as DEEPSPEED_MULTINODE_LAUNCHERS
from accelerate.config.enums import DistributedType
from accelerate.config.options import BY_NAME
from accelerate.extensions.compat.other import get_free_port, is_port_in_use
from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import Resolved, exports
from accelerate.launch.resolve import merge
from accelerate.launch.runners import module_of
from accelerate.runtime.ranks import DEFAULT_PORT

__getattr__ = _lazy.aliases("accelerate.utils.launch")


class MissingAccountError(LaunchError, OSError):
    """The request needs an account of a provider, and names none."""


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of a single process.

    Args:
        args: what `accelerate.commands.launch.launch_command_parser` parsed.

    Returns:
        The command, and all variables of the process; with more than one process also where they meet.

    Raises:
        LaunchError: a setting is malformed, or `--module` and `--no_python` are both given.

    Example:
        >>> from accelerate.commands.launch import launch_command_parser
        >>> command, _ = prepare_simple_launcher_cmd_env(launch_command_parser().parse_args(["-m", "my.train"]))
        >>> command[1:]  # after the path of this Python
        ['-m', 'my.train']
    """
    command = [] if args.no_python else [sys.executable, *(["-m"] if args.module else [])]
    environment = _environment(args)
    if (args.num_processes or 1) > 1:
        environment["MASTER_ADDR"] = str(args.main_process_ip or "127.0.0.1")
        environment["MASTER_PORT"] = str(DEFAULT_PORT if args.main_process_port is None else args.main_process_port)
    return [*command, args.training_script, *(args.training_script_args or ())], environment


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment of several processes, and put the arguments of torchrun on `args`.

    Args:
        args: as in `prepare_simple_launcher_cmd_env`; gains `nproc_per_node`, and `nnodes`, `node_rank`, `master_addr`,
            `master_port`, `rdzv_endpoint` or `standalone` as needed, ready for `_filter_args`. On one machine it also gets the
            `main_process_port` in force: port 0 is a free one, and where another program listens, `standalone` is set.

    Returns:
        All variables of the processes.

    Raises:
        LaunchError: a setting is malformed, `--module` and `--no_python` are both given, or the processes do not divide evenly
            over the machines.
    """
    machines = args.num_machines or 1
    processes = args.num_processes or 1
    if processes % machines:
        raise LaunchError(f"--num_processes is {processes}; it must be a multiple of --num_machines, {machines}.")
    args.nproc_per_node = str(processes // machines)
    if machines == 1:
        if args.main_process_port == 0:
            args.main_process_port = get_free_port()
        elif args.main_process_port is None:
            args.main_process_port = DEFAULT_PORT
        args.master_port = str(args.main_process_port)
        if is_port_in_use(args.main_process_port):
            args.standalone = True  # torchrun takes a free port then
        return _environment(args)
    args.nnodes = str(machines)
    args.node_rank = int(args.machine_rank or 0)
    if not args.main_process_ip or not args.main_process_port:
        raise LaunchError("--num_machines above 1 needs --main_process_ip and --main_process_port.")
    if args.same_network and args.rdzv_backend == "static":
        args.master_addr, args.master_port = str(args.main_process_ip), str(args.main_process_port)
    else:
        args.rdzv_endpoint = f"{args.main_process_ip}:{args.main_process_port}"
    return _environment(args)


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """Return the start of DeepSpeed's processes: its own command launcher, or None for torchrun.

    Args:
        args: as in `prepare_multi_gpu_env`.

    Returns:
        The command or None, and all variables of the processes. A command is for several machines with a launcher other
        than "standard"; the caller chooses the variables that reach the other machines.

    Raises:
        LaunchError: the launcher is unknown, two filters contradict each other, or as in `prepare_multi_gpu_env`.
    """
    settings = _settings(args)
    command = None
    if (args.num_machines or 1) > 1 and args.deepspeed_multinode_launcher != "standard":
        options = {name: resolved.value for name, resolved in settings.items()}
        command = module_of("deepspeed").command(options, args.training_script, args.training_script_args or ())
        environment = _environment(args)
    else:
        environment = prepare_multi_gpu_env(args)
    environment.update(exports(settings, "deepspeed"))
    environment.update(module_of("deepspeed").variables(settings, os.environ))
    return command, environment


def prepare_extend_env_parallelism_config(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the variables that describe the parallelism of a run to an environment, in place, and return it."""
    current_env["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    current_env.update(exports(_settings(args), "parallelism"))
    return current_env


def setup_fp8_env(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the variables that describe FP8 training to an environment, in place, and return it."""
    current_env.update(exports(_settings(args), "fp8"))
    return current_env


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Add the variables of a run on TPU cores to an environment.

    Args:
        args: as in `prepare_simple_launcher_cmd_env`.
        current_env: the environment; it is changed in place.
        pod: refused: torch_xla has no launcher for TPU pods any more.

    Returns:
        The arguments and the same environment.

    Raises:
        LaunchError: `pod` is set.
    """
    if pod:
        raise LaunchError(
            "torch_xla has no launcher for TPU pods. `accelerate launch --tpu_cluster` reaches the pod through gcloud."
        )
    current_env.update(module_of("tpu").precision_variables(args.mixed_precision, args.downcast_bf16))
    if args.debug:
        current_env["ACCELERATE_DEBUG_MODE"] = "true"
    return args, current_env


def prepare_sagemager_args_inputs(
    sagemaker_config: Any, args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Return the arguments of SageMaker's `HuggingFace` estimator and the inputs of its `fit`.

    The AWS account is put into the variables of this process, where the SDK finds it.

    Args:
        sagemaker_config: an `accelerate.commands.config.config_args.SageMakerConfig`.
        args: as in `prepare_simple_launcher_cmd_env`.

    Raises:
        MissingAccountError: there is neither a profile nor a pair of keys.
        LaunchError: the script is no Python file, one of its arguments has no value, or a table cannot be read.
    """
    sagemaker = module_of("sagemaker")
    access_key_id, secret_access_key = sagemaker.keys(args.aws_access_key_id, args.aws_secret_access_key)
    if not sagemaker_config.profile and not access_key_id:
        raise MissingAccountError(
            "Which AWS account? Put a profile into the configuration file, or give --aws_access_key_id and --aws_secret_access_key."
        )
    variables = {
        name: value for name, value in exports(_settings(args)).items() if name.startswith("ACCELERATE_DYNAMO_")
    }
    variables = {"ACCELERATE_MIXED_PRECISION": str(args.mixed_precision or "no"), **variables}
    arguments = sagemaker.estimator_arguments(
        sagemaker_config, args.training_script, args.training_script_args or (), variables
    )
    os.environ["AWS_DEFAULT_REGION"] = sagemaker_config.region
    if sagemaker_config.profile:
        os.environ["AWS_PROFILE"] = sagemaker_config.profile
    else:
        os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = access_key_id, secret_access_key
    return arguments


def _get_mpirun_args() -> tuple[str, str, str, str, str]:
    """Return mpirun's name, and its options for a host file, all processes, those of a machine, and binding ("": none).

    Raises:
        LaunchError: there is no mpirun on PATH, or it is an unknown one.
    """
    if module_of("mpi").flavour_of(os.environ) == "Open MPI":
        return "mpirun", "--hostfile", "-n", "--npernode", "--bind-to"
    return "mpirun", "-f", "-n", "-ppn", ""


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """Return a path-like variable with one more directory at its end; the variable itself is not changed.

    Empty parts, which would stand for the working directory, are removed.
    """
    return os.pathsep.join([*filter(None, os.environ.get(env_var_name, "").split(os.pathsep)), path_to_add])


def _filter_args(
    args: argparse.Namespace, parser: argparse.ArgumentParser, default_args: Sequence[str] = []
) -> argparse.Namespace:
    """Return the arguments that another parser knows; `default_args` are what that parser needs to be satisfied."""
    parsed, _ = parser.parse_known_args(list(default_args))
    for name in vars(parsed):
        if hasattr(args, name):
            setattr(parsed, name, getattr(args, name))
    return parsed


def _convert_nargs_to_dict(nargs: Sequence[str]) -> dict[str, Any]:
    """Turn script arguments `--name value` into typed values by name; a single word is a LaunchError."""
    return module_of("sagemaker").hyperparameters(nargs)


def _settings(args: argparse.Namespace) -> dict[str, Resolved]:
    return {
        name: Resolved(getattr(args, name)) if getattr(args, name, None) is not None else resolved
        for name, resolved in merge(args, os.environ)[0].items()
        if name in BY_NAME
    }


def _environment(args: argparse.Namespace) -> dict[str, str]:
    if args.module and args.no_python:
        raise LaunchError("--module and --no_python exclude each other. Choose one.")
    environment = {**os.environ, **exports(_settings(args))}
    if args.gpu_ids and args.gpu_ids != "all":
        environment["CUDA_VISIBLE_DEVICES"] = str(args.gpu_ids)
    return environment


class PrepareForLaunch:
    """A picklable function for a process starter: it sets the variables of its process, then calls the real function.

    Args:
        launcher: the function to run in each process.
        distributed_type: how the processes cooperate.
        debug: start torch.distributed (gloo) through the file that `ACCELERATE_DEBUG_RDV_FILE` names.
    """

    __module__ = "accelerate.utils.launch"  # the path in pickles

    def __init__(self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(str(getattr(distributed_type, "value", distributed_type)).upper())
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Run the function as the process of this number on this machine."""
        from accelerate.config.strategies import traits_of

        if self.debug:
            import torch.distributed as dist

            world_size = int(os.environ["WORLD_SIZE"])
            store = dist.FileStore(os.environ["ACCELERATE_DEBUG_RDV_FILE"], world_size)
            dist.init_process_group("gloo", rank=index, world_size=world_size, store=store)
        elif traits_of(self.distributed_type).torch_distributed:
            per_machine = int(os.environ.get("NPROC", 1))
            os.environ["LOCAL_RANK"] = str(index)
            os.environ["RANK"] = str(int(os.environ.get("NODE_RANK", 0)) * per_machine + index)
        os.environ["FORK_LAUNCHED"] = "1"
        self.launcher(*args)
