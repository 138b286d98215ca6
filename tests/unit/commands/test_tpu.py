"""The command for TPU pods, printed, or run by a gcloud that records it."""

import json
import os
import sys

import pytest


def test_command(accelerate):
    status, out, _ = accelerate(
        "tpu-config", "--debug", "--tpu_name", "n", "--tpu_zone", "z", "--command", "echo a", "--install_accelerate"
    )
    assert status == 0
    wanted = "gcloud compute tpus tpu-vm ssh n --zone z --command 'cd /usr/share; pip install accelerate -U; echo a'"
    assert wanted in out


def test_configuration_names_the_pod(accelerate, place):
    (place / "c.yaml").write_text("tpu_name: n\ntpu_zone: z\ncommands: [one, two]")
    out = accelerate("tpu-config", "--debug", "--config_file", "c.yaml", "--use_alpha")[1]
    assert "gcloud alpha compute" in out
    assert "one; two" in out
    (place / "c.txt").write_text("three\n\n")
    assert "; three'" in accelerate("tpu-config", "--debug", "--config_file", "c.yaml", "--command_file", "c.txt")[1]


def test_what_is_missing_is_said(accelerate):
    assert "Which pod?" in accelerate("tpu-config", "--command", "x")[2]
    assert "What shall run?" in accelerate("tpu-config", "--tpu_name", "n", "--tpu_zone", "z")[2]
    words = ("tpu-config", "--tpu_name", "n", "--tpu_zone", "z", "--install_accelerate", "--accelerate_version", "dev")
    assert "--accelerate_version dev" in accelerate(*words)[2]


@pytest.fixture
def gcloud(place, monkeypatch):
    """A gcloud that writes its arguments into a file."""
    if os.name != "posix":
        pytest.skip("the fake program is a script with a #! line")
    program = place / "bin" / "gcloud"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\njson.dump(sys.argv[1:], open('calls', 'w'))\nsys.exit(int(os.environ.get('FAKE_STATUS', 0)))\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    (place / "c.yaml").write_text("tpu_name: n\ntpu_zone: z\n")
    return lambda: json.loads((place / "calls").read_text())


def test_gcloud_gets_one_argument_for_all_commands(accelerate, gcloud):
    status, out, _ = accelerate(
        "tpu-config", "--config_file", "c.yaml", "--command", "echo 'a b' $(id)", "--use_alpha"
    )
    assert status == 0 and "ran on all machines" in out
    expected = ["alpha", "compute", "tpus", "tpu-vm", "ssh", "n", "--zone", "z", "--command"]
    assert gcloud() == [*expected, "cd /usr/share; echo 'a b' $(id)", "--worker", "all"]


def test_status_of_gcloud_is_kept(accelerate, gcloud, monkeypatch):
    monkeypatch.setenv("FAKE_STATUS", "7")
    status, out, err = accelerate("tpu-config", "--config_file", "c.yaml", "--command", "x")
    assert (status, out) == (7, "") and "gcloud ended with status 7" in err and "Traceback" not in err


def test_debug_runs_nothing_and_needs_no_gcloud(accelerate, gcloud, place, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert accelerate("tpu-config", "--config_file", "c.yaml", "--command", "x", "--debug")[0] == 0
    assert not (place / "calls").exists()
    status, _, err = accelerate("tpu-config", "--config_file", "c.yaml", "--command", "x")
    assert status == 2 and "gcloud is not on the PATH" in err


@pytest.mark.parametrize(
    ("words", "remote"),
    [
        (["--command", "ls", "--command", "echo a", "echo b"], "ls; echo a; echo b"),
        (["--command", "echo", "a"], "echo a"),
        (["--install_accelerate"], "pip install accelerate -U"),
        (
            ["--install_accelerate", "--accelerate_version", "0.12.0", "--command", "ls"],
            "pip install accelerate==0.12.0; ls",
        ),
        (["--command_file", "c.txt"], "echo one; echo two"),
    ],
)
def test_commands(accelerate, gcloud, place, words, remote):
    (place / "c.txt").write_text("# first\necho one\n\n  echo two\n")
    assert accelerate("tpu-config", "--config_file", "c.yaml", *words)[0] == 0
    assert gcloud()[-3] == f"cd /usr/share; {remote}"


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["--install_accelerate", "--accelerate_version", "1; rm -rf /"], "--accelerate_version is '1; rm -rf /'"),
        (["--command_file", "none.txt"], "'none.txt' cannot be read"),
        (["--command_file", "."], "'.' cannot be read"),
        (["--tpu_name=--flags-file=x", "--command", "ls"], "is no name of a TPU"),
        (["--config_file", "none.yaml", "--command", "ls"], "there is no such file"),
    ],
)
def test_bad_input(accelerate, gcloud, place, words, fragment):
    given = [] if "--config_file" in words else ["--config_file", "c.yaml"]
    status, _, err = accelerate("tpu-config", *given, *words)
    assert status == 2 and fragment in err and "Traceback" not in err
    assert not (place / "calls").exists()
