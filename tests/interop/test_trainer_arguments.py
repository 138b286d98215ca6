"""The Trainer's arguments for FSDP and DeepSpeed: the losses of plain data parallelism and of the peer, and a resume on other ranks."""

import pytest

from interop.launching import figures, need, need_peer

pytestmark = pytest.mark.interop
SCRIPT = "trainer_arguments.py"
SLOW = pytest.mark.slow
STEPS, SAVED_AT, ROWS = 6, 4, 40
FSDP = ["fsdp2", "fsdp2+sharded", "fsdp1", "fsdp1+sharded"]
MORE_FSDP = ["fsdp2+recompute", "fsdp1+recompute", "fsdp2+offload", "fsdp1+offload"]
# The arguments as transformers 5.24 documents them.
MODERN = [
    "fsdp",
    "fsdp+sharded",
    "fsdp+unsharded",
    "fsdp+recompute+offload",
    "fsdp+efficient",
    "fsdp+sized",
    "fsdp+whole",
]
LOADERS = ["ddp", "ddp+dispatch", "ddp+split", "ddp+workers", "ddp+dispatch+workers+split"]
ZERO = ["zero1", "zero2", "zero3", "zero2+offload", "zero3+offload"]
# The Trainer's log rounds nothing; sums of ranks differ in their last bits.
NEAR = {"abs": 2e-6, "rel": 0}


def check_equal(report, expected, begin=0):
    """Check that a run has the rows, losses and norms of another one, from a step on."""
    assert "error" not in report, report["trace"]
    assert report["rows"] == expected["rows"][begin:] and len(report["losses"]) == STEPS
    for name in ("losses", "norms"):
        assert report[name] == pytest.approx(expected[name], **NEAR), name


def resumed(folder, processes, runs):
    """Resume runs on this package; `runs` has the folder of a run for each case."""
    return figures(SCRIPT, folder, processes, True, *(f"{case}={run}" for case, run in runs.items()))


def check_strategies(folder, cases, kind):
    """Train by each strategy as by DDP, then resume each, bit for bit."""
    reports = figures(SCRIPT, folder / "run", 2, True, "ddp", *cases)
    plain = reports["ddp"]
    assert sorted(sum(plain["rows"][:5], [])) == list(range(ROWS)), "an epoch has each row once"
    rest = resumed(folder / "resumed", 2, {case: folder / "run" / case for case in cases})
    for case in cases:
        check_equal(reports[case], plain)
        check_equal(rest[case], reports[case], SAVED_AT)
        assert reports[case]["strategy"] == kind
        assert rest[case]["exact"] == [losses[-2:] for losses in reports[case]["exact"]]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(["fsdp2+sharded"], marks=SLOW),
        pytest.param([*FSDP, *MORE_FSDP], marks=SLOW),
        pytest.param(MODERN, marks=SLOW),
    ],
)
def test_fsdp_arguments_train_as_ddp_and_resume(cases, tmp_path):
    need("transformers")
    check_strategies(tmp_path, cases, "FSDP")


@SLOW
def test_deepspeed_arguments_train_as_ddp_and_resume(tmp_path):
    need("transformers", "deepspeed")
    check_strategies(tmp_path, ZERO, "DEEPSPEED")


@SLOW
def test_losses_equal_the_peers(tmp_path):
    """On the CPU the peer trains by DDP whatever `fsdp` says, and refuses version 1."""
    need("transformers")
    need_peer()
    cases = [
        *LOADERS,
        "ddp+accumulate",
        "ddp+bf16",
        "fsdp",
        "fsdp2",
        "fsdp2+sharded",
        "fsdp2+recompute",
        "fsdp2+offload",
    ]
    ours = figures(SCRIPT, tmp_path / "ours", 2, True, *cases, "fsdp1")
    peers = figures(SCRIPT, tmp_path / "peer", 2, False, *cases, "fsdp1")
    for case in cases:
        check_equal(ours[case], peers[case])
        assert ours[case]["exact"] == peers[case]["exact"], case
    assert {peers[case]["strategy"] for case in cases} == {"MULTI_CPU"} and ours["fsdp2"]["strategy"] == "FSDP"
    assert peers["fsdp1"]["error"].startswith("RuntimeError: There are currently no available devices")


@SLOW
@pytest.mark.parametrize("writers, readers", [(2, 1), (1, 2)])
@pytest.mark.parametrize("writer_is_ours, reader_is_ours", [(True, True), (True, False), (False, True)])
def test_ddp_resumes_on_another_number_of_processes(writers, readers, writer_is_ours, reader_is_ours, tmp_path):
    need("transformers")
    need_peer()
    whole = figures(SCRIPT, tmp_path / "run", writers, writer_is_ours, *LOADERS)
    runs = [f"{case}={tmp_path / 'run' / case}" for case in LOADERS]
    rest = figures(SCRIPT, tmp_path / "resumed", readers, reader_is_ours, *runs)
    for case in LOADERS:
        if not reader_is_ours and readers == 2 and case == "ddp+dispatch":
            # The peer's dispatching loader skips one batch for each step, of which a step of two ranks has two.
            assert rest[case]["rows"][0] == whole[case]["rows"][SAVED_AT // 2]
        else:
            check_equal(rest[case], whole[case], SAVED_AT)


@SLOW
@pytest.mark.parametrize("writers, readers", [(2, 4), (4, 2)])
def test_fsdp_resumes_on_another_number_of_processes(writers, readers, tmp_path):
    need("transformers")
    whole = figures(SCRIPT, tmp_path / "run", writers, True, *FSDP)
    rest = resumed(tmp_path / "resumed", readers, {case: tmp_path / "run" / case for case in FSDP})
    for case in FSDP:
        check_equal(rest[case], whole[case], SAVED_AT)


@SLOW
def test_one_process_resumes_what_two_have_sharded_and_the_other_way(tmp_path):
    """The Trainer refuses `fsdp` in one process on the CPU; with `transformers_patch` DDP resumes from FSDP, and FSDP from DDP."""
    need("transformers")
    refused = figures(SCRIPT, tmp_path / "refused", 1, True, "fsdp2")["fsdp2"]
    assert refused["error"] == "ValueError: Using fsdp only works in distributed training."
    cases = [f"{case}+apply" for case in FSDP]
    whole = figures(SCRIPT, tmp_path / "two", 2, True, *cases)
    for case in cases:
        rest = resumed(tmp_path / f"one-{case}", 1, {"ddp+apply": tmp_path / "two" / case})
        check_equal(rest["ddp+apply"], whole[case], SAVED_AT)
    alone = figures(SCRIPT, tmp_path / "one", 1, True, "ddp+apply")["ddp+apply"]
    rest = resumed(tmp_path / "again", 2, dict.fromkeys(cases, tmp_path / "one" / "ddp+apply"))
    for case in cases:
        check_equal(rest[case], alone, SAVED_AT)


@SLOW
def test_deepspeed_resumes_on_one_process_with_the_patch_alone(tmp_path):
    need("transformers", "deepspeed")
    cases = ["zero1", "zero2", "zero3"]
    whole = figures(SCRIPT, tmp_path / "two", 2, True, *cases, *(f"{case}+apply" for case in cases))
    stock = resumed(tmp_path / "stock", 1, {case: tmp_path / "two" / case for case in cases})
    patched = resumed(tmp_path / "patched", 1, {f"{case}+apply": tmp_path / "two" / f"{case}+apply" for case in cases})
    for case in cases:
        assert "used a DP world size of 2 but the current world size is 1" in stock[case]["error"], case
        check_equal(patched[f"{case}+apply"], whole[f"{case}+apply"], SAVED_AT)
