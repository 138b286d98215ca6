"""Jobs of Amazon SageMaker, with an SDK that records what it is told."""

import subprocess
import sys
import types

import pytest

from accelerate.launch import runners
from accelerate.launch.errors import LaunchError
from accelerate.launch.runners import sagemaker

pytest.importorskip("boto3")

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
        if arguments["py_version"] == "py1": raise ValueError("no such version")
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
def launch(plan, written):
    def run(line="", config=CONFIG, arguments=()):
        from accelerate.commands.launch import launch_command_parser
        from accelerate.launch.resolve import resolve

        written("c.yaml", config)
        words = [*f"--config_file c.yaml --quiet {line}".split(), *([] if ".py" in line else ["train.py"])]
        return resolve(launch_command_parser().parse_args([*words, *arguments]))

    return run


def test_a_job(sdk, launch):
    runners.run(
        launch(
            "--aws_access_key_id AKID --aws_secret_access_key verysecret", arguments=("--lr", "1e-3", "--x", "True")
        )
    )
    (arguments,), (inputs,) = sdk.calls, sdk.fits
    session = arguments.pop("sagemaker_session").boto_session
    credentials = session.get_credentials()
    assert (credentials.access_key, credentials.secret_key, session.region_name) == ("AKID", "verysecret", "eu-west-1")
    assert inputs is None
    environment = arguments.pop("environment")
    assert environment["ACCELERATE_USE_SAGEMAKER"] == "true" and environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert environment["ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"] == "NO"
    assert environment["ACCELERATE_DYNAMO_BACKEND"] == "NO" and "ACCELERATE_USE_CPU" not in environment
    assert arguments == {
        "image_uri": None,
        "entry_point": "train.py",
        "source_dir": ".",
        "role": "trainer",
        "transformers_version": "4.17.0",
        "pytorch_version": "1.10.2",
        "py_version": "py38",
        "base_job_name": "accelerate-sagemaker-1",
        "instance_count": 1,
        "instance_type": "ml.g5.xlarge",
        "debugger_hook_config": False,
        "distribution": None,
        "hyperparameters": {"lr": 0.001, "x": True},
        "metric_definitions": None,
    }


def test_profile_machines_and_further_arguments(sdk, launch, written, tmp_path):
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = a\naws_secret_access_key = b\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "job.py").touch()
    more = (
        "profile: mine\nnum_machines: 2\nimage_uri: 1.dkr/x\nadditional_args: {volume_size: 9, environment: {A: b}}\n"
    )
    runners.run(launch("src/job.py", CONFIG + more))
    (arguments,) = sdk.calls
    assert arguments["sagemaker_session"].boto_session.profile_name == "mine"
    assert (arguments["instance_count"], arguments["image_uri"], arguments["volume_size"]) == (2, "1.dkr/x", 9)
    assert (arguments["entry_point"], arguments["source_dir"]) == ("job.py", "src")
    assert arguments["environment"]["A"] == "b" and arguments["environment"]["ACCELERATE_USE_SAGEMAKER"] == "true"
    runners.run(launch("--num_machines 3 src/job.py", CONFIG + more))
    assert sdk.calls[1]["instance_count"] == 3


@pytest.mark.parametrize(
    ("kind", "instance", "expected"),
    [
        ("DATA_PARALLEL", "ml.p3.16xlarge", {"smdistributed": {"dataparallel": {"enabled": True}}}),
        (
            "MODEL_PARALLEL",
            "ml.p3.16xlarge",
            {"smdistributed": {"modelparallel": {"enabled": True}}, "mpi": {"enabled": True, "processes_per_host": 8}},
        ),
    ],
)
def test_parallelism(sdk, launch, kind, instance, expected):
    runners.run(launch(config=CONFIG.replace('"NO"', kind).replace("ml.g5.xlarge", instance)))
    assert sdk.calls[0]["distribution"] == expected
    assert sdk.calls[0]["environment"]["ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"] == kind


def test_unknown_machines_need_a_distribution(sdk, launch):
    config = CONFIG.replace('"NO"', "MODEL_PARALLEL")
    with pytest.raises(LaunchError, match="MODEL_PARALLEL on ml.g5.xlarge"):
        runners.run(launch(config=config))
    runners.run(launch(config=config + "additional_args: {distribution: {mpi: {enabled: true}}}\n"))
    assert sdk.calls[0]["distribution"] == {"mpi": {"enabled": True}}


def test_inputs_and_metrics(sdk, launch, written):
    written("in.tsv", "channel_name\tdata_location\ntrain\ts3://b/train\n\ntest\ts3://b/test\n")
    written("metrics.tsv", "metric_name\tmetric_regex\nacc\tacc=(.*?);\n")
    runners.run(launch(config=CONFIG + "sagemaker_inputs_file: in.tsv\nsagemaker_metrics_file: metrics.tsv\n"))
    assert sdk.fits == [{"train": "s3://b/train", "test": "s3://b/test"}]
    assert sdk.calls[0]["metric_definitions"] == [{"Name": "acc", "Regex": "acc=(.*?);"}]


