"""A script as a training job of Amazon SageMaker, through the `sagemaker` SDK (version 2) and its Hugging Face containers.

Source: https://sagemaker.readthedocs.io/en/stable/frameworks/huggingface/sagemaker.huggingface.html
"""

import argparse
import importlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from accelerate.config.enums import SageMakerDistributedType
from accelerate.launch import config_file
from accelerate.launch.env import exports
from accelerate.launch.errors import LaunchError, MissingPackageError
from accelerate.launch.plan import LaunchPlan, Resolved
from accelerate.launch.resolve import merge
from accelerate.launch.runners import aws_role, program
from accelerate.launch.runners.base import Process
from accelerate.launch.secrets import shown
from accelerate.utils.constants import (
    SAGEMAKER_PARALLEL_EC2_INSTANCES,
    SAGEMAKER_PYTHON_VERSION,
    SAGEMAKER_PYTORCH_VERSION,
    SAGEMAKER_TRANSFORMERS_VERSION,
)

# All machines that SageMaker's own parallelism runs on have as many.
_GPUS_OF_PARALLEL_INSTANCES = 8


@dataclass(frozen=True)
class Job:
    """What a configuration file says about a job; the names are those of its keys.

    Attributes:
        ec2_instance_type: the kind of machine, such as "ml.g5.xlarge".
        iam_role_name: the role that the job runs under, by name or ARN.
        profile: a profile of the AWS credentials file; None takes keys, or what AWS's own tools would take.
        region: where the job runs.
        num_machines: how many machines it gets.
        base_job_name: what its name begins with.
        image_uri: a container image of one's own; None chooses one by the versions.
        transformers_version: version of transformers in the container.
        pytorch_version: version of torch in it.
        py_version: version of Python in it, such as "py310".
        distributed_type: SageMaker's own parallelism.
        sagemaker_inputs_file: a table of channels: name, tab, location; the first line is a heading.
        sagemaker_metrics_file: a table of metrics: name, tab, regular expression; the first line is a heading.
        additional_args: further arguments of the estimator; they win.
    """

    ec2_instance_type: str
    iam_role_name: str
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    base_job_name: str = "accelerate-sagemaker-1"
    image_uri: str | None = None
    transformers_version: str = SAGEMAKER_TRANSFORMERS_VERSION
    pytorch_version: str = SAGEMAKER_PYTORCH_VERSION
    py_version: str = SAGEMAKER_PYTHON_VERSION
    distributed_type: SageMakerDistributedType = SageMakerDistributedType.NO
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: Mapping[str, Any] | None = field(default=None)


def processes(plan: LaunchPlan, environment: Mapping[str, str]) -> list[Process]:
    """Return the job that would be started, as the arguments of its estimator and the variables of its container.

    Args:
        plan: what is started.
        environment: the variables that all processes share.

    Raises:
        LaunchError: the configuration file, the script or its arguments cannot make a job.
    """
    arguments, inputs = _arguments(plan, environment)
    job_environment = arguments.pop("environment")
    arguments["hyperparameters"] = {
        name: shown(name, str(value)) if shown(name, str(value)) != str(value) else value
        for name, value in arguments["hyperparameters"].items()
    }
    keywords = [f"{name}={value!r}" for name, value in arguments.items() if value is not None]
    words = ("sagemaker.huggingface.HuggingFace", *keywords, *([f"inputs={inputs!r}"] if inputs else []))
    return [Process("SageMaker job", words, job_environment)]


def run(plan: LaunchPlan, environment: Mapping[str, str], replace: bool = False) -> None:
    """Start the job and wait for its end; its log is printed.

    Args:
        plan: what is started.
        environment: the variables that all processes share.
        replace: has no effect: the SDK runs in this process.

    Raises:
        LaunchError: the SDK is missing, AWS refused, or as in `processes`.
        subprocess.CalledProcessError: the job failed.
    """
    arguments, inputs = _arguments(plan, environment)
    _start(
        read_job(plan),
        {name: plan[name] for name in ("aws_access_key_id", "aws_secret_access_key")},
        arguments,
        inputs,
    )


def run_job(job: Any, args: argparse.Namespace) -> None:
    """Start a job that a configuration object describes, and wait for its end.

    Args:
        job: an `accelerate.commands.config.config_args.SageMakerConfig`, or a `Job`.
        args: what `accelerate.commands.launch.launch_command_parser` parsed; `mixed_precision` and the options of
            torch.compile are told to the script.

    Raises:
        LaunchError, subprocess.CalledProcessError: as in `run`.
    """
    arguments, inputs = estimator_arguments(
        job, args.training_script, args.training_script_args or (), job_variables(merge(args, os.environ).values)
    )
    _start(job, vars(args), arguments, inputs)


