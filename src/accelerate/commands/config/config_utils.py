"""What the subcommands of `accelerate config` share."""

import argparse

from accelerate.config.options import DYNAMO_WORDS

DYNAMO_BACKENDS = [word.upper() for word in DYNAMO_WORDS.split() if word != "no"]


class SubcommandHelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Prints the usage of a subcommand without the placeholder that stands for the choice among subcommands."""

    def _format_usage(self, usage: str | None, actions: object, groups: object, prefix: str | None) -> str:
        return super()._format_usage(usage, actions, groups, prefix).replace("<command> [<args>] ", "")
