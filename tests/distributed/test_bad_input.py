"""Bad input is a clear error on every rank, without a hang, and the exit code says so."""


def test_every_rank_says_what_is_wrong(launch):
    lines = launch("fail.py", succeeds=False, cpu=True).stdout.splitlines()
    assert {"rank 0: all cases", "rank 1: all cases"} <= set(lines), lines


def test_script_that_is_not_there(launch):
    done = launch("no_such_script.py", succeeds=False)
    assert "no_such_script.py" in done.stderr + done.stdout