def _start(job: Any, options: Mapping[str, Any], arguments: dict[str, Any], inputs: Mapping[str, str] | None) -> None:
    given = keys(options.get("aws_access_key_id"), options.get("aws_secret_access_key"))
    estimators, sdk = _sdk()
    boto_session = aws_role.session(job.profile, job.region, *given)
    with aws_role.refusals("start the SageMaker job"):
        try:
            arguments.setdefault("sagemaker_session", sdk.Session(boto_session=boto_session))
            estimator = estimators.HuggingFace(**arguments)
        except (TypeError, ValueError) as error:
            raise LaunchError(f"The SageMaker SDK refuses this job: {error}") from None
        _fit(sdk, estimator, inputs, str(arguments["entry_point"]))


def _fit(sdk: ModuleType, estimator: Any, inputs: Mapping[str, str] | None, script: str) -> None:
    failed = getattr(getattr(sdk, "exceptions", None), "UnexpectedStatusException", ())
    try:
        estimator.fit(inputs=inputs)
    except failed as error:
        print(f"accelerate launch: SageMaker: {error}", file=sys.stderr, flush=True)
        raise subprocess.CalledProcessError(1, [script]) from error
    except KeyboardInterrupt:
        name = getattr(getattr(estimator, "latest_training_job", None), "name", None)
        if name:
            print(
                f"accelerate launch: the job goes on. `aws sagemaker stop-training-job --training-job-name {name}` ends it.",
                file=sys.stderr,
                flush=True,
            )
        raise


def job_variables(settings: Mapping[str, Resolved]) -> dict[str, str]:
    """Return the variables that carry settings into the container of a job.

    Args:
        settings: option name to resolved value.
    """
    variables = {name: value for name, value in exports(settings).items() if name.startswith("ACCELERATE_")}
    # The container has its own devices.
    variables.pop("ACCELERATE_USE_CPU", None)
    return variables


def read_job(plan: LaunchPlan) -> Job:
    """Read what the configuration file of a plan says about the job.

    Args:
        plan: what is started.

    Raises:
        LaunchError: there is no file, or it lacks the kind of machine or the role.
    """
    path = config_file.find(plan["config_file"], os.environ)
    if path is None:
        raise LaunchError("A SageMaker job needs a configuration file. Write one with `accelerate config`.")
    content = config_file.modernise(config_file.load_mapping(path))
    known = {name: content[name] for name in Job.__dataclass_fields__ if content.get(name) is not None}
    for name in ("ec2_instance_type", "iam_role_name"):
        if not known.get(name):
            raise LaunchError(f"The configuration file {path} lacks {name}. Add it, or run `accelerate config` again.")
    if not isinstance(known.get("additional_args", {}), dict):
        raise LaunchError(f"additional_args in {path} must hold keys and values, such as `volume_size: 100`.")
    for name in ("num_machines",):
        if not isinstance(known.get(name, 1), int) or known.get(name, 1) < 1:
            raise LaunchError(f"{name} in {path} is {known[name]!r}; it must be a number from 1.")
    try:
        known["distributed_type"] = SageMakerDistributedType(str(known.get("distributed_type", "NO")))
    except ValueError:
        choices = ", ".join(member.value for member in SageMakerDistributedType)
        raise LaunchError(
            f"distributed_type in {path} is {known['distributed_type']!r}; for SageMaker choose one of {choices}."
        ) from None
    # A flag or a variable may say it as well; where nobody does, the plan has the value of the file.
    return Job(**{**known, **({"num_machines": plan["num_machines"]} if plan["num_machines"] else {})})


