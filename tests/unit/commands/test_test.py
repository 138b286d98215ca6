"""The self check is launched as a user's script is, and its launch is left to clean up after itself."""

import signal
import subprocess

import pytest

from accelerate.commands import test as command


class Launch:
    """Stands for the process of a launch."""

    def __init__(self, words, status):
        self.words, self.status, self.terminated = words, status, False

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def wait(self, timeout=None):
        if isinstance(self.status, list):
            status = self.status.pop(0)
            if isinstance(status, BaseException):
                raise status
            return status
        return self.status

    def terminate(self):
        self.terminated = True


@pytest.fixture
def launches(monkeypatch):
    def answer(status):
        calls = []
        monkeypatch.setattr(subprocess, "Popen", lambda words: calls.append(Launch(words, status)) or calls[-1])
        return calls

    return answer


@pytest.mark.parametrize(("status", "exit_status"), [(0, 0), (1, 1), (2, 2), (3, 3), (-15, 143)])
def test_status_is_kept(accelerate, launches, status, exit_status):
    calls = launches(status)
    got, out, err = accelerate("test", "--config_file", "c.yaml")
    assert got == exit_status
    assert calls[0].words[1:] == [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        "c.yaml",
        "--module",
        "accelerate.test_utils.scripts.test_script",
    ]
    assert ("passed" in out) is (status == 0)
    assert ("failed" in err) is (status not in (0, 2))
    assert ("could not be started" in err) is (status == 2)


def test_an_interrupted_launch_stops_its_workers_itself(accelerate, launches):
    calls = launches([KeyboardInterrupt(), 130])
    assert accelerate("test")[0] == 130
    assert not calls[0].terminated


@pytest.mark.parametrize(
    "second", [KeyboardInterrupt(), subprocess.TimeoutExpired("launch", 10)], ids=["again", "late"]
)
def test_an_interrupted_launch_that_goes_on_is_stopped(accelerate, launches, second):
    calls = launches([KeyboardInterrupt(), second])
    assert accelerate("test")[0] == 130
    assert calls[0].terminated


def test_a_request_to_end_reaches_the_launch(accelerate, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    calls = []

    class Ends(Launch):
        def wait(self, timeout=None):
            signal.raise_signal(signal.SIGTERM)
            return -15

    monkeypatch.setattr(subprocess, "Popen", lambda words: calls.append(Ends(words, 0)) or calls[-1])
    assert accelerate("test")[0] == 143
    assert calls[0].terminated
    assert signal.getsignal(signal.SIGTERM) is before


def test_pytest_leaves_the_command_alone():
    assert command.test_command.__test__ is False
