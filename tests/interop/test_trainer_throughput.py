"""What one sees of a Trainer's run: its throughput in its logs, and the user's own code in the report of a hang; and what `make demo` shows of a kill."""

import re
import sys

import pytest

from interop.launching import ROOT, SCRIPTS, finished, need, starter

pytestmark = pytest.mark.interop
PARTS = ("data", "forward", "backward", "communication", "optimizer", "checkpoint", "rest")
WAITS = {"ACCELERATE_HANG_REPORT_AFTER": "2", "ACCELERATE_HANG_ABORT_AFTER": "4"}
HUNG = 79


@pytest.fixture(autouse=True)
def libraries():
    need("transformers")


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_throughput_is_in_the_logs_of_a_trainer(processes, run_ours):
    found = run_ours("trainer_throughput.py", processes)
    assert len(found["entries"]) == 4 and len(found["seen"]) == 8  # of the first training, and of both
    for entry, names in zip(found["entries"], found["seen"], strict=False):
        values = {name.partition("/")[2]: number for name, number in entry.items() if name.startswith("throughput/")}
        assert set(values) <= {name.partition("/")[2] for name in names}  # what trackers are given
        shares = [values[f"share_{part}"] for part in PARTS]
        assert sum(shares) == pytest.approx(1) and all(0 <= share < 1 for share in shares)
        assert all(values[f"share_{part}"] > 0 for part in ("data", "forward", "backward", "optimizer"))
        assert 0 < values["step_seconds"] < found["seconds"]
        for unit, number in found["units"].items():  # each rank's own batches, all together
            assert values[f"{unit}_per_second"] == pytest.approx(processes * number / values["step_seconds"], rel=0.2)
        # Forward and backward take six operations for each weight and token, at least.
        assert values["flops_per_second"] > 6 * 25_000 * values["tokens_per_second"]
        assert values["mfu"] == pytest.approx(values["flops_per_second"] / processes / 1e12)
        assert processes == 1 or values["step_seconds"] > found["slow_step"]
    named = {entry["throughput/slowest_rank"] for entry in found["entries"]}
    assert named == {-1} if processes == 1 else 1 in named, named
    assert not any(name.startswith("throughput/") for entry in found["others"] for name in entry)
    assert found["left"] == []
    # Once it has trained on several ranks, a Trainer keeps a model that its Accelerator has released.
    assert ("throughput/mfu" in found["again"]) == (processes == 1) and len(found["told"]) == processes - 1


@pytest.mark.parametrize("who", [pytest.param(who, marks=pytest.mark.slow) for who in ("collator", "callback")])
def test_a_hang_report_names_the_users_code(who, tmp_path):
    script = SCRIPTS / "trainer_hangs.py"
    ended = finished([*starter(2, ours=True), str(script), str(tmp_path), who], HUNG, **WAITS)
    lines = script.read_text("utf-8").splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.endswith(f"# rank 1, {who}"))
    name = {"collator": "__call__", "callback": "on_step_end"}[who]
    report = re.search(r"^Slow: rank 0 has waited for \d+ s in .* for rank 1\.\n(.*)\n", ended.stderr, re.M)
    assert report is not None, ended.stderr
    assert re.search(rf"rank 1 has stood still for \d+ s at .*trainer_hangs\.py:{number} in {name}", report[1]), (
        report[0]
    )


@pytest.mark.slow  # `make demo` runs it
def test_the_demo_of_a_kill_in_a_save():
    shown = finished([sys.executable, str(ROOT / "examples" / "trainer_killed.py")]).stdout
    assert "transformers as it is : does not continue (FileNotFoundError)\n" in shown
    assert "transformers patched  : continues after step 2, the same losses\n" in shown
