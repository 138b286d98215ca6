"""The self check is launched as a user's script is, by a launch that cleans up after itself."""

import subprocess

import pytest

from accelerate.launch import runners

SCRIPT = "accelerate.test_utils.scripts.test_script"


@pytest.mark.parametrize("status", [0, 3, -15, None], ids=str)
def test_status_is_kept(accelerate, place, monkeypatch, status):
    """With None, the check is interrupted."""
    (place / "c.yaml").write_text("distributed_type: NO\nuse_cpu: true\n")
    plans = []

    def run(plan, replace):
        plans.append((plan.script, plan["module"], replace))
        if status is None:
            raise KeyboardInterrupt
        if status:
            raise subprocess.CalledProcessError(status, ["x"])

    monkeypatch.setattr(runners, "run", run)
    got, out, err = accelerate("test", "--config_file", "c.yaml")
    assert plans == [(SCRIPT, True, False)], "nothing takes the place of the process that reports the outcome"
    assert got == {-15: 143, None: 130}.get(status, status)
    assert f"accelerate launch --config_file c.yaml --module {SCRIPT}" in out
    assert ("passed" in out) is (status == 0)
    assert ("The self check failed" in err) is (status != 0)
