"""The interview about Amazon SageMaker."""

import pytest

from accelerate.extensions.configure.config_args import load_config_from_file
from accelerate.extensions.sagemaker.interview import ask_sagemaker
from accelerate.launch import config_file


@pytest.fixture(autouse=True)
def no_account(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever the interview does
        monkeypatch.delenv(name)


def test_keys_never_reach_the_file(scripted, place, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "made-up-secret")
    asker = scripted("", "", "mine", "yes", "registry/image:1", "", "", "1", "no", "", "", "", "", "")
    path = ask_sagemaker(asker).save(place / "c.yaml")
    assert not any(key in text for key in ("AKIA1", "made-up") for text in (path.read_text(), *asker.said))
    config = load_config_from_file(path)
    assert (config.iam_role_name, config.profile, config.image_uri) == ("mine", None, "registry/image:1")
    assert config.ec2_instance_type == "ml.p3.2xlarge"


@pytest.mark.parametrize("seed", range(10))
def test_any_answers_make_a_file_that_reads_back(place, at_random, seed):
    config = ask_sagemaker(at_random(seed))
    path = config.save(place / "c.yaml")
    assert load_config_from_file(path) == load_config_from_file(config.save(place / "c.json"))
    assert config_file.inspect(path).problems == []
