"""What is hidden before it is printed."""

import pytest

from accelerate.launch.secrets import command, is_secret, masked
from cases import cases

SECRET = "HF_TOKEN hf-token hfToken WANDB_API_KEY WANDB_APIKEY aws_secret_access_key AccessKey aws_access_key_id DB_PASSWORD1 PASSPHRASE"
SECRET += " SLURM_CREDENTIALS TORCH_SECRET_NAME private-key KEY"
HARMLESS = "MONKEY KEYBOARD TOKENIZERS_PARALLELISM max_new_tokens GOOGLE_APPLICATION_CREDENTIALS"


@pytest.mark.parametrize("name", [*SECRET.split(), *HARMLESS.split(), ""])
def test_names(name):
    secret = name in SECRET.split()
    assert is_secret(name) is secret
    assert masked("hunter2", name) == ("(hidden)" if secret else "hunter2")


def test_truths_are_no_secrets():
    assert masked(True, "megatron_lm_calculate_per_token_loss") is True
    assert masked("true", "megatron_lm_calculate_per_token_loss") == "true"
    assert masked(None, "token") is None
    assert masked(12345, "api_key") == "(hidden)"


@cases(
    "text, left",
    ("HF_TOKEN=hunter2 hunter3", "HF_TOKEN=(hidden)"),
    ("export A=1 WANDB_API_KEY='hunter2'; ls", "export A=1 WANDB_API_KEY=(hidden)"),
    ("HF_TOKEN is 'hunter2'; no", "HF_TOKEN is '(hidden)"),
    ("{'token': 'hunter2'}", "{'token': (hidden)"),
    ("huggingface-cli login --token hunter2", "huggingface-cli login --token (hidden)"),
    ("first\ntoken: hunter2\nhunter3", "first\ntoken: (hidden)"),
    ("git clone https://me:hunter2@host/x", "git clone https://(hidden)@host/x"),
    ("The file has unknown keys: a, b.", "The file has unknown keys: a, b."),
    ("hyperparameters={'token': '(hidden)', 'lr': 1}", "hyperparameters={'token': '(hidden)', 'lr': 1}"),
    ("--use_token --lr 1", "--use_token --lr 1"),
    ("use_token: true", "use_token: true"),
)
def test_secrets_within_a_text(text, left):
    assert masked(text) == left
    assert masked({"outer": [text]}) == {"outer": [left]}


def test_command_lines():
    printed = command(
        ["train.py", "--hub_token", "hunter2", "--password=hunter2", "--use_token", "--lr", "1", "HF_TOKEN=hunter2"]
    )
    assert "hunter" not in " ".join(printed)
    assert (printed[0], printed[4:7]) == ("train.py", ["--use_token", "--lr", "1"])
