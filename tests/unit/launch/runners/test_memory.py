"""What the kernel says about processes that it killed; with files of our own."""

import pytest

from accelerate.launch.runners import memory


@pytest.fixture
def machine(tmp_path):
    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    write("proc/vmstat", "nr_free_pages 5\noom_kill 2\n")
    return write


@pytest.fixture
def reason(tmp_path):
    return lambda before: memory.reason(before, tmp_path)


def test_nobody_knows(machine, reason, tmp_path):
    before = memory.kills(tmp_path)
    assert before == {"": 2}
    assert "the launcher did not do that" in reason(before)


def test_the_machine_ran_out(machine, reason, tmp_path):
    before = memory.kills(tmp_path)
    machine("proc/vmstat", "oom_kill 3\n")
    assert "the memory of this machine ran out" in reason(before)


def test_the_group_ran_out(machine, reason, tmp_path):
    machine("proc/self/cgroup", "0::/job/7\n")
    machine("sys/fs/cgroup/job/7/memory.events", "low 0\noom 1\noom_kill 0\noom_group_kill 0\n")
    machine("sys/fs/cgroup/job/7/memory.max", f"{8 << 30}\n")
    before = memory.kills(tmp_path)
    machine("sys/fs/cgroup/job/7/memory.events", "low 0\noom 2\noom_kill 1\n")
    machine("proc/vmstat", "oom_kill 3\n")
    assert "its control group ran out (limit 8.0 GiB)" in reason(before)


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_a_group_of_the_first_version_and_no_limit(machine, reason, tmp_path, limit):
    machine("proc/self/cgroup", "5:cpu:/x\n4:memory:/job\n")
    machine("sys/fs/cgroup/memory/job/memory.oom_control", "under_oom 0\noom_kill 0\n")
    machine("sys/fs/cgroup/memory/job/memory.limit_in_bytes", limit)
    before = memory.kills(tmp_path)
    machine("sys/fs/cgroup/memory/job/memory.oom_control", "under_oom 0\noom_kill 4\n")
    assert "its control group ran out, and" in reason(before)


def test_a_container_that_sees_its_own_root_alone(machine, reason, tmp_path):
    machine("proc/self/cgroup", "0::/../elsewhere\n")
    machine("sys/fs/cgroup/memory.events", "oom_kill 0\n")
    before = memory.kills(tmp_path)
    machine("sys/fs/cgroup/memory.events", "oom_kill 1\n")
    assert "its control group" in reason(before)


def test_other_systems_say_nothing(tmp_path):
    assert memory.kills(tmp_path) == {}
    assert "the launcher did not do that" in memory.reason({}, tmp_path)
