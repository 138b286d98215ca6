"""What people do with shards, for twenty steps: on one process, two and four, and from each other's checkpoints, as plain torch does it."""

import re

import pytest

# Those that need no library, and take the fewest seconds; all of them are in the slow test.
QUICK = ("conditional, FSDP2", "Muon")
ALL = (
    *("conditional, DDP", "LoRA, FSDP2", "LoRA, tensor parallelism", "8-bit AdamW", "module_precision"),
    *("packed rows, context parallelism", "packed rows, sequence parallelism", "TokenBudgetSampler"),
    *("EMA", "contrastive loss"),
    *QUICK,
)
SCRIPT = "twenty_steps.py"


def passed(done, phase):
    return set(re.findall(rf"^(?:ok {phase}|omitted) (.*):", done.stdout, re.MULTILINE))


def test_two_processes_and_one_that_goes_on(launch, tmp_path):
    done = launch(SCRIPT, str(tmp_path), "train", "2", *QUICK, cpu=True)
    assert passed(done, "train") == set(QUICK)
    done = launch(SCRIPT, str(tmp_path), "resume", "2", *QUICK, processes=1, cpu=True)
    assert passed(done, "resume") == set(QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("others", [1, 4])
def test_all_on_two_processes_and_others_and_from_each_to_the_others(launch, tmp_path, others):
    for processes, phases, source in ((2, "train", 2), (others, "train,resume", 2), (2, "resume", others)):
        done = launch(SCRIPT, str(tmp_path), phases, str(source), processes=processes, cpu=True)
        for phase in phases.split(","):
            assert passed(done, phase) == set(ALL), (processes, phase)
