"""The peer's wheel reads the files that `accelerate config` writes, and finds in them what we find."""

import json
import sys

import pytest

from accelerate.commands.config.sagemaker import ask_sagemaker
from accelerate.extensions.configure.cluster import ask_cluster
from accelerate.extensions.configure.config_args import load_config_from_file
from accelerate.launch import hardware
from accelerate.launch.hardware import Hardware
from extensions.configure.conftest import AtRandom
from interop.launching import finished, need_peer, on_peer

pytestmark = pytest.mark.interop
READER = """
import json, sys
from accelerate.commands.config.config_args import load_config_from_file
found = {}
for path in sys.argv[1:]:
    try:
        found[path] = load_config_from_file(path).to_dict()
    except Exception as error:
        found[path] = str(error)
print(json.dumps(found))
"""


def read_by(variables, paths):
    return json.loads(finished([sys.executable, "-c", READER, *paths], **variables).stdout.splitlines()[-1])


def test_the_peer_reads_what_we_write(tmp_path, monkeypatch):
    need_peer()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text("{}")
    paths = []
    for seed in range(120):
        machine = Hardware("cuda", 4) if seed % 2 else Hardware("cpu", 0)
        monkeypatch.setattr(hardware, "detect", lambda environ, machine=machine: machine)
        config = ask_cluster(AtRandom(seed, "a.json"))
        paths.append(str(config.save(tmp_path / f"{seed}.{'json' if seed % 5 == 0 else 'yaml'}")))
    for seed in range(20):
        config = ask_sagemaker(AtRandom(seed, "a.json"))
        if config.to_dict()["distributed_type"] != "NO":  # with which the peer refuses its own files
            paths.append(str(config.save(tmp_path / f"sagemaker{seed}.yaml")))
    kinds = {load_config_from_file(path).to_dict()["distributed_type"] for path in paths}
    assert kinds >= {"NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED", "XLA", "DATA_PARALLEL"}
    theirs, ours = read_by(on_peer(), paths), read_by({}, paths)
    for path in paths:
        assert theirs[path] == ours[path], path
