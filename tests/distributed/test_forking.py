"""Worker processes of data loaders are forked beside the threads of the process group."""


def test_workers_forked_straight_after_a_collective_live(launch):
    # On GPUs the group has NCCL's threads; the ones that enter the interpreter are gloo's.
    done = launch("check_forking.py", cpu=True)
    assert "ok all" in done.stdout
