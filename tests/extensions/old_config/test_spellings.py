"""What older releases wrote into configuration files."""

import pytest
import yaml

from accelerate.launch import config_file
from accelerate.launch.errors import LaunchError


@pytest.fixture
def read(tmp_path):
    def write_and_read(**content):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
        return config_file.read(tmp_path / "config.yaml")

    return write_and_read


@pytest.mark.parametrize(
    ("content", "values"),
    [
        ({"fp16": True, "distributed_type": "MPS"}, {"mixed_precision": "fp16", "num_processes": 1}),
        ({"dynamo_backend": "AOT_CUDAGRAPHS"}, {"dynamo_backend": "cudagraphs"}),
    ],
)
def test_old_spellings_have_the_values_of_todays(read, content, values):
    settings = read(**content)
    assert settings.unused == ()
    assert {name: settings.values.get(name) for name in values} == values


def test_wrong_value_under_an_old_spelling_is_refused(read):
    with pytest.raises(LaunchError, match="dynamo_backend is 'NVFUSER'; choose one of"):
        read(dynamo_backend="NVFUSER")


def test_keys_that_no_version_reads_have_no_effect(read):
    assert read(ipex_config={"ipex": True}).unused[0].startswith("ipex_config has no effect")
    assert read(downcase_fp16="no", num_processes=2).unused[0].startswith("downcase_fp16 has no effect")
