"""Ways of starting processes, and actions of parsers, that programs import from `accelerate.commands.launch` and `accelerate.commands.utils`."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from accelerate.config.options.schema import both_spellings
from accelerate.launch import config_file, runners
from accelerate.launch.plan import Source
from accelerate.launch.resolve import resolve

# Which switch makes the help show which heading.
options_to_group = {
    "multi_gpu": "Distributed GPUs",
    "tpu": "TPU",
    "use_deepspeed": "DeepSpeed Arguments",
    "use_fsdp": "FSDP Arguments",
    "use_megatron_lm": "Megatron-LM Arguments",
    "fp8_backend": "FP8 Arguments",
}


class _StoreAction(argparse._StoreAction):
    """An argument under both spellings of its long flags, for parsers of argparse."""

    def __init__(self, option_strings: Sequence[str], *args: Any, **kwargs: Any) -> None:
        super().__init__(list(both_spellings(option_strings)), *args, **kwargs)


class _StoreConstAction(_StoreAction):
    """A flag that stores a constant."""

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        const: Any,
        default: Any = None,
        required: bool = False,
        help: str | None = None,
    ) -> None:
        spelled = list(both_spellings(option_strings))
        argparse.Action.__init__(self, spelled, dest, 0, const, default, required=required, help=help)

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        """Store the constant; argparse calls it."""
        setattr(namespace, self.dest, self.const)


class _StoreTrueAction(_StoreConstAction):
    """A flag that stores True."""

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        default: Any = None,
        required: bool = False,
        help: str | None = None,
    ) -> None:
        super().__init__(option_strings, dest, True, default, required, help)


def _validate_launch_command(args: argparse.Namespace) -> tuple[argparse.Namespace, Any, bool]:
    """Resolve parsed arguments and write the outcome into them; the script need not be there.

    Returns them, the configuration file's content or None, and whether that file decided the precision. Raises as
    `launch_command`.
    """
    plan = resolve(args, needs_script=False)
    config = None
    if (path := config_file.find(args.config_file, os.environ)) is not None:
        from accelerate.commands.config.config_args import load_config_from_file  # needs YAML; most runs do not

        config = load_config_from_file(path)
    for name, resolved in plan.settings.items():
        setattr(args, name, resolved.value)
    args.use_cpu = plan.on_cpu and bool(plan["cpu"])
    return args, config, plan.settings["mixed_precision"].source is Source.FILE


def simple_launcher(args: argparse.Namespace) -> None:
    """Run the script in one process; called as `launch_command`."""
    runners.run(replace(resolve(args), runner="single"))


def multi_gpu_launcher(args: argparse.Namespace) -> None:
    """Run the script in several processes, under torch's elastic launcher; called as `launch_command`."""
    _run_by(args, "local")


def deepspeed_launcher(args: argparse.Namespace) -> None:
    """Run the script with DeepSpeed, by its own launcher on several machines; called as `launch_command`."""
    args.use_deepspeed = True
    _run_by(args, "local")


def tpu_launcher(args: argparse.Namespace) -> None:
    """Run the script's training function on the TPU cores of this machine; called as `launch_command`."""
    args.tpu = True
    _run_by(args, "tpu")


def tpu_pod_launcher(args: argparse.Namespace) -> None:
    """Run the script on all machines of a TPU pod; called as `launch_command`."""
    args.tpu, args.tpu_use_cluster = True, True
    _run_by(args, "tpu_pod")


def sagemaker_launcher(sagemaker_config: Any, args: argparse.Namespace) -> None:
    """Run the script as the job that a `SageMakerConfig` describes; errors are those of `launch_command`."""
    runners.module_for(replace(resolve(args), runner="sagemaker")).run_job(sagemaker_config, args)


def _run_by(args: argparse.Namespace, runner: str) -> None:
    """Run the arguments by a runner, unless they choose another runner."""
    plan = resolve(args)
    runners.run(plan if plan.runner != "single" else replace(plan, runner=runner))
