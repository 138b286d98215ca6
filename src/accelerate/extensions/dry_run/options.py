"""The option that prints a launch."""

from accelerate.config.options.schema import rows

OPTIONS = (
    rows("options", key="")(
        "dry_run",
        "Print what would be started, and where each setting comes from, and start nothing.",
        default=False,
        switch=True,
        before="deepspeed_config_file",
    ),
)
