"""Launchers of several machines that join rounds at a store, in threads of one process."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from accelerate.extensions.machines import addresses
from accelerate.extensions.machines import rendezvous as machine_rendezvous
from accelerate.extensions.machines.rendezvous import MachineRendezvous
from accelerate.launch.errors import LaunchError, RunError
from accelerate.launch.plan import Rendezvous
from accelerate.utils.other import get_free_port


@pytest.fixture
def at():
    """Return a function that makes the rendezvous of one machine at one port."""
    port = get_free_port()

    def at(machine, machines=2, processes=1, restarts=0, join_timeout=20.0, heartbeat_timeout=20.0):
        times = {"join_timeout": join_timeout, "heartbeat_timeout": heartbeat_timeout}
        meet = Rendezvous("static", "127.0.0.1", port, times, machines, machine)
        return MachineRendezvous(meet, processes, restarts, lambda line: None)

    return at


def together(*calls):
    """Call functions at the same time; return what they returned or raised."""
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception(60) or future.result() for future in futures]


@pytest.fixture
def join():
    """Return a function that lets machines join a round; they leave at the end of the test."""
    joined = []

    def join(*machines):
        joined.extend(machine for machine in machines if machine not in joined)
        return together(*(machine.next_rendezvous for machine in machines))

    yield join
    for machine in reversed(joined):
        machine.leave()


@pytest.fixture
def pair(at, join):
    """Return a function that makes two machines in round 0."""

    def pair(**first):
        machines = [at(0, **first), at(1)]
        all_well(join(*machines))
        return machines

    return pair


def all_well(results):
    assert not any(isinstance(result, Exception) for result in results), results


def until(found):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if result := found():
            return result
        time.sleep(0.02)
    raise AssertionError("waited without effect")


def test_a_late_launcher_does_not_disturb(at, pair, join):
    first, _ = pair()
    (error,) = join(at(1, join_timeout=1.0))
    assert isinstance(error, RunError) and "has begun without this machine" in str(error)
    assert not first.num_nodes_waiting() and first.heartbeat.lost() is None


def test_a_new_launcher_takes_the_number_of_a_lost_one(at, pair, join):
    first, second = pair(heartbeat_timeout=1.0)
    former = second.members[1]
    second._stop_heartbeat()  # without a word, as if it was killed
    lost = str(until(first.heartbeat.lost))
    assert "machine 1 (" in lost and "has not answered" in lost
    new = at(1)
    all_well(join(first, new))
    assert (first.round, new.round) == (1, 1) and first.members[1] != former


def test_the_number_of_a_launcher_that_ended_while_it_waited_is_free(at, join):
    waiting = {"machines": 3, "join_timeout": 3.0}
    former, first, new = at(1, **waiting), at(0, **waiting), at(1, **waiting)
    (waited, *others) = join(former, first)  # the third one is missing
    assert isinstance(waited, RunError) and all("machine 2 of 3" in str(error) for error in (waited, *others))
    former._stop_heartbeat()  # without a word, as if it was killed
    # Within a second of its end no launcher can know of it, and a round would begin with it; this wait is longer.
    assert all("machine 2 of 3" in str(error) for error in join(first, new))
    all_well(join(first, new, at(2, machines=3)))
    assert (new.machine, new.round) == (1, 0)


def test_launchers_without_a_number_get_one_each_and_keep_it(at, join, monkeypatch):
    first = at(0, machines=4)
    monkeypatch.setattr(addresses, "is_this_machine", lambda host: False)
    others = [at(None, machines=4), at(2, machines=4), at(None, machines=4)]
    all_well(join(first, *others))
    numbers = [other.machine for other in others]
    assert sorted(numbers) == [1, 2, 3] and numbers[1] == 2 and len(set(first.members)) == 4
    all_well(join(first, *others))
    assert numbers == [other.machine for other in others] and {other.round for other in others} == {1}


def test_launchers_of_one_machine_without_a_number_meet(at, join):
    machines = [at(None, machines=3) for _ in range(3)]
    all_well(join(*machines))
    assert sorted(machine.machine for machine in machines) == [0, 1, 2]
    assert sorted(machine.is_host for machine in machines) == [False, False, True]
    numbers = [machine.machine for machine in machines]
    all_well(join(*machines))
    assert [machine.machine for machine in machines] == numbers


def test_launchers_outlast_a_former_run_at_their_port(at, join):
    former = at(0, machines=1)
    all_well(join(former))
    machines = [at(None), at(None)]
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(machine.next_rendezvous) for machine in machines]
        until(lambda: all(machine.heartbeat and machine.heartbeat.answer.get("beat") for machine in machines))
        former.leave()
        former.server = former.round_server = None  # its launcher has ended
        all_well([future.exception(60) for future in waiting])
    assert sorted(machine.machine for machine in machines) == [0, 1]
    for machine in machines[::-1]:
        machine.leave()


@pytest.mark.parametrize(
    ("option", "words"), [("processes", "processes of each machine"), ("restarts", "--max_restarts")]
)
def test_machines_must_agree(at, join, option, words):
    for error in join(at(0, **{option: 2}), at(1, **{option: 4})):
        assert isinstance(error, LaunchError) and all(w in str(error) for w in (words, "2 on machine", "4 on machine"))


def test_two_machines_with_one_number(at, join, monkeypatch):
    monkeypatch.setattr(machine_rendezvous, "_STALE_S", 0.5)  # until then the first one may be about to end
    results = join(*[at(machine, machines=3, join_timeout=2.0) for machine in (0, 1, 1)])
    assert sum(isinstance(error, LaunchError) and "its own number" in str(error) for error in results) == 1, results


def test_the_port_is_taken(at, join):
    join(at(0, machines=1))
    (error,) = join(at(0, machines=1))
    assert isinstance(error, RunError) and "cannot listen" in str(error) and "--main_process_port" in str(error)


def test_what_another_machine_says_is_cut_and_steers_no_terminal(pair):
    first, second = pair()
    second.heartbeat.publish(failed="\x1b[2Jrank 1 ended\n\x9b" + "x" * 5000)
    said = until(first.heartbeat.failure)
    assert said.startswith("\\x1b[2Jrank 1 ended\n\\x9bxxx") and len(said) < 600
