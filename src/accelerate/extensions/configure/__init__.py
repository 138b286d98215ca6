"""The interview and the other subcommands of `accelerate config`."""

from accelerate.extension import Command, Spec

SPEC = Spec(
    "configure",
    commands={
        "config": Command(
            "accelerate.extensions.configure.command", "get_config_parser", "Write and update configuration files."
        )
    },
)
