"""The questions about Amazon SageMaker, and the words they accept.

Keys of an account never reach the configuration file: they are used to make the role, if that is wanted, and forgotten.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from accelerate.commands.config.ask import Asker
from accelerate.commands.config.cluster_steps import DYNAMO_MORE
from accelerate.commands.config.config_args import SageMakerConfig
from accelerate.commands.config.config_utils import DYNAMO_BACKENDS
from accelerate.commands.config.interview import Interview, Step, at_least, content
from accelerate.config.enums import ComputeEnvironment
from accelerate.launch.errors import LaunchError
from accelerate.utils.constants import SAGEMAKER_PARALLEL_EC2_INSTANCES, TORCH_DYNAMO_MODES

__all__ = [
    "DYNAMO_BACKENDS",
    "SAGEMAKER_PARALLEL_EC2_INSTANCES",
    "TORCH_DYNAMO_MODES",
    "ask_sagemaker",
    "create_role",
    "get_sagemaker_input",
]

ROLE_NAME = "accelerate_sagemaker_execution_role"
_POLICY = "arn:aws:iam::aws:policy/AmazonSageMakerFullAccess"
_DISTRIBUTIONS = (
    ("NO", "One process, or what the script starts itself"),
    ("DATA_PARALLEL", "Data parallelism of SageMaker"),
    ("MODEL_PARALLEL", "Model parallelism of SageMaker"),
)


def get_sagemaker_input() -> SageMakerConfig:
    """Ask for the settings of SageMaker jobs.

    Raises:
        EOFError: the input ended before the last answer.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    return ask_sagemaker(Asker())


