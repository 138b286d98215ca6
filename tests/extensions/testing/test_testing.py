"""Helpers of test suites."""

import asyncio
import sys
import unittest
from unittest import mock

import pytest
import torch

from accelerate.accelerator import Accelerator
from accelerate.extensions.testing import requirements, testing
from accelerate.state import PartialState

PYTHON = [sys.executable, "-c"]


def run_case(case):
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    assert not result.errors + result.failures, result.errors + result.failures
    return result


def skipped(decorator):
    def body():
        pass

    return getattr(decorator(body), "__unittest_skip__", False)


def test_requirements_follow_the_machine(monkeypatch):
    monkeypatch.setattr(requirements, "torch_device", "cuda")
    monkeypatch.setattr(requirements, "device_count", 2)
    assert not any(skipped(d) for d in (testing.require_cuda, testing.require_multi_gpu, testing.require_cuda_or_xpu))
    assert all(skipped(d) for d in (testing.require_cpu, testing.require_xpu, testing.require_single_gpu))
    monkeypatch.setattr(requirements, "torch_device", "cpu")
    assert not any(skipped(d) for d in (testing.require_cpu, testing.require_non_xpu))
    assert all(skipped(d) for d in (testing.require_cuda, testing.require_multi_device, testing.require_single_device))


def test_flags_and_versions(monkeypatch):
    monkeypatch.delenv("RUN_SLOW", raising=False)
    assert skipped(testing.slow)
    monkeypatch.setenv("RUN_SLOW", "1")
    assert not skipped(testing.slow)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw12")
    assert testing.get_torch_dist_unique_port() == 29512
    assert testing.parse_flag_from_env("SOME_FLAG", None) is None
    monkeypatch.setenv("SOME_FLAG", "yes")
    assert testing.parse_flag_from_env("SOME_FLAG", "x") is True
    assert skipped(testing.require_torch_min_version(version="99"))
    assert not skipped(testing.require_torch_min_version(version="2.0"))
    assert testing.require_torch_min_version(lambda: None, version="99").__unittest_skip__


def test_execute_subprocess(capsys):
    program = "import sys; print('out'); print('err', file=sys.stderr)"
    result = testing.execute_subprocess_async([*PYTHON, program])
    assert (result.returncode, result.stdout, result.stderr) == (0, ["out"], ["err"])
    captured = capsys.readouterr()
    assert "Running: " in captured.out and "stdout: out" in captured.out and "stderr: err" in captured.err
    testing.execute_subprocess_async([*PYTHON, program], quiet=True, echo=False)
    assert capsys.readouterr().out == ""
    with pytest.raises(RuntimeError, match="(?s)exit status 4.*boom"):
        testing.execute_subprocess_async([*PYTHON, "import sys; print('boom', file=sys.stderr); sys.exit(4)"])
    with pytest.raises(RuntimeError, match="stopped after 0.1 seconds"):
        testing.execute_subprocess_async([*PYTHON, "import time; time.sleep(60)"], timeout=0.1)


def test_accelerate_test_case_forgets_state():
    class Case(testing.AccelerateTestCase):
        def test(self):
            Accelerator(cpu=True)

    run_case(Case)
    assert PartialState._shared_state == {}
    PartialState(cpu=True)
    assert testing.are_the_same_tensors(torch.ones(2))


def test_temporary_directory():
    seen = []

    class Case(testing.TempDirTestCase):
        def test_a(self):
            seen.append(list(self.tmpdir.iterdir()))
            (self.tmpdir / "folder").mkdir()
            (self.tmpdir / "file").touch()

        test_b = test_a

    run_case(Case)
    assert seen == [[], []] and not Case.tmpdir.exists()


def test_mocks_end_with_the_test():
    class Case(testing.MockingTestCase):
        def test(self):
            self.add_mocks([mock.patch.object(testing, "DEFAULT_LAUNCH_COMMAND", "replaced")])
            assert testing.DEFAULT_LAUNCH_COMMAND == "replaced"

    run_case(Case)
    assert testing.DEFAULT_LAUNCH_COMMAND != "replaced"


def test_a_streamed_command_returns_its_status_and_lines():
    program = "import sys; print('a'); print('b', file=sys.stderr); sys.exit(3)"
    result = asyncio.run(testing._stream_subprocess([sys.executable, "-c", program], quiet=True))
    assert (result.returncode, result.stdout, result.stderr) == (3, ["a"], ["b"])
    with pytest.raises((TimeoutError, asyncio.TimeoutError)):
        waiting = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        asyncio.run(testing._stream_subprocess(waiting, stdin=asyncio.subprocess.PIPE, timeout=0.1, quiet=True))
