"""What test suites import: requirements, commands, base classes."""

from accelerate.test_utils import requirements
from accelerate.test_utils.cases import AccelerateTestCase, MockingTestCase, TempDirTestCase, are_the_same_tensors
from accelerate.test_utils.processes import (
    DEFAULT_LAUNCH_COMMAND,
    RunOutput,
    SubprocessCallException,
    assert_exception,
    capture_call_output,
    execute_subprocess_async,
    get_launch_command,
    get_torch_dist_unique_port,
    parse_flag_from_env,
    path_in_accelerate_package,
    pytest_xdist_worker_id,
    run_command,
)
from accelerate.test_utils.requirements import *  # noqa: F403

__all__ = [
    "DEFAULT_LAUNCH_COMMAND",
    "AccelerateTestCase",
    "MockingTestCase",
    "RunOutput",
    "SubprocessCallException",
    "TempDirTestCase",
    "are_the_same_tensors",
    "assert_exception",
    "capture_call_output",
    "execute_subprocess_async",
    "get_launch_command",
    "get_torch_dist_unique_port",
    "parse_flag_from_env",
    "path_in_accelerate_package",
    "pytest_xdist_worker_id",
    "run_command",
    *requirements.__all__,
]