def test_dry_run_starts_nothing_and_hides_secrets(sdk, launch):
    plan = launch(
        "--aws_access_key_id AKID --aws_secret_access_key verysecret",
        arguments=("--hf_token", "alsosecret", "--lr", "1"),
    )
    (process,) = runners.processes(plan)
    text = repr(process)
    assert "secret" not in text and "AKID" not in text and "'lr': 1" in text
    assert process.label == "SageMaker job" and sdk.calls == []


def test_a_job_that_fails(sdk, launch, capsys):
    import sagemaker as package

    sdk.failure = package.exceptions.UnexpectedStatusException("Failed. Reason: out of memory")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        runners.run(launch(config=CONFIG + "debug: false\n"))
    assert runners.failure_of(caught.value)[0] == 1
    assert "out of memory" in capsys.readouterr().err


def test_an_interrupt_says_how_to_end_the_job(sdk, launch, monkeypatch, capsys):
    sdk.failure = KeyboardInterrupt()
    job = types.SimpleNamespace(name="job-1")
    monkeypatch.setattr(sdk.HuggingFace, "latest_training_job", job, raising=False)
    with pytest.raises(KeyboardInterrupt):
        runners.run(launch())
    assert "stop-training-job --training-job-name job-1" in capsys.readouterr().err


def test_a_job_of_a_configuration_object(sdk, place):
    from accelerate.commands.config.config_args import SageMakerConfig
    from accelerate.commands.launch import launch_command_parser, sagemaker_launcher

    common = {"mixed_precision": "bf16", "use_cpu": False, "debug": False}
    job = SageMakerConfig(
        "AMAZON_SAGEMAKER", "NO", **common, ec2_instance_type="ml.g5.xlarge", iam_role_name="trainer"
    )
    line = [
        "--mixed_precision",
        "bf16",
        "--aws_access_key_id",
        "a",
        "--aws_secret_access_key",
        "b",
        "train.py",
        "--lr",
        "1",
    ]
    sagemaker_launcher(job, launch_command_parser().parse_args(line))
    (arguments,) = sdk.calls
    assert arguments["hyperparameters"] == {"lr": 1} and arguments["role"] == "trainer"
    assert arguments["environment"]["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert arguments["sagemaker_session"].boto_session.get_credentials().access_key == "a"


def test_the_sdk_refuses(sdk, launch):
    with pytest.raises(LaunchError, match="The SageMaker SDK refuses this job: no such version"):
        runners.run(launch(config=CONFIG + "py_version: py1\n"))


@pytest.mark.parametrize(
    ("line", "config", "arguments", "fragment"),
    [
        ("-m timeit.py", CONFIG, (), "--module does not go with SageMaker"),
        ("job.sh.py.txt", CONFIG, (), "'job.sh.py.txt' is no Python file"),
        ("", CONFIG, ("--flag",), "'--flag' is no `--name value`"),
        ("", CONFIG, ("--flag", "--lr", "1"), "'--flag' is no"),
        ("", CONFIG, ("word",), "'word' is no"),
        ("", CONFIG.replace("iam_role_name: trainer", ""), (), "lacks iam_role_name"),
        ("", CONFIG + "additional_args: 3\n", (), "additional_args"),
        ("", CONFIG + "sagemaker_inputs_file: none.tsv\n", (), "No such file"),
        ("", CONFIG + "sagemaker_inputs_file: bad.tsv\n", (), "Line 2 of bad.tsv (sagemaker_inputs_file)"),
        ("--aws_access_key_id AKID", CONFIG, (), "--aws_secret_access_key is missing"),
        ("", CONFIG + "profile: nobody\n", (), "no AWS profile 'nobody'"),
        ("--max_restarts 1", CONFIG, (), "--max_restarts"),
    ],
)
def test_refusals(sdk, launch, written, tmp_path, line, config, arguments, fragment):
    written("bad.tsv", "heading\nfoo bar\n")
    (tmp_path / "job.sh.py.txt").touch()
    with pytest.raises(LaunchError) as caught:
        runners.run(launch(line, config, arguments))
    assert fragment in str(caught.value)
    assert sdk.fits == []


def test_no_sdk_and_a_newer_one(launch, fake_package, monkeypatch):
    fake_package("sagemaker", __init__="__version__ = '3.27.0'")
    with pytest.raises(LaunchError, match=r"SDK 3\.27\.0 has no estimators.*sagemaker<3"):
        runners.run(launch())
    monkeypatch.setitem(sys.modules, "sagemaker", None)
    with pytest.raises(ImportError, match="not installed"):
        runners.run(launch())


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (
            ["--a", "1", "--b", "x", "--c", "1.5", "-d", "False", "--e", "-3"],
            {"a": 1, "b": "x", "c": 1.5, "d": False, "e": -3},
        ),
        (["--with-dash=v=w", "--empty", ""], {"with-dash": "v=w", "empty": ""}),
        (["--id", "1_000", "--none", "None"], {"id": "1_000", "none": "None"}),
    ],
)
def test_hyperparameters(words, values):
    assert sagemaker.hyperparameters(words) == values
