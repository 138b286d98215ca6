"""Which variables may leave this machine."""

from accelerate.extensions.machines import launchers


def test_variables_that_stay_here():
    given = ("RANK", "WORLD_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "A")
    assert launchers.without_ranks(dict.fromkeys(given, "0")) == {"A": "0"}
    assert launchers.handed_on({"HOME": "/root", "HF_TOKEN": "x", "BASH_FUNC_f%%": "y"}) == ["HF_TOKEN"]
    assert launchers.may_be_shown("LANG", "C") and not launchers.may_be_shown("http_proxy", "http://me:pw@proxy")
