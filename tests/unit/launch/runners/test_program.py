"""What may leave this machine, and what stays."""

from accelerate.launch.runners import program


def test_variables_of_this_machine_stay():
    given = {
        "PATH": "/bin",
        "HOME": "/root",
        "SSH_AUTH_SOCK": "x",
        "OMPI_MCA_btl": "tcp",
        "BASH_FUNC_a%%": "x",
        "A-B": "1",
    }
    assert program.handed_on(given) == ["PATH"]


def test_ranks_of_another_launcher_are_dropped():
    given = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "PMI_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "x",
        "A": "1",
    }
    assert program.own(given) == {"A": "1"}


def test_secrets_and_logins_are_not_shown():
    shown = {"A": "http://proxy:80", "B": "http://me:pw@proxy", "HF_TOKEN": "x", "TOKENIZERS_PARALLELISM": "true"}
    assert [name for name, value in shown.items() if program.may_be_shown(name, value)] == [
        "A",
        "TOKENIZERS_PARALLELISM",
    ]
