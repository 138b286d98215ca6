"""The interview about Amazon SageMaker; the account is a mock."""

import sys
from unittest.mock import Mock

import pytest

from accelerate.commands.config import sagemaker
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.config.sagemaker import ROLE_NAME, ask_sagemaker
from accelerate.launch import config_file


@pytest.fixture(autouse=True)
def no_account(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever the interview does
        monkeypatch.delenv(name)


def test_keys_never_reach_the_file(scripted, place, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "made-up-secret")
    made = Mock(return_value=True)
    monkeypatch.setattr(sagemaker, "create_role", made)
    asker = scripted("", "", "2", "yes", "registry/image:1", "", "", "1", "no", "", "", "", "", "")
    path = ask_sagemaker(asker).save(place / "c.yaml")
    assert not any(key in text for key in ("AKIA1", "made-up") for text in (path.read_text(), *asker.said))
    made.assert_called_once_with(ROLE_NAME, None, "us-east-1")
    config = load_config_from_file(path)
    assert (config.iam_role_name, config.profile, config.image_uri) == (ROLE_NAME, None, "registry/image:1")
    assert config.ec2_instance_type == "ml.p3.2xlarge"


@pytest.mark.parametrize("seed", range(10))
def test_any_answers_make_a_file_that_reads_back(place, at_random, monkeypatch, seed):
    monkeypatch.setattr(sagemaker, "create_role", lambda *args: False)
    config = ask_sagemaker(at_random(seed))
    path = config.save(place / "c.yaml")
    assert load_config_from_file(path) == load_config_from_file(config.save(place / "c.json"))
    assert config_file.inspect(path).problems == []


def test_without_boto3_a_role_is_asked_for(scripted, monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    asker = scripted("1", "", "", "2", "mine", *[""] * 10)
    assert ask_sagemaker(asker).iam_role_name == "mine"
    assert any("needs boto3" in line for line in asker.said)
