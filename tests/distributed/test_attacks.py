"""What a stranger on the network can do to a run on one machine: a program that talks to its store as the ranks do."""

import time
from datetime import timedelta

import psutil
import pytest
from torch.distributed import DistError, TCPStore

from distributed.conftest import LAUNCH_ON_CPU, begun, plain_environment

# Ranks that work together until a file is there.
RANKS = """
import os, sys, time
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
state = PartialState()
state.wait_for_everyone()
state.print("port", os.environ["MASTER_PORT"], os.environ["ACCELERATE_LAUNCHER_PID"], flush=True)
over = [False]
while not over[0]:
    time.sleep(0.02)
    broadcast_object_list(over := [os.path.exists(sys.argv[1])])
"""
ABORTING = 1 << 41  # what ends all ranks where ACCELERATE_HANG_ABORT_AFTER is set
NETWORK = [
    entry.address
    for entries in psutil.net_if_addrs().values()
    for entry in entries
    if entry.family.name in ("AF_INET", "AF_INET6") and not entry.address.startswith(("127.", "::1", "fe80"))
]


def test_a_stranger_reaches_no_store_and_ends_no_rank(tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    done, environment = tmp_path / "done", plain_environment(tmp_path)
    command = [*LAUNCH_ON_CPU, "--num_processes", "2", str(tmp_path / "ranks.py"), str(done)]
    job = begun(command, env=environment)
    try:
        port, launcher = next([*map(int, line.split()[1:])] for line in job.stdout if line.startswith("port"))
        connections = psutil.Process(launcher).net_connections("tcp")
        listening = [each.laddr for each in connections if each.status == "LISTEN" and each.laddr.port == port]
        assert {address.ip for address in listening} == {"127.0.0.1"}
        for address in NETWORK:
            with pytest.raises(DistError):
                TCPStore(address, port, None, False, timedelta(seconds=0.2), wait_for_workers=False)
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20), wait_for_workers=False)
        known = "accelerate/hang/rank/0"
        (keys,) = (key.removesuffix("rank/0") for key in map(str, store.list_keys()) if key.endswith(known))
        store.set(f"{keys}report", "\x1b[2Jyou are mine")
        store.add(f"{keys}asked", ABORTING)
        question = store.add(f"{keys}asked", 1)  # who answers this has read what stands before it
        deadline = time.monotonic() + 60
        while store.add(f"{keys}answers/{question}", 0) < 2:
            assert time.monotonic() < deadline, "the ranks do not answer"
        done.touch()
        output, errors = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 0 and "mine" not in output + errors, errors
