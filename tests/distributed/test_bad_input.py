"""Bad input is a clear error on every rank, without a hang, and the exit code says so."""

CASES = {
    "no_process_group": ("RuntimeError", "process group", "Accelerator()"),
    "prepare_nothing": ("ValueError", "no objects"),
    "prepare_string": ("TypeError", "'model'"),
    "unknown_precision": ("ValueError", "fp17", "bf16"),
    "float16_weights": ("ValueError", "weight", "bf16"),
    "loader_without_length": ("TypeError",),
    "loss_as_number": ("TypeError", "loss.item()"),
}


def test_every_rank_says_what_is_wrong(launch):
    lines = launch("fail.py", succeeds=False, cpu=True).stdout.splitlines()
    for rank in (0, 1):
        said = {case: line for case in CASES for line in lines if f"rank {rank}: {case}: " in line}
        assert said.keys() == CASES.keys(), lines
        for case, fragments in CASES.items():
            assert all(fragment in said[case] for fragment in fragments), (fragments, said[case])


def test_script_that_is_not_there(launch):
    done = launch("no_such_script.py", succeeds=False)
    assert "no_such_script.py" in done.stderr + done.stdout
