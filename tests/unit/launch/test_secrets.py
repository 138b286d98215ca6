"""What is hidden before it is printed."""

import pytest

from accelerate.extensions.dry_run.text import show
from accelerate.launch.resolve import resolve
from accelerate.launch.secrets import is_secret, masked
from cases import cases

SECRET = "HF_TOKEN hf-token hfToken WANDB_API_KEY WANDB_APIKEY aws_secret_access_key AccessKey aws_access_key_id DB_PASSWORD1 PASSPHRASE"
SECRET += " SLURM_CREDENTIALS TORCH_SECRET_NAME private-key KEY AccountKey AZURE_STORAGE_ACCOUNTKEY auth http-auth pat GITHUB_PAT"
SECRET += " DB_PWD sig X-Amz-Signature Authorization storageKey"
HARMLESS = "PWD OLDPWD PATH SSH_AUTH_SOCK XAUTHORITY author pattern signal MONKEY KEYBOARD TOKENIZERS_PARALLELISM max_new_tokens GOOGLE_APPLICATION_CREDENTIALS"


@pytest.mark.parametrize("name", [*SECRET.split(), *HARMLESS.split(), ""])
def test_names(name):
    secret = name in SECRET.split()
    assert is_secret(name) is secret
    assert masked("hunter2", name) == ("(hidden)" if secret else "hunter2")


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
    ("['x', '--use_token', '--lr', '1']", "['x', '--use_token', '--lr', '1']"),
    ("['x', '--hub_token', 'hunter2']", "['x', '--hub_token', (hidden)"),
    (
        "Protocol=https;AccountName=n;AccountKey=hunter2==;EndpointSuffix=x",
        "Protocol=https;AccountName=n;AccountKey=(hidden)",
    ),
    ("login --auth hunter2", "login --auth (hidden)"),
    ("login --pat=hunter2", "login --pat=(hidden)"),
    ("az copy https://n.blob.net/c?sv=2024&sig=hunter2", "az copy https://n.blob.net/c?sv=2024&sig=(hidden)"),
    ("s3?X-Amz-Signature=hunter2", "s3?X-Amz-Signature=(hidden)"),
    ("curl -H 'Authorization: Basic hunter2'", "curl -H 'Authorization: (hidden)"),
    (f"login hf_{'aB3' * 10}, then", "login (hidden), then"),
    (f"a ghp_{'aB3' * 10} b sk-{'a1' * 10} c AKIA{'A1' * 8} d", "a (hidden) b (hidden) c (hidden) d"),
    (f"curl -H Bearer {'a.1' * 8}", "curl -H Bearer (hidden)"),
    ("--hf_transfer --hf_datasets_cache x", "--hf_transfer --hf_datasets_cache x"),
    ("use_token: true", "use_token: true"),
)
def test_secrets_within_a_text(text, left):
    assert masked(text) == left
    assert masked({"outer": [text]}) == {"outer": [left]}


def test_arguments_are_quoted_and_secrets_hidden(parse, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    args = parse("--cpu --num_processes 2 train.py")
    args.training_script_args = ["a b", "$HOME", "--hub_token", "hf_very_secret", "--password=hf_very_secret"]
    args.training_script_args += ["--use_token", "--lr", "1", "HF_TOKEN=hf_very_secret"]
    told = show(resolve(args), {})
    assert (
        "train.py 'a b' '$HOME' --hub_token '(hidden)' '--password=(hidden)' --use_token --lr 1 'HF_TOKEN=(hidden)'"
        in told
    )
    assert "hf_very_secret" not in told and "HF_TOKEN='(hidden)'" in told


def test_secrets_within_settings_are_hidden_and_switches_with_such_names_are_not(plan, place):
    (place / "c.yaml").write_text(
        "distributed_type: 'NO'\ntpu_env: [HF_TOKEN=hunter2, A=1]\ncommands: ['git clone https://me:hunter2@host/x']\n"
    )
    text = show(plan("--cpu --config_file c.yaml", {}), {})
    assert "hunter" not in text and "['HF_TOKEN=(hidden)', 'A=1']" in text
    text = show(plan("--dry_run --use_megatron_lm --megatron_lm_calculate_per_token_loss true", {}), {})
    assert "  MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS=true" in text