def estimator_arguments(
    job: Any, script: str, script_args: Sequence[str], environment: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Return the arguments of the SDK's `HuggingFace` estimator, and the inputs of its `fit`.

    Args:
        job: a `Job`, or another object with its attributes.
        script: the script, a Python file.
        script_args: its arguments, each with a value.
        environment: the variables of the options, for the container.

    Raises:
        LaunchError: the script is no Python file, an argument has no value, or a table cannot be read.
    """
    if not script.endswith(".py"):
        raise LaunchError(
            f"{script!r} is no Python file, which is what a SageMaker job starts. Name a script ending in .py."
        )
    kind = SageMakerDistributedType(job.distributed_type)
    inputs = _table(job.sagemaker_inputs_file, "sagemaker_inputs_file")
    metrics = _table(job.sagemaker_metrics_file, "sagemaker_metrics_file")
    given = dict(job.additional_args or {})
    arguments = {
        "image_uri": job.image_uri,
        "entry_point": os.path.basename(script),
        "source_dir": os.path.dirname(script) or ".",
        "role": job.iam_role_name,
        "transformers_version": job.transformers_version,
        "pytorch_version": job.pytorch_version,
        "py_version": job.py_version,
        "base_job_name": job.base_job_name,
        "instance_count": job.num_machines,
        "instance_type": job.ec2_instance_type,
        "debugger_hook_config": False,
        "distribution": None if "distribution" in given else _distribution(kind, job.ec2_instance_type),
        "hyperparameters": hyperparameters(script_args),
        "environment": {
            "ACCELERATE_USE_SAGEMAKER": "true",
            **environment,
            "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": kind.value,
        },
        "metric_definitions": [{"Name": name, "Regex": regex} for name, regex in metrics] if metrics else None,
    }
    if isinstance(given.get("environment"), dict):
        given["environment"] = {**arguments["environment"], **given["environment"]}
    return {**arguments, **given}, dict(inputs) if inputs else None


def keys(access_key_id: str | None, secret_access_key: str | None) -> tuple[str | None, str | None]:
    """Return the two keys of an AWS account, or two times None.

    Args:
        access_key_id: the value of `--aws_access_key_id`.
        secret_access_key: the value of `--aws_secret_access_key`.

    Raises:
        LaunchError: only one of them was given.
    """
    if bool(access_key_id) != bool(secret_access_key):
        lacking = "--aws_secret_access_key" if access_key_id else "--aws_access_key_id"
        raise LaunchError(
            f"{lacking} is missing: the two keys go together. A profile in the configuration file needs neither."
        )
    return access_key_id or None, secret_access_key or None


def hyperparameters(arguments: Sequence[str]) -> dict[str, Any]:
    """Turn the arguments of a script into typed values by name: SageMaker knows no others.

    Args:
        arguments: pairs `--name value`, or `--name=value`.

    Raises:
        LaunchError: a flag has no value, or a value no flag.

    Example:
        >>> hyperparameters(["--lr", "1e-3", "--shuffle=True", "--shift", "-3"])
        {'lr': 0.001, 'shuffle': True, 'shift': -3}
    """
    values: dict[str, Any] = {}
    words = list(arguments)
    while words:
        flag, equals, text = words.pop(0).partition("=")
        if not equals and words and (not words[0].startswith("-") or _is_number(words[0])):
            text, equals = words.pop(0), "="
        if not flag.startswith("-") or not flag.strip("-") or not equals:
            raise LaunchError(
                f"{flag!r} is no `--name value`; for SageMaker, give every argument of the script a value."
            )
        values[flag.lstrip("-")] = _typed(text)
    return values


def _typed(text: str) -> Any:
    if text in ("True", "False"):  # in other letters it is a text to the script as well
        return text == "True"
    for kind in (int, float):
        try:
            return text if "_" in text else kind(text)
        except ValueError:
            continue
    return text


def _is_number(text: str) -> bool:
    return isinstance(_typed(text), (int, float))


def _arguments(plan: LaunchPlan, environment: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str] | None]:
    program.refuse_elastic(plan, "SageMaker")
    for name in ("module", "no_python"):
        if plan[name]:
            raise LaunchError(
                f"--{name} does not go with SageMaker, which starts a Python file. Name a script ending in .py."
            )
    variables = job_variables(plan.settings)
    return estimator_arguments(read_job(plan), plan.script, plan.script_args, variables)


def _distribution(kind: SageMakerDistributedType, instance: str) -> dict[str, Any] | None:
    if kind is SageMakerDistributedType.DATA_PARALLEL:
        return {"smdistributed": {"dataparallel": {"enabled": True}}}
    if kind is SageMakerDistributedType.MODEL_PARALLEL:
        if instance not in SAGEMAKER_PARALLEL_EC2_INSTANCES:
            raise LaunchError(
                f"distributed_type MODEL_PARALLEL on {instance}: how many GPUs that has is not known here. Choose one of "
                f"{', '.join(SAGEMAKER_PARALLEL_EC2_INSTANCES)}, or write `distribution` under additional_args."
            )
        return {
            "smdistributed": {"modelparallel": {"enabled": True}},
            "mpi": {"enabled": True, "processes_per_host": _GPUS_OF_PARALLEL_INSTANCES},
        }
    return None


def _table(path: str | None, key: str) -> list[tuple[str, str]]:
    """Read a file of two columns with a heading."""
    if not path:
        return []
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"{key} is {path!r}, and it cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from None
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        name, tab, value = line.partition("\t")
        if not tab or not name.strip() or not value.strip():
            raise LaunchError(f"Line {number} of {path} ({key}) is {line[:80]!r}; write a name, a tab and a value.")
        rows.append((name.strip(), value.strip()))
    return rows


def _sdk() -> tuple[ModuleType, ModuleType]:
    try:
        sdk = importlib.import_module("sagemaker")
    except ImportError:
        raise MissingPackageError(
            "Amazon SageMaker needs its SDK, which is not installed: pip install 'sagemaker<3'."
        ) from None
    try:
        return importlib.import_module("sagemaker.huggingface"), sdk
    except ImportError:
        version = getattr(sdk, "__version__", "of another generation")
        raise LaunchError(
            f"The SageMaker SDK {version} has no estimators, which the jobs are made with: pip install 'sagemaker<3'."
        ) from None
