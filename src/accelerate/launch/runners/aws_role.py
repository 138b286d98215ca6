"""The IAM role under which a SageMaker job runs. boto3 is imported only when one of these functions is called.

Source: https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-roles.html
"""

import contextlib
import importlib
import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from accelerate.launch.errors import LaunchError

_TRUST = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"},
    ],
}
# What a training job itself needs: its image, its data, its logs and metrics. It starts no jobs of its own.
_PERMISSIONS = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Action": [
                "cloudwatch:PutMetricData",
                "ecr:BatchCheckLayerAvailability",
                "ecr:BatchGetImage",
                "ecr:GetAuthorizationToken",
                "ecr:GetDownloadUrlForLayer",
                "logs:CreateLogGroup",
                "logs:CreateLogStream",
                "logs:DescribeLogStreams",
                "logs:PutLogEvents",
                "s3:GetBucketLocation",
                "s3:GetObject",
                "s3:ListBucket",
                "s3:PutObject",
            ],
            "Resource": "*",
        },
    ],
}


def session(
    profile: str | None = None,
    region: str | None = None,
    access_key_id: str | None = None,
    secret_access_key: str | None = None,
) -> Any:
    """Return a `boto3.Session`. What is None is looked for where AWS's own tools look.

    Args:
        profile: a profile of the AWS credentials file; the keys are not used beside it.
        region: such as "us-east-1".
        access_key_id: a key of the account.
        secret_access_key: the secret that belongs to it.

    Raises:
        LaunchError: boto3 is not installed, or there is no such profile.
    """
    boto3 = _boto3()
    if profile:
        access_key_id = secret_access_key = None
    try:
        return boto3.Session(
            profile_name=profile or None,
            region_name=region or None,
            aws_access_key_id=access_key_id or None,
            aws_secret_access_key=secret_access_key or None,
        )
    except _botocore_exceptions().ProfileNotFound:
        raise LaunchError(
            f"There is no AWS profile {profile!r}. Make one with `aws configure --profile {profile}`, or name another."
        ) from None


def create(name: str, using: Any = None) -> str:
    """Create a role that training jobs can run under, and return its ARN; a role of that name stays as it is.

    Args:
        name: the role.
        using: what `session` returned; None takes AWS's defaults.

    Raises:
        LaunchError: boto3 is not installed, or AWS refused.

    Example:
        >>> create("accelerate_sagemaker_role", session(profile="default"))  # doctest: +SKIP
        'arn:aws:iam::123456789012:role/accelerate_sagemaker_role'
    """
    with refusals(f"create the IAM role {name!r}"):
        client = (using or session()).client("iam")
        try:
            client.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(_TRUST))
        except client.exceptions.EntityAlreadyExistsException:
            return arn(name, using)
        try:
            client.put_role_policy(
                RoleName=name, PolicyName=f"{name}_policy_permission", PolicyDocument=json.dumps(_PERMISSIONS)
            )
        except BaseException:
            # A role without permissions would be taken for a finished one the next time.
            with contextlib.suppress(Exception):
                client.delete_role(RoleName=name)
            raise
    return arn(name, using)


def arn(name: str, using: Any = None) -> str:
    """Return the ARN of a role.

    Args:
        name: the role; an ARN is returned as it is.
        using: what `session` returned; None takes AWS's defaults.

    Raises:
        LaunchError: boto3 is not installed, there is no such role, or AWS refused.
    """
    if name.startswith("arn:"):
        return name
    with refusals(f"read the IAM role {name!r}"):
        client = (using or session()).client("iam")
        try:
            return client.get_role(RoleName=name)["Role"]["Arn"]
        except client.exceptions.NoSuchEntityException:
            raise LaunchError(
                f"There is no IAM role {name!r} in this AWS account. Correct iam_role_name, or create the role with "
                "`accelerate config`."
            ) from None


@contextlib.contextmanager
def refusals(doing: str) -> Iterator[None]:
    """Turn refusals of AWS into one line with AWS's own words, which hold no keys.

    Args:
        doing: what is being done, as in "create the role".

    Raises:
        LaunchError: AWS refused, or could not be reached.
    """
    exceptions = _botocore_exceptions()
    try:
        yield
    except (exceptions.BotoCoreError, exceptions.ClientError) as error:
        raise LaunchError(f"AWS did not let us {doing}: {error}") from None


def _boto3() -> ModuleType:
    try:
        return importlib.import_module("boto3")
    except ImportError:
        raise LaunchError(
            "Amazon SageMaker needs boto3, which is not installed: pip install 'accelerate[sagemaker]'."
        ) from None


def _botocore_exceptions() -> ModuleType:
    _boto3()
    return importlib.import_module("botocore.exceptions")
