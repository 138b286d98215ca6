"""A script as a training job of Amazon SageMaker, through the `sagemaker` SDK (version 2) and its Hugging Face containers.

The SDK and boto3 are imported only when a job is started.

Sources: https://sagemaker.readthedocs.io/en/stable/frameworks/huggingface/sagemaker.huggingface.html and
https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-roles.html
"""

import argparse
import contextlib
import csv
import os
import subprocess
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from accelerate.config.enums import SageMakerDistributedType
from accelerate.config.options import FEATURES
from accelerate.extensions.configure import config_args
from accelerate.extensions.machines import launchers
from accelerate.launch import config_file
from accelerate.launch.errors import PREFIX, LaunchError, MissingPackageError, to_stderr
from accelerate.launch.plan import LaunchPlan, Resolved, exports
from accelerate.launch.resolve import merge
from accelerate.launch.runners import Process
from accelerate.launch.secrets import masked

BY = "by a job of Amazon SageMaker"
REMOTE = True
# The `distribution` of an estimator. All machines that SageMaker's own parallelism runs on have eight GPUs.
_DISTRIBUTIONS: Mapping[SageMakerDistributedType, dict[str, Any]] = {
    SageMakerDistributedType.DATA_PARALLEL: {"smdistributed": {"dataparallel": {"enabled": True}}},
    SageMakerDistributedType.MODEL_PARALLEL: {
        "smdistributed": {"modelparallel": {"enabled": True}},
        "mpi": {"enabled": True, "processes_per_host": 8},
    },
}
# Keys of the configuration file that are arguments of the estimator as well, and all of its keys; with their defaults.
_ARGUMENTS = {
    "image_uri": None,
    "transformers_version": config_args.SAGEMAKER_TRANSFORMERS_VERSION,
    "pytorch_version": config_args.SAGEMAKER_PYTORCH_VERSION,
    "py_version": config_args.SAGEMAKER_PYTHON_VERSION,
    "base_job_name": "accelerate-sagemaker-1",
}
_JOB = {**dict.fromkeys(FEATURES["sagemaker"].keys), **_ARGUMENTS, "region": "us-east-1", "distributed_type": "NO"}
_Inputs = dict[str, str] | None


def starts(values: Mapping[str, Resolved], on: set[str], job: Any) -> bool:
    """Say that SageMaker starts the processes: the configuration file is for it."""
    return True


def summary(plan: LaunchPlan) -> str:
    """Return words without a number: the instances of the job decide."""
    return "The processes"


def process(plan: LaunchPlan, environment: Mapping[str, str]) -> Process:
    """Return the job that would be started, as the arguments of its estimator and the variables of its container."""
    _, arguments, inputs = _described(plan)
    variables = arguments.pop("environment")
    arguments["hyperparameters"] = masked(arguments["hyperparameters"])
    keywords = [f"{name}={value!r}" for name, value in arguments.items() if value is not None]
    words = ("sagemaker.huggingface.HuggingFace", *keywords, *([f"inputs={inputs!r}"] if inputs else []))
    return Process("SageMaker job", words, variables, is_call=True)


def run(plan: LaunchPlan, environment: Mapping[str, str], replace: bool = False) -> None:
    """Start the job, print its log and wait for its end in this process."""
    job, arguments, inputs = _described(plan)
    _start(job, keys(plan["aws_access_key_id"], plan["aws_secret_access_key"]), arguments, inputs)


def run_job(job: Any, args: argparse.Namespace) -> None:
    """Start the job that a `SageMakerConfig` describes, and wait for its end."""
    variables = job_variables(merge(args, os.environ)[0])
    arguments, inputs = estimator_arguments(job, args.training_script, args.training_script_args or (), variables)
    _start(job, keys(args.aws_access_key_id, args.aws_secret_access_key), arguments, inputs)


def _start(job: Any, account: tuple[str | None, str | None], arguments: dict[str, Any], inputs: _Inputs) -> None:
    try:
        import boto3
        import sagemaker as sdk
        from botocore.exceptions import BotoCoreError, ClientError
        from sagemaker.huggingface import HuggingFace
    except ImportError:
        needed = "pip install 'accelerate[sagemaker]' 'sagemaker<3'"
        raise MissingPackageError(f"SageMaker needs boto3 and version 2 of its SDK: {needed}.") from None
    try:
        key_id, secret = (None, None) if job.profile else account
        session = boto3.Session(key_id, secret, region_name=job.region, profile_name=job.profile)
        estimator = HuggingFace(**{"sagemaker_session": sdk.Session(boto_session=session), **arguments})
        estimator.fit(inputs=inputs)
    except sdk.exceptions.UnexpectedStatusException as error:
        to_stderr(f"{PREFIX}SageMaker: {error}\n")
        raise subprocess.CalledProcessError(1, [arguments["entry_point"]]) from error
    except KeyboardInterrupt:
        ends = "`aws sagemaker stop-training-job --training-job-name NAME` ends it"
        to_stderr(f"{PREFIX}the job continues; {ends}.\n")
        raise
    except (BotoCoreError, ClientError) as error:  # AWS's own words hold no keys
        raise LaunchError(f"AWS did not let us start the SageMaker job: {error}") from None


