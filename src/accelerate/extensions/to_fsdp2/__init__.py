"""Configuration files of FSDP 1 as files for FSDP 2."""

from accelerate.extension import Command, Spec

SPEC = Spec(
    "to_fsdp2",
    commands={
        "to-fsdp2": Command(
            "accelerate.extensions.to_fsdp2.command",
            "to_fsdp2_command_parser",
            "Convert a configuration file from FSDP 1 to FSDP 2.",
        )
    },
)
