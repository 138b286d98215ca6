"""Checkpoints of transformers' Trainer in real programs: on one process and two, next to the stock Trainer's, on a disk that is full."""

import shutil
import subprocess
import sys

import pytest

from interop.launching import SCRIPTS, figures, finished, last_figures, need, starter

pytestmark = pytest.mark.interop
ADDED = {"accelerate_manifest.json", "accelerate_run.json"}
# One run of the program, and all tests of it in one process.
SHARED = ("found",)


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2])
def processes(request):
    need("transformers")
    return request.param


@pytest.fixture(scope="module")
def found(processes, tmp_path_factory):
    """Run the program once; with a small disk where this system lets us mount one."""
    folder, disk = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("disk")
    mount = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size=600k tmpfs "{disk}" && exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*mount, "true"], capture_output=True).returncode:
        return figures("trainer_checkpoints.py", folder, processes, True)
    command = [*mount, *starter(processes, ours=True), str(SCRIPTS / "trainer_checkpoints.py"), str(folder), str(disk)]
    return last_figures(finished(command))


def test_stock_and_ours_resume_from_each_other_bit_for_bit(found, processes):
    assert found["same losses"] and found["ours from stock"] and found["stock from ours"] and found["patched"]
    stock, ours = map(set, found["names"])
    parts = {"accelerate_manifest_parts"} if processes > 1 else set()  # each rank hashes its own files
    assert ours - stock == ADDED | parts and stock <= ours and found["world size"] == processes
    assert found["rotated"] == ["checkpoint-8"] and found["all ranks write"] == [""] * 8


def test_an_error_of_one_rank_comes_out_on_all(found, processes):
    told = found["a rank fails"]
    assert all("Input/output error" in text for text in told)
    assert all(f"failed on other ranks. Rank {processes - 1}: OSError" in text for text in told[:-1])
    assert found["after it"] == ["checkpoint-2"] and found["continues"]


def test_a_folder_that_a_rank_lacks_or_that_is_damaged_is_refused_on_all(found, processes):
    told = found["a rank without the folder"]
    assert all(f"rank {processes - 1} does not see it" in text and "checkpoint-4" in text for text in told), told
    assert all("optimizer.pt has 100 bytes" in text and "checkpoint-6" in text for text in found["damaged"])


@pytest.mark.slow
def test_a_run_goes_on_on_fewer_ranks_with_its_global_batch(found, processes):
    if processes == 1:
        pytest.skip("there is one rank")
    folder, losses = found["fewer ranks"]
    rest = last_figures(finished([sys.executable, str(SCRIPTS / "trainer_checkpoints.py"), "--resume", folder]))
    assert rest["accumulation"] == 2 and rest["epoch"] == pytest.approx(1.0)
    assert rest["losses"] == pytest.approx(losses, rel=1e-4)


def test_a_full_disk_leaves_the_checkpoint_before(found):
    if "full disk" not in found:
        pytest.skip("this system mounts no small disk")
    assert all("No space left on device" in text for text in found["full disk"]), found["full disk"]
    assert found["kept"] == ["checkpoint-2"] and found["kept one continues"]
