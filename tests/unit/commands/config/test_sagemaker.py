"""The questionnaire about Amazon SageMaker; the account is a mock."""

import json

import pytest

from accelerate.commands.config import sagemaker
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.config.sagemaker import ROLE_NAME, ask_sagemaker, create_role
from accelerate.launch import config_file
from accelerate.launch.errors import LaunchError

SECRET = "made-up-secret"


@pytest.fixture(autouse=True)
def no_account(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever the questionnaire does
        monkeypatch.delenv(name)


def test_a_profile(scripted, place):
    asker = scripted(
        *("1", "team", "moon", "eu-west-1", "1", "", "my-role", "no", "inputs.tsv", "", "2"),
        *("yes", "3", "no", "3", "2", "3", "no", "jobs"),
    )
    path = ask_sagemaker(asker).save(place / "c.yaml")
    config = load_config_from_file(path).to_dict()
    assert asker.lines == []
    assert config["compute_environment"] == "AMAZON_SAGEMAKER"
    assert (config["profile"], config["region"], config["iam_role_name"]) == ("team", "eu-west-1", "my-role")
    assert (config["distributed_type"], config["num_machines"]) == ("DATA_PARALLEL", 2)
    assert config["ec2_instance_type"] == "ml.p4dn.24xlarge"
    assert (config["mixed_precision"], config["base_job_name"]) == ("bf16", "jobs")
    assert config["dynamo_config"] == {"dynamo_backend": "INDUCTOR"}
    assert config["sagemaker_inputs_file"] == "inputs.tsv"
    assert "sagemaker_metrics_file" not in config
    assert any("'moon' is not of the right form" in line for line in asker.said)
    assert config_file.inspect(path).problems == ()


def test_keys_never_reach_the_file(scripted, place, monkeypatch):
    made = []
    monkeypatch.setattr(
        sagemaker, "create_role", lambda *args: made.append((args, dict(sagemaker.os.environ))) or True
    )
    asker = scripted("2", "AKIA1", SECRET, "", "2", "yes", "registry/image:1", "", "", "1", "no", "", "", "", "", "")
    path = ask_sagemaker(asker).save(place / "c.yaml")
    assert SECRET not in path.read_text()
    assert "AKIA1" not in path.read_text()
    assert not any(SECRET in line for line in asker.said)
    (name, profile, region), environ = made[0]
    assert (name, profile, region) == (ROLE_NAME, None, "us-east-1")
    assert environ["AWS_SECRET_ACCESS_KEY"] == SECRET
    config = load_config_from_file(path)
    assert (config.iam_role_name, config.profile, config.image_uri) == (ROLE_NAME, None, "registry/image:1")
    assert config.ec2_instance_type == "ml.p3.2xlarge"


def test_a_role_that_cannot_be_made_is_asked_for(scripted, monkeypatch):
    def refuse(*args):
        raise LaunchError("AWS did not make the role: no.")

    monkeypatch.setattr(sagemaker, "create_role", refuse)
    asker = scripted("1", "", "", "2", "mine", "", "", "", "1", "no", "", "", "", "", "")
    assert ask_sagemaker(asker).iam_role_name == "mine"
    assert "  AWS did not make the role: no." in asker.said


def test_the_answers_of_last_time_are_the_defaults(scripted, place):
    was = {
        "profile": "team",
        "region": "eu-west-1",
        "iam_role_name": "role",
        "ec2_instance_type": "ml.p3dn.24xlarge",
        "distributed_type": "MODEL_PARALLEL",
        "num_machines": 3,
        "py_version": "py311",
    }
    config = ask_sagemaker(scripted(*[""] * 30), was).to_dict()
    assert {key: config[key] for key in was} == was


@pytest.mark.parametrize("seed", range(30))
def test_any_answers_make_a_file_that_reads_back(place, at_random, monkeypatch, seed):
    monkeypatch.setattr(sagemaker, "create_role", lambda *args: False)
    config = ask_sagemaker(at_random(seed))
    path = config.save(place / "c.yaml")
    assert load_config_from_file(path) == load_config_from_file(config.save(place / "c.json"))
    assert config_file.inspect(path).problems == ()


def test_the_role_in_an_account(monkeypatch):
    moto = pytest.importorskip("moto")
    boto3 = pytest.importorskip("boto3")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with moto.mock_aws(config={"iam": {"load_aws_managed_policies": True}}):
        assert create_role("some-role", None, "us-east-1") is True
        assert create_role("some-role", None, "us-east-1") is False
        iam = boto3.client("iam")
        role = iam.get_role(RoleName="some-role")["Role"]
        document = role["AssumeRolePolicyDocument"]
        document = json.loads(document) if isinstance(document, str) else document
        assert document["Statement"][0]["Principal"] == {"Service": "sagemaker.amazonaws.com"}
        attached = iam.list_attached_role_policies(RoleName="some-role")["AttachedPolicies"]
        assert [policy["PolicyName"] for policy in attached] == ["AmazonSageMakerFullAccess"]


def test_what_aws_refuses_is_one_line(monkeypatch):
    pytest.importorskip("boto3")
    with pytest.raises(LaunchError, match="AWS did not make the role x: .*no-such-profile"):
        create_role("x", "no-such-profile", "us-east-1")


def test_without_boto3(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    with pytest.raises(LaunchError, match="needs boto3, which is not installed"):
        create_role("x")
