"""Jobs of Amazon SageMaker, with an SDK that records its calls."""

import re
import subprocess
import sys

import pytest

from accelerate.launch import runners
from accelerate.launch.errors import LaunchError
from accelerate.launch.resolve import resolve
from cases import cases

boto3 = pytest.importorskip("boto3")

CONFIG = """
compute_environment: AMAZON_SAGEMAKER
distributed_type: "NO"
mixed_precision: bf16
ec2_instance_type: ml.g5.xlarge
iam_role_name: trainer
region: eu-west-1
"""
SDK = """
__version__ = "2.0"
class Session:
    def __init__(self, boto_session): self.boto_session = boto_session
class exceptions:
    class UnexpectedStatusException(Exception): pass
"""
HUGGINGFACE = """
import sagemaker
calls, fits, failure = [], [], None
class HuggingFace:
    def __init__(self, **arguments):
        calls.append(arguments)
    def fit(self, inputs=None):
        fits.append(inputs)
        if failure: raise failure
"""


@pytest.fixture(autouse=True)
def account(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def sdk(fake_package):
    fake_package("sagemaker", __init__=SDK, huggingface=HUGGINGFACE)
    import sagemaker.huggingface

    return sagemaker.huggingface


@pytest.fixture
def launch(parse, written):
    def run(line="", config=CONFIG, arguments=""):
        written("c.yaml", config)
        return resolve(parse(f"--config_file c.yaml --quiet {line} {'' if '.py' in line else 'train.py'} {arguments}"))

    return run


KEYS = "--aws_access_key_id AKID --aws_secret_access_key verysecret"


def test_a_job(sdk, launch):
    runners.run(launch(KEYS, arguments="--lr 1e-3 --x True --id 1_000 --with-dash=v=w --empty= -e -3"))
    (arguments,), (inputs,) = sdk.calls, sdk.fits
    session = arguments.pop("sagemaker_session").boto_session
    credentials = session.get_credentials()
    assert (credentials.access_key, credentials.secret_key, session.region_name) == ("AKID", "verysecret", "eu-west-1")
    assert inputs is None
    environment = arguments.pop("environment")
    assert environment["ACCELERATE_USE_SAGEMAKER"] == "true" and environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert environment["ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"] == "NO"
    assert environment["ACCELERATE_DYNAMO_BACKEND"] == "NO" and "ACCELERATE_USE_CPU" not in environment
    nothing = dict.fromkeys(("image_uri", "distribution", "metric_definitions"))
    versions = {"transformers_version": "4.17.0", "pytorch_version": "1.10.2", "py_version": "py38"}
    machines = {"instance_count": 1, "instance_type": "ml.g5.xlarge", "base_job_name": "accelerate-sagemaker-1"}
    values = {"lr": 0.001, "x": True, "id": "1_000", "with-dash": "v=w", "empty": "", "e": -3}
    script = {"entry_point": "train.py", "source_dir": ".", "hyperparameters": values}
    rest = {"role": "trainer", "debugger_hook_config": False}
    assert arguments == {**nothing, **versions, **machines, **script, **rest}


def test_profile_machines_and_further_arguments(sdk, launch, written, tmp_path):
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = a\naws_secret_access_key = b\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "job.py").touch()
    more = "profile: mine\nnum_machines: 2\nimage_uri: 1.dkr/x\n"
    more += "additional_args: {volume_size: 9, environment: {A: b}}\n"
    more += "sagemaker_inputs_file: in.tsv\nsagemaker_metrics_file: metrics.tsv\n"
    written("in.tsv", "channel_name\tdata_location\ntrain\ts3://b/train\n\ntest\ts3://b/test\n")
    written("metrics.tsv", "metric_name\tmetric_regex\nacc\tacc=(.*?);\n")
    config = CONFIG.replace('"NO"', "MODEL_PARALLEL") + more
    runners.run(launch(f"{KEYS} src/job.py", config))  # a profile comes before keys
    (arguments,) = sdk.calls
    assert arguments["sagemaker_session"].boto_session.profile_name == "mine"
    assert (arguments["instance_count"], arguments["image_uri"], arguments["volume_size"]) == (2, "1.dkr/x", 9)
    assert (arguments["entry_point"], arguments["source_dir"]) == ("job.py", "src")
    assert arguments["environment"]["A"] == "b" and arguments["environment"]["ACCELERATE_USE_SAGEMAKER"] == "true"
    assert sdk.fits == [{"train": "s3://b/train", "test": "s3://b/test"}]
    assert arguments["metric_definitions"] == [{"Name": "acc", "Regex": "acc=(.*?);"}]
    parallel = {"modelparallel": {"enabled": True}}
    assert arguments["distribution"] == {"smdistributed": parallel, "mpi": {"enabled": True, "processes_per_host": 8}}
    assert arguments["environment"]["ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"] == "MODEL_PARALLEL"
    assert arguments["sagemaker_session"].boto_session.get_credentials().access_key == "a"


def test_dry_run_starts_nothing_and_hides_secrets(sdk, launch):
    process = runners.process(launch(KEYS, arguments="--hf_token alsosecret --lr 1"))
    text = repr(process)
    assert "secret" not in text and "AKID" not in text and "'lr': 1" in text
    assert process.label == "SageMaker job" and sdk.calls == []


def test_a_job_that_fails(sdk, launch, capsys):
    import sagemaker as package

    sdk.failure = package.exceptions.UnexpectedStatusException("Failed. Reason: out of memory")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        runners.run(launch(config=CONFIG + "debug: false\n"))
    assert caught.value.returncode == 1
    assert "out of memory" in capsys.readouterr().err


@cases(
    "line, config, arguments, fragment",
    ("job.sh.py.txt", CONFIG, "", "'job.sh.py.txt' is no Python file"),
    ("", CONFIG, "--flag", "'--flag' is no `--name value`"),
    ("--no_python env --name=x.py", CONFIG, "", "--no_python does not go with SageMaker"),
    ("", CONFIG.replace("iam_role_name: trainer", ""), "", "lacks iam_role_name"),
    ("", CONFIG + "additional_args: 3\n", "", "additional_args"),
    ("", CONFIG + "sagemaker_inputs_file: bad.tsv\n", "", "bad.tsv (sagemaker_inputs_file) holds ['foo bar']"),
    ("--aws_access_key_id AKID", CONFIG, "", "--aws_secret_access_key is missing"),
    ("", CONFIG + "profile: nobody\n", "", "The config profile (nobody) could not be found"),
)
def test_refusals(sdk, launch, written, tmp_path, line, config, arguments, fragment):
    written("bad.tsv", "heading\tx\nfoo bar\n")
    (tmp_path / "job.sh.py.txt").touch()
    with pytest.raises(LaunchError, match=re.escape(fragment)):
        runners.run(launch(line, config, arguments))
    assert sdk.fits == []


def test_no_sdk_and_a_newer_one(launch, fake_package, monkeypatch):
    fake_package("sagemaker", __init__="__version__ = '3.27.0'")
    for _ in range(2):
        with pytest.raises(ImportError, match="version 2 of its SDK.*sagemaker<3"):
            runners.run(launch())
        monkeypatch.setitem(sys.modules, "sagemaker", None)
