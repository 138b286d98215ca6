"""What ranks have left, on one machine and on several that share a folder, some of it damaged."""

import json
import os
import subprocess
import sys

import pytest

from accelerate.runtime import failure

pytestmark = pytest.mark.cold


@pytest.fixture
def leave(place):
    """Write what a rank leaves: error, stacks and report, in a folder as torch's launcher names them."""
    clock = iter(range(1, 1000))

    def write(run, attempt, rank, traceback=None, **files):
        folder = place / "logs" / run / f"attempt_{attempt}" / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        if traceback is not None:
            files["error"] = json.dumps({"message": {}, failure.OURS: {"traceback": traceback, "status": 1}})
        names = {"error": "error.json", "stacks": failure.STACKS, "hang": failure.HANG}
        for name, text in files.items():
            path = folder / names[name]
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
            os.utime(path, (next(clock),) * 2)
        return folder

    return write


TORN = [b'{"message": {"mess', b"", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000]
TORN += [b'{"accelerate": 7}', b'{"accelerate": [1]}']


@pytest.mark.parametrize("torn", TORN, ids=lambda text: repr(text[:20]))
def test_one_torn_record_leaves_the_others(accelerate, leave, torn):
    leave("accelerate-7_abcdefgh", 0, 0, error=torn, stacks="stack of 0")
    leave("accelerate-7_abcdefgh", 0, 1, traceback="ValueError: one")
    (leave("accelerate-7_abcdefgh", 0, 2, traceback="ValueError: two") / failure.STACKS).mkdir()
    status, out, err = accelerate("diagnose", "logs")
    assert (status, err) == (0, "")
    assert "-- local rank 1\nValueError: one" in out and "ValueError: two" in out and "stack of 0" in out
    assert ("-- local rank 0\nerror.json is damaged" in out) is (torn not in (b"",)), out
    assert "-- local rank 2\nstacks.txt cannot be read: Is a directory" in out


def test_the_last_attempt_of_every_machine_of_the_last_run(accelerate, leave):
    old, new = (f"{failure.MACHINES}{letter * 12}" for letter in "ab")
    leave(f"{old}_aaaa_aaa", 0, 0, traceback="of the run before")
    leave("accelerate-7_cccccccc", 0, 0, traceback="of another run")
    leave(f"{new}_dddddd_d", 0, 0, traceback="first attempt")
    leave(f"{new}_eeeeeeee", 0, 0, traceback="first attempt")
    leave(f"{new}_eeeeeeee", 1, 0, traceback="zero", stacks="there")
    leave(f"{new}_eeeeeeee", 1, 1, traceback="one")
    leave(f"{new}_dddddd_d", 1, 0, traceback="two")
    status, out, _ = accelerate("diagnose", "logs")
    assert status == 0 and "run" not in out and "first" not in out
    assert all(f"\n{word}\n" in out for word in ("zero", "there", "one", "two"))
    assert out.count("attempt_1\n") == 2
    assert "zero" not in accelerate("diagnose", f"logs/{new}_dddddd_d")[1]
    leave("accelerate-7_ffffffff", 0, 0, traceback="a process id that was used again")
    assert accelerate("diagnose", "logs")[1].count("-- local rank") == 1


@pytest.mark.skipif(not failure.STACKS_SIGNAL, reason="there is no such signal")
def test_a_rank_whose_folder_is_gone_is_named_and_the_others_answer(accelerate, tmp_path):
    program = "from accelerate.runtime import failure; failure.watch(); print(flush=True); input()"
    ranks = []
    try:
        for rank in "01":
            (tmp_path / rank).mkdir()
            variables = {failure.ERROR_FILE: str(tmp_path / rank / "error.json"), "RANK": rank}
            variables |= {failure.LAUNCHER: str(os.getpid())}
            streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            ranks.append(subprocess.Popen([sys.executable, "-c", program], env={**os.environ, **variables}, **streams))
        for rank in ranks:
            rank.stdout.readline()
        (tmp_path / "0" / failure.STACKS).unlink()
        status, out, err = accelerate("stacks", "--job", str(os.getpid()))
    finally:
        for rank in ranks:
            rank.communicate(b"\n")
    assert (status, err) == (0, "")
    assert f"rank 0, pid {ranks[0].pid}" in out and f"No such file or directory: '{tmp_path}/0/stacks.txt'" in out
    assert f"rank 1, pid {ranks[1].pid}" in out and "most recent call first" in out