def ask_sagemaker(asker: Asker, previous: Mapping[str, Any] | None = None) -> SageMakerConfig:
    """Ask for the settings of SageMaker jobs.

    Args:
        asker: asks.
        previous: key to value, of the file that is replaced; they become the defaults.

    Raises:
        EOFError: the input ended before the last answer.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    was = dict(previous or {})
    answers: dict[str, Any] = {}
    answers["profile"] = _ask_account(asker, was)
    answers["region"] = asker.text(
        "In which region of AWS should the jobs run?", _matching(r"[a-z]{2}(-[a-z]+)+-\d+", "us-east-1"),
        was.get("region", os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"),
    )  # fmt: skip
    answers["iam_role_name"] = _ask_role(asker, answers, was)
    if asker.yes("Do you have a Docker image of your own?", bool(was.get("image_uri"))):
        answers["image_uri"] = asker.text(
            "What is the address of the image?", _matching(r"\S+", "registry/name:tag"), was.get("image_uri")
        )
    for key, question in (
        ("sagemaker_inputs_file", "Which file lists the inputs (columns: name, address, separated by a tabulator)?"),
        (
            "sagemaker_metrics_file",
            "Which file lists the metrics (columns: name, expression, separated by a tabulator)?",
        ),
    ):
        answers[key] = asker.text(question, str, was.get(key), optional=True)
    kinds = [word for word, _ in _DISTRIBUTIONS]
    before = kinds.index(was["distributed_type"]) if was.get("distributed_type") in kinds else 0
    kind = kinds[asker.choose("How should the processes of a job cooperate?", [t for _, t in _DISTRIBUTIONS], before)]
    talk = Interview(asker, previous=was)
    if asker.yes("Should the model be compiled with torch.compile?", bool(was.get("dynamo_backend"))):
        backends = [word.lower() for word in DYNAMO_BACKENDS if word != "TORHCHXLA_TRACE_ONCE"]
        talk.ask(Step("dynamo_backend", "inductor", choices=tuple(backends)))
        if asker.yes("Should its settings be changed?"):
            talk.all(DYNAMO_MORE)
    answers["ec2_instance_type"] = _ask_instance(asker, kind, was)
    answers["num_machines"] = talk.ask(Step("num_machines", 1, check=at_least(1)))
    talk.ask(Step("mixed_precision", "no"))
    talk.ask("debug")
    answers["base_job_name"] = asker.text(
        "With what should the names of the jobs begin?",
        _matching(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", "accelerate-sagemaker-1"),
        was.get("base_job_name", "accelerate-sagemaker-1"),
    )
    kept = {key: was[key] for key in ("pytorch_version", "transformers_version", "py_version") if key in was}
    given = {key: value for key, value in answers.items() if value is not None}
    return SageMakerConfig(
        **{
            "compute_environment": ComputeEnvironment.AMAZON_SAGEMAKER,
            "distributed_type": kind,
            "use_cpu": False,
            **kept,
            **content(talk.values),
            **given,
        }
    )


def _ask_account(asker: Asker, was: Mapping[str, Any]) -> str | None:
    choices = ["A profile of the AWS command line", "Access keys, from the environment or typed here"]
    has_keys = "AWS_ACCESS_KEY_ID" in os.environ and "profile" not in was
    if asker.choose("How do you sign in to AWS?", choices, int(has_keys)) == 0:
        return asker.text(
            "What is the name of the profile?", _matching(r"\S+", "default"), was.get("profile", "default")
        )
    asker.say(
        "  Keys are never written to the file. `accelerate launch` takes them from AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY."
    )
    if "AWS_ACCESS_KEY_ID" not in os.environ or "AWS_SECRET_ACCESS_KEY" not in os.environ:
        identity = asker.text("What is the access key's ID (none to go on without)?", str, optional=True)
        secret = asker.secret("What is the secret access key?") if identity else ""
        if identity and secret:
            # For the role that may be made below, and gone with this process.
            os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = identity, secret
    return None


def _ask_role(asker: Asker, answers: Mapping[str, Any], was: Mapping[str, Any]) -> str:
    choices = ["A role that exists", f"A new role, {ROLE_NAME}"]
    parse = _matching(r"[\w+=,.@/:-]{1,256}", ROLE_NAME)
    if asker.choose("Which role of IAM should the jobs have?", choices) == 1:
        try:
            made = create_role(ROLE_NAME, answers["profile"], answers["region"])
        except LaunchError as error:
            asker.say(f"  {error}")
        else:
            asker.say(f"  {'Made' if made else 'Found'} the role {ROLE_NAME}.")
            return ROLE_NAME
    role = asker.text("What is the name of the role?", parse, was.get("iam_role_name"))
    assert role is not None  # it is not optional
    return role


def create_role(name: str, profile: str | None = None, region: str | None = None) -> bool:
    """Make a role of IAM that SageMaker may take on, with Amazon's own policy for it.

    Args:
        name: the role.
        profile: the profile to sign in with; None takes what the environment offers.
        region: the region.

    Returns:
        False if the role was there already; it is left as it is.

    Raises:
        LaunchError: boto3 is not installed, or AWS refuses.
    """
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise LaunchError(
            "Making a role needs boto3, which is not installed: `pip install accelerate[sagemaker]`, or name a role."
        ) from None
    trust = {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
        ],
    }
    try:
        iam = boto3.Session(profile_name=profile, region_name=region).client("iam")
        try:
            iam.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(trust))
        except iam.exceptions.EntityAlreadyExistsException:
            return False
        iam.attach_role_policy(RoleName=name, PolicyArn=_POLICY)
    except (BotoCoreError, ClientError) as error:
        raise LaunchError(f"AWS did not make the role {name}: {error}") from None
    return True


def _ask_instance(asker: Asker, kind: str, was: Mapping[str, Any]) -> str:
    parse = _matching(r"ml\.[\w-]+\.[\w-]+", "ml.p3.2xlarge")
    before = was.get("ec2_instance_type")
    if kind == "NO":
        instance = asker.text("On which type of instance should the jobs run?", parse, before or "ml.p3.2xlarge")
        assert instance is not None  # it has a default
        return instance
    known = list(SAGEMAKER_PARALLEL_EC2_INSTANCES)
    at = known.index(before) if before in known else 0
    return known[
        asker.choose(
            "On which type of instance should the jobs run (SageMaker's own parallelism has these)?", known, at
        )
    ]


def _matching(pattern: str, example: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text[:80]!r} is not of the right form; an example is {example}.")
        return text

    return parse
