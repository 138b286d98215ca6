"""Host files of every style, good and bad, and how processes are spread over their machines."""

import socket

import pytest

from accelerate.launch.errors import LaunchError
from accelerate.launch.runners import hostfile
from accelerate.launch.runners.hostfile import Host


@pytest.mark.parametrize(
    ("text", "hosts", "style"),
    [
        ("a\nb\n", [("a", None), ("b", None)], "plain"),
        ("a slots=2\nme@b.c slots=3 max_slots=4\n", [("a", 2), ("me@b.c", 3)], "slots"),
        ("a:2\nb:1 # comment\n\n# all\n", [("a", 2), ("b", 1)], "colon"),
        ("a slots=2\nb\n", [("a", 2), ("b", None)], "mixed"),
        ("a\na\na\n", [("a", 3)], "mixed"),
        ("10.0.0.1 slots=1\nfe80::1\n[::1]", [("10.0.0.1", 1), ("fe80::1", None), ("[::1]", None)], "mixed"),
        ("\ta  slots=2\r\n", [("a", 2)], "slots"),
    ],
)
def test_styles(written, text, hosts, style):
    file = hostfile.read(written("hosts", text), "--x")
    assert [(host.name, host.slots) for host in file.hosts] == hosts and file.style == style


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "names no machine"),
        ("# only a comment\n\n", "names no machine"),
        ("a slots=two", "line 1 of hosts (--x) tells 'two' slots"),
        ("a\nb slots=0", "line 2"),
        ("a:", "tells '' slots"),
        ("a slots=-1", "'-1' slots"),
        ("a slots=99999999999999999999", "that must be a number from 1"),
        ("a slots = 2", "write slots=N or nothing"),
        ("a:2 slots=2", "tells the slots twice"),
        ("-oProxyCommand=evil", "which is no name"),
        ("me@-a", "which is no name"),
        ("a;rm", "which is no name"),
        ("$(id) slots=1", "which is no name"),
    ],
)
def test_malformed(written, text, fragment):
    with pytest.raises(LaunchError) as caught:
        hostfile.read(written("hosts", text), "--x")
    assert fragment in str(caught.value)


def test_no_such_file_a_folder_and_bytes(tmp_path):
    with pytest.raises(LaunchError, match=r"--x is 'none': there is no such file"):
        hostfile.read("none", "--x")
    with pytest.raises(LaunchError, match="that is a folder"):
        hostfile.read(str(tmp_path), "--x")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LaunchError, match="cannot be read"):
        hostfile.read("bytes", "--x")


def test_repeats_may_be_an_error(written):
    with pytest.raises(LaunchError, match="a stands twice in hosts"):
        hostfile.read(written("hosts", "a slots=2\na slots=2"), "--x", repeats=False)


@pytest.mark.parametrize(
    ("hosts", "count", "machines", "expected"),
    [
        ([("a", 2), ("b", 2)], 2, None, [("a", 2)]),
        ([("a", 2), ("b", 2)], 4, None, [("a", 2), ("b", 2)]),
        ([("a", 2), ("b", 2)], 2, 2, [("a", 1), ("b", 1)]),
        ([("a", 2), ("b", 2)], 3, None, [("a", 2), ("b", 1)]),
        ([("a", 4), ("b", 2)], 6, None, [("a", 4), ("b", 2)]),
        ([("a", None), ("b", None)], 4, None, [("a", 2), ("b", 2)]),
        ([("a", None), ("b", None)], 1, None, [("a", 1)]),
        ([("a", None), ("b", None)], 3, 1, [("a", 3)]),
    ],
)
def test_layout(hosts, count, machines, expected):
    places = hostfile.layout([Host(*host) for host in hosts], count, machines, "--x")
    assert [(host.name, number) for host, number in places] == expected


@pytest.mark.parametrize(
    ("hosts", "count", "machines", "fragment"),
    [
        ([("a", 2)], 2, 2, "--num_machines is 2, and --x names 1"),
        ([("a", 2), ("b", 1)], 4, None, "has 3 slots on 2 machines"),
        ([("a", 2), ("b", 9)], 4, 1, "has 2 slots on 1 machines"),
        ([("a", None), ("b", None)], 3, None, "does not divide evenly over the 2 machines"),
    ],
)
def test_no_layout(hosts, count, machines, fragment):
    with pytest.raises(LaunchError) as caught:
        hostfile.layout([Host(*host) for host in hosts], count, machines, "--x")
    assert fragment in str(caught.value)


def test_which_machine_is_this_one():
    assert all(map(hostfile.is_here, ("localhost", "127.0.0.1", socket.gethostname())))
    # 192.0.2.0/24 is for documentation: nobody has it.
    assert not hostfile.is_here("192.0.2.1")
    assert not hostfile.is_here("no.such.host.invalid") and not hostfile.is_here("x" * 300)
