"""The command for TPU pods, printed, or run by a gcloud that records it."""

import shlex

import pytest

from cases import cases


@pytest.fixture
def gcloud(place, programs):
    """A gcloud that records its calls, and configuration files that name the pod."""
    programs.add("gcloud")
    (place / "c.yaml").write_text("tpu_name: n\ntpu_zone: z\n")
    (place / "commands.yaml").write_text("tpu_name: n\ntpu_zone: z\ncommands: [one, two]")
    (place / "c.txt").write_text("# first\necho one\n\n  echo two\n")
    return programs


@cases(
    "line, remote",
    ("--config_file c.yaml --command ls --command 'echo a' 'echo b'", "ls; echo a; echo b"),
    ("--config_file c.yaml --command 'echo $(id)'", "echo $(id)"),
    ("--config_file c.yaml --install_accelerate --accelerate_version 0.12.0 --command ls", "pip install accelerate==0.12.0; ls"),
    ("--config_file c.yaml --command_file c.txt", "echo one; echo two"),
    ("--config_file commands.yaml", "one; two"),
    ("--tpu_name n --tpu_zone z --command ls", "ls"),
)  # fmt: skip
def test_gcloud_gets_one_argument_for_all_commands(accelerate, gcloud, line, remote):
    status, out, _ = accelerate("tpu-config", *shlex.split(line))
    assert status == 0 and "ran on all machines" in out
    before = ["compute", "tpus", "tpu-vm", "ssh", "n", "--zone", "z", "--command"]
    (call,) = gcloud.calls()
    assert call["arguments"] == [*before, f"cd /usr/share; {remote}", "--worker", "all"]


def test_status_of_gcloud_is_kept(accelerate, gcloud, monkeypatch):
    monkeypatch.setenv("FAKE_STATUS", "7")
    status, out, err = accelerate("tpu-config", "--config_file", "c.yaml", "--command", "x")
    assert (status, out) == (7, "") and "gcloud ended with status 7" in err and "Traceback" not in err


def test_debug_runs_nothing_and_needs_no_gcloud(accelerate, gcloud, monkeypatch):
    monkeypatch.setenv("PATH", "")
    words = ("tpu-config", "--config_file", "c.yaml", "--command", "echo a", "--use_alpha")
    status, out, _ = accelerate(*words, "--debug")
    told = accelerate(
        "tpu-config", "--config_file", "c.yaml", "--command", "export WANDB_API_KEY=hunter2; ls", "--debug"
    )[1]
    assert "export WANDB_API_KEY=(hidden)" in told and "hunter2" not in told
    wanted = "gcloud alpha compute tpus tpu-vm ssh n --zone z --command 'cd /usr/share; echo a'"
    assert status == 0 and wanted in out and not gcloud.calls()
    status, _, err = accelerate(*words)
    assert status == 2 and "gcloud is not on the PATH" in err


@cases(
    "line, fragment",
    ("--command x", "Which pod?"),
    ("--config_file c.yaml", "Nothing to run."),
    ("--config_file c.yaml --install_accelerate --accelerate_version '1; rm -rf /'", "is '1; rm -rf /'"),
    ("--config_file c.yaml --command_file none.txt", "'none.txt' cannot be read"),
    ("--config_file none.yaml --command ls", "there is no such file"),
)
def test_bad_input(refused, gcloud, line, fragment):
    assert fragment in refused("tpu-config", *shlex.split(line)) and not gcloud.calls()
