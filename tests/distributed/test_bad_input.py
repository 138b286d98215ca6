"""Bad input is a clear error on every rank, without a hang, and the exit code says so."""

import pytest

CASES = {
    "gather_shapes": ("DistributedOperationException", "[2, 3]", "[3, 3]"),
    "gather_dimensions": ("DistributedOperationException",),
    "gather_dtypes": ("DistributedOperationException", "float64"),
    "no_process_group": ("RuntimeError", "process group", "Accelerator()"),
    "prepare_nothing": ("ValueError", "no objects"),
    "prepare_string": ("TypeError", "'model'"),
    "unknown_precision": ("ValueError", "fp17", "bf16"),
    "float16_weights": ("ValueError", "weight", "bf16"),
    "loader_without_length": ("TypeError",),
    "loss_as_number": ("TypeError", "loss.item()"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_says_what_is_wrong(launch, case):
    done = launch("fail.py", case, succeeds=False, cpu=True)
    output = done.stdout + done.stderr
    for rank in (0, 1):
        lines = [line for line in output.splitlines() if f"rank {rank}: " in line]
        assert lines, output
        for fragment in CASES[case]:
            assert fragment in output, (fragment, output)
        assert "no error" not in lines[0]


def test_script_that_is_not_there(launch):
    done = launch("no_such_script.py", succeeds=False)
    assert "no_such_script.py" in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("variables", "fragment"),
    [
        ({"WORLD_SIZE": "two", "RANK": "0"}, "two"),
        ({"WORLD_SIZE": "2", "RANK": "5"}, "5"),
        ({"WORLD_SIZE": "2"}, "RANK"),
    ],
)
def test_contradicting_world_size_variables(variables, fragment, run_python):
    done = run_python("from accelerate import PartialState; PartialState(cpu=True)", variables)
    assert done.returncode != 0
    assert "ValueError" in done.stderr and fragment in done.stderr, done.stderr
