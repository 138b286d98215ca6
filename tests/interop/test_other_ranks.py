"""A loop is resumed on another number of processes: each row of the epoch is read once, and the losses are those of the run it continues."""

import pytest

from interop.launching import figures, need_peer

pytestmark = pytest.mark.interop
SCRIPT = "other_ranks.py"
SLOW = pytest.mark.slow
ROWS, GLOBAL_BATCH = 40, 8
QUICK = ["ddp+schedule", "fsdp2+sharded"]
ALL = [
    "ddp",
    "ddp+skip",
    "ddp+schedule",
    "fsdp2",
    "fsdp2+sharded",
    "fsdp2+skip",
    "fsdp2+schedule",
    "fsdp1",
    "fsdp1+sharded",
]
HALVED = ["ddp+half", "fsdp2+half"]
LOADERS = [
    "ddp+workers",
    "ddp+dispatch",
    "ddp+stateful",
    "ddp+stateful+dispatch",
    "fsdp2+stateful",
    "fsdp2+dispatch+workers",
]
# Saved after the last step of the first epoch.
ENDS = ["ddp+end", "fsdp2+end", "ddp+stateful+end"]


def runs_of(folder, cases):
    return [f"{case}={folder / case}" for case in cases]


def check_rows(rest, whole):
    """Check that both runs together read each row of the interrupted epoch once, and the next epoch in the same order."""
    for report in (rest, whole):
        assert "error" not in report, report["error"]
    read = whole["rows"][0][: whole["saved_after"] * GLOBAL_BATCH]
    epochs = rest["rows"] if len(rest["rows"]) == 2 else [[], *rest["rows"]]
    assert sorted(read + epochs[0]) == list(range(ROWS))
    assert [read + epochs[0], epochs[1]] == whole["rows"]


def check_continues(rest, whole):
    check_rows(rest, whole)
    begin = whole["saved_after"]
    assert rest["rates"] == whole["rates"][begin:]
    for name in ("losses", "norms"):
        assert rest[name] == pytest.approx(whole[name][begin:], rel=0, abs=1e-6), name


@pytest.mark.parametrize(
    "writers, readers, cases",
    [
        pytest.param(2, 1, QUICK, marks=SLOW),
        *(
            pytest.param(*numbers, [*ALL, *HALVED, *LOADERS, *ENDS], marks=SLOW)
            for numbers in [(2, 1), (1, 2), (4, 2), (2, 4)]
        ),
    ],
)
def test_a_loop_resumes_on_another_number_of_processes(writers, readers, cases, tmp_path):
    whole = figures(SCRIPT, tmp_path / "run", writers, True, *cases)
    rest = figures(SCRIPT, tmp_path / "rest", readers, True, *runs_of(tmp_path / "run", cases))
    for case in cases:
        if case in HALVED:
            check_rows(rest[case], whole[case])
            assert len(rest[case]["losses"]) == 2 * (len(whole[case]["losses"]) - whole[case]["saved_after"])
        else:
            check_continues(rest[case], whole[case])
        assert len(set(whole[case]["rates"])) > 1 or "schedule" not in case


@SLOW
@pytest.mark.parametrize("writers, readers", [(2, 1), (1, 2)])
@pytest.mark.parametrize("writer_is_ours", [False, True])
def test_both_packages_resume_what_either_saved(writer_is_ours, writers, readers, tmp_path):
    """A program that skips batches and calls `set_epoch`, as the peer needs."""
    need_peer()
    (case,) = cases = ["ddp+skip"]
    whole = figures(SCRIPT, tmp_path / "run", writers, writer_is_ours, *cases)
    for reader_is_ours in (True, False):
        rest = figures(
            SCRIPT, tmp_path / str(reader_is_ours), readers, reader_is_ours, *runs_of(tmp_path / "run", cases)
        )
        check_continues(rest[case], whole[case])
