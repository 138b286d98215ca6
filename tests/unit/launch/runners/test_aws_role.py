"""IAM roles, in an AWS that moto plays."""

import json
import sys

import pytest

from accelerate.launch.errors import LaunchError
from accelerate.launch.runners import aws_role

pytest.importorskip("boto3")
moto = pytest.importorskip("moto")


@pytest.fixture(autouse=True)
def account(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    with moto.mock_aws():
        yield


@pytest.fixture
def session():
    return aws_role.session(region="us-east-1", access_key_id="AKID", secret_access_key="very secret")


def test_a_role_is_created_once(session):
    first = aws_role.create("trainer", session)
    assert first == aws_role.create("trainer", session) == aws_role.arn("trainer", session)
    assert first.startswith("arn:aws:iam::") and first.endswith(":role/trainer")
    client = session.client("iam")
    trust = client.get_role(RoleName="trainer")["Role"]["AssumeRolePolicyDocument"]
    assert trust["Statement"][0]["Principal"] == {"Service": "sagemaker.amazonaws.com"}
    assert client.list_role_policies(RoleName="trainer")["PolicyNames"] == ["trainer_policy_permission"]
    policy = client.get_role_policy(RoleName="trainer", PolicyName="trainer_policy_permission")["PolicyDocument"]
    actions = json.loads(json.dumps(policy))["Statement"][0]["Action"]
    assert {"s3:GetObject", "logs:PutLogEvents"} <= {*actions} and not [a for a in actions if a.endswith("*")]


def test_a_half_made_role_is_taken_back(session, monkeypatch):
    monkeypatch.setattr(aws_role, "_PERMISSIONS", {"Version": "nonsense"})
    with pytest.raises(LaunchError, match="AWS did not let us create the IAM role 'trainer'"):
        aws_role.create("trainer", session)
    assert session.client("iam").list_roles()["Roles"] == []


def test_arns_pass_and_unknown_roles_do_not(session):
    assert aws_role.arn("arn:aws:iam::1:role/x", session) == "arn:aws:iam::1:role/x"
    with pytest.raises(LaunchError, match="There is no IAM role 'none'"):
        aws_role.arn("none", session)


def test_profiles(tmp_path):
    with pytest.raises(LaunchError, match="There is no AWS profile 'mine'"):
        aws_role.session(profile="mine")
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = a\naws_secret_access_key = b\n")
    made = aws_role.session(profile="mine", region="eu-west-1", access_key_id="c", secret_access_key="d")
    assert made.get_credentials().access_key == "a" and made.region_name == "eu-west-1"


def test_no_credentials(monkeypatch):
    with monkeypatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with pytest.raises(LaunchError, match="AWS did not let us"):
            aws_role.arn("trainer", aws_role.session(region="us-east-1"))


def test_no_boto3(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(LaunchError, match=r"accelerate\[sagemaker\]"):
        aws_role.session()