def job_variables(settings: Mapping[str, Resolved]) -> dict[str, str]:
    """Return the variables that carry settings, by option name, into the container of a job."""
    variables = exports(settings)
    variables.pop("ACCELERATE_USE_CPU", None)  # the container has its own devices
    return {name: value for name, value in variables.items() if name.startswith("ACCELERATE_")}


def _described(plan: LaunchPlan) -> tuple[Any, dict[str, Any], _Inputs]:
    """Return the job of a plan, the arguments of its estimator and its inputs."""
    launchers.refuse_elastic(plan, "SageMaker")
    for name in ("module", "no_python"):
        if plan[name]:
            raise LaunchError(f"--{name} does not go with SageMaker, which starts a Python file.")
    path = config_file.find(plan["config_file"], os.environ)  # only it can ask for SageMaker
    content = config_file.modernise(config_file.load_mapping(path))
    job_settings = {name: content[name] for name in _JOB if content.get(name) is not None}
    # A flag or a variable may name the number as well; where neither does, the plan has the value of the file.
    job = SimpleNamespace(**{**_JOB, **job_settings, "num_machines": plan["num_machines"] or 1})
    for name in ("ec2_instance_type", "iam_role_name"):
        if name not in job_settings:
            raise LaunchError(f"The configuration file {path} lacks {name}. Add it, or run `accelerate config` again.")
    if not isinstance(job.additional_args or {}, dict):
        raise LaunchError(f"additional_args in {path} must hold keys and values, such as `volume_size: 100`.")
    return job, *estimator_arguments(job, plan.script, plan.script_args, job_variables(plan.settings))


def estimator_arguments(
    job: Any, script: str, script_args: Sequence[str], environment: Mapping[str, str]
) -> tuple[dict[str, Any], _Inputs]:
    """Return the arguments of the SDK's `HuggingFace` estimator, and the inputs of its `fit`.

    `job` has the keys of the configuration file as attributes, `environment` the variables of the options. A
    LaunchError refuses a script that is no Python file, an argument without a value and a table that cannot be read.
    """
    if not script.endswith(".py"):
        raise LaunchError(f"{script!r} is no Python file; a SageMaker job starts a script ending in .py.")
    kind = SageMakerDistributedType(job.distributed_type)
    additional = dict(job.additional_args or {})
    inputs = dict(_table(job.sagemaker_inputs_file, "sagemaker_inputs_file")) or None
    metrics = _table(job.sagemaker_metrics_file, "sagemaker_metrics_file")
    variables = {"ACCELERATE_USE_SAGEMAKER": "true", **environment}
    variables["ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"] = kind.value
    variables |= additional.pop("environment", None) or {}
    arguments = {
        "entry_point": os.path.basename(script),
        "source_dir": os.path.dirname(script) or ".",
        "role": job.iam_role_name,
        **{name: getattr(job, name) for name in _ARGUMENTS},
        "instance_count": job.num_machines,
        "instance_type": job.ec2_instance_type,
        "debugger_hook_config": False,
        "distribution": _DISTRIBUTIONS.get(kind),
        "hyperparameters": hyperparameters(script_args),
        "environment": variables,
        "metric_definitions": [{"Name": name, "Regex": regex} for name, regex in metrics] or None,
    }
    return {**arguments, **additional}, inputs


def keys(access_key_id: str | None, secret_access_key: str | None) -> tuple[str | None, str | None]:
    """Return the two keys of an AWS account, or two times None; a single one is refused."""
    if bool(access_key_id) != bool(secret_access_key):
        lacking = "--aws_secret_access_key" if access_key_id else "--aws_access_key_id"
        raise LaunchError(f"{lacking} is missing: the two keys go together. A profile in the file needs neither.")
    return access_key_id or None, secret_access_key or None


def hyperparameters(arguments: Sequence[str]) -> dict[str, Any]:
    """Turn a script's arguments, `--name value` or `--name=value`, into typed values by name."""
    values: dict[str, Any] = {}
    words = list(arguments)
    while words:
        flag, equals, text = words.pop(0).partition("=")
        if not equals and words and (not words[0].startswith("-") or not isinstance(_typed(words[0]), str)):
            text, equals = words.pop(0), "="
        if not flag.startswith("-") or not flag.strip("-") or not equals:
            raise LaunchError(f"{flag!r} is no `--name value`; SageMaker wants a value: give every argument one.")
        values[flag.lstrip("-")] = _typed(text)
    return values


def _typed(text: str) -> Any:
    if text in ("True", "False"):  # in other letters it is a text to the script as well
        return text == "True"
    for kind in (int, float) if "_" not in text else ():
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _table(path: str | None, key: str) -> list[list[str]]:
    """Read a file of two columns with a heading."""
    if not path:
        return []
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = [row for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if row]
    except (OSError, ValueError) as error:
        raise LaunchError(f"{key} is {path!r}, and it cannot be read: {error}.") from None
    if bad := next((row for row in rows if len(row) != 2), None):
        raise LaunchError(f"{path} ({key}) holds {bad!r}; write a name, a tab and a value in each line.")
    return rows[1:]
