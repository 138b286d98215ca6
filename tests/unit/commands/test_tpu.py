"""The command for TPU pods, printed and not run."""


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
