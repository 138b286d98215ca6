"""The command `accelerate env`: versions, devices and configuration, for a bug report."""

from accelerate.extension import Command, Spec

SPEC = Spec(
    "env",
    commands={
        "env": Command(
            "accelerate.extensions.env.command",
            "env_command_parser",
            "Print versions, devices and configuration, for a bug report.",
        )
    },
)
