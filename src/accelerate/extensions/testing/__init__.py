"""Helpers of test suites, and the self check `accelerate test`."""

from accelerate.extension import Command, Spec

SPEC = Spec(
    "testing",
    commands={
        "test": Command(
            "accelerate.extensions.testing.command",
            "test_command_parser",
            "Check that training works here, through the launcher.",
        )
    },
)
