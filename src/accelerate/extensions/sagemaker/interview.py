"""The interview about Amazon SageMaker.

Keys of an account are neither asked for nor written: boto3 and `accelerate launch` take them from the environment.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

from accelerate.config.enums import ComputeEnvironment
from accelerate.config.options import CHAPTERS, OPTIONS, Option
from accelerate.config.options.schema import Check, matching, rows
from accelerate.extensions.configure.config_args import SageMakerConfig
from accelerate.extensions.configure.interview import Asker, Interview

_KINDS = {
    "NO": "One process, or what the script starts itself",
    "DATA_PARALLEL": "Data parallelism of SageMaker",
    "MODEL_PARALLEL": "Model parallelism of SageMaker",
}


_row = rows("Amazon SageMaker")


def _like(pattern: str, example: str) -> Check:
    return matching(pattern, f"an example of the right form is {example}")


_INSTANCE, _JOB = "ml.p3.2xlarge", "accelerate-sagemaker-1"
SAGEMAKER_PARALLEL_EC2_INSTANCES = ["ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4dn.24xlarge"]
_TYPES = ({"distributed_type": ("DATA_PARALLEL", "MODEL_PARALLEL")}, tuple(SAGEMAKER_PARALLEL_EC2_INSTANCES))
_FILES = "Which file lists the {} (columns: name, {}, separated by a tabulator)?"
_REGION, _JOB_NAMES = r"[a-z]{2}(-[a-z]+)+-\d+", r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}"
# Keys that only a file for SageMaker has, so that they are no options of `accelerate launch`.
_OPTIONS: tuple[Option, ...] = (
    _row("profile", "What is the name of the profile?", offer="default"),
    _row("region", "In which region of AWS should the jobs run?", check=_like(_REGION, "us-east-1")),
    _row("iam_role_name", "Which role of IAM, one that exists, should the jobs have (its name or ARN)?"),
    _row("image_uri", "What is the address of the image?"),
    _row("sagemaker_inputs_file", _FILES.format("inputs", "address"), optional=True),
    _row("sagemaker_metrics_file", _FILES.format("metrics", "expression"), optional=True),
    _row(
        "ec2_instance_type",
        "On which type of instance should the jobs run?",
        offer=_INSTANCE,
        special_words=_TYPES,
        check=_like(r"ml\.[\w-]+\.[\w-]+", _INSTANCE),
    ),
    _row("base_job_name", "With what should the names of the jobs begin?", offer=_JOB, check=_like(_JOB_NAMES, _JOB)),
)


def _get_iam_role_arn(role_name: str) -> str:
    """Return the ARN of an IAM role; needs boto3 and an account."""
    import boto3

    return boto3.client("iam").get_role(RoleName=role_name)["Role"]["Arn"]


def _create_iam_role_for_sagemaker(role_name: str) -> None:
    """Create an IAM role for SageMaker with Amazon's policy; an existing role is not changed."""
    import boto3

    client = boto3.client("iam")
    trust = {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [trust]})
    try:
        client.create_role(RoleName=role_name, AssumeRolePolicyDocument=policy)
    except client.exceptions.EntityAlreadyExistsException:
        print(f"The role {role_name} exists already and is used without changes.")
        return
    client.attach_role_policy(RoleName=role_name, PolicyArn="arn:aws:iam::aws:policy/AmazonSageMakerFullAccess")


def get_sagemaker_input() -> SageMakerConfig:
    """Ask for the settings of SageMaker jobs.

    Raises:
        EOFError: the input ended before the last answer.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    return ask_sagemaker(Asker())


def ask_sagemaker(asker: Asker, previous: Mapping[str, Any] | None = None) -> SageMakerConfig:
    """Ask for the settings of SageMaker jobs; those of the file that is replaced, key to value, are the defaults."""
    was = dict(previous or {})
    talk = Interview(asker, previous=was, options=(*OPTIONS, *_OPTIONS))
    has_keys = "AWS_ACCESS_KEY_ID" in os.environ and "profile" not in was
    accounts = ["A profile of the AWS command line", "Access keys, from the environment"]
    if asker.choose("How do you sign in to AWS?", accounts, int(has_keys)) == 0:
        talk.ask("profile")
    else:
        keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        asker.say(f"  Keys are never written to the file. `accelerate launch` takes them from {keys}.")
    talk.ask("region", os.environ.get("AWS_DEFAULT_REGION") or "us-east-1")
    talk.ask("iam_role_name")
    if asker.yes("Do you have a Docker image of your own?", bool(was.get("image_uri"))):
        talk.ask("image_uri")
    talk.ask("sagemaker_inputs_file")
    talk.ask("sagemaker_metrics_file")
    words = list(_KINDS)
    before = words.index(was["distributed_type"]) if was.get("distributed_type") in words else 0
    kind = words[asker.choose("How should the processes of a job cooperate?", list(_KINDS.values()), before)]
    talk.facts["distributed_type"] = kind
    for chapter in CHAPTERS:
        if chapter.name.startswith("compilation"):
            talk.hold(chapter)
    for name in ("ec2_instance_type", "num_machines", "mixed_precision", "debug", "base_job_name"):
        talk.ask(name)
    kept = {key: was[key] for key in ("pytorch_version", "transformers_version", "py_version") if key in was}
    return SageMakerConfig(ComputeEnvironment.AMAZON_SAGEMAKER, kind, use_cpu=False, **kept, **talk.content())
