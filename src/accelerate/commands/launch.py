"""`accelerate launch`: start a training script in one process or several."""

import argparse
import sys
import threading
import traceback
from typing import Any

from accelerate.base import _lazy
from accelerate.base._warn import printable
from accelerate.commands.utils import CustomArgumentParser, OneSpelling, add_options, make_parser, or_exit
from accelerate.config.options import BY_NAME, FEATURES, add_third_parties
from accelerate.launch import runners
from accelerate.launch.errors import LaunchError, RunError, failure_of
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.resolve import resolve
from accelerate.launch.secrets import masked

__getattr__ = _lazy.aliases(__name__)


def clean_option(option: str) -> str | None:
    """Return the name that a long flag stands for, or None for a short one.

    Args:
        option: such as "--num-processes".

    Example:
        >>> clean_option("--num-processes")
        'num_processes'
    """
    return option[2:].replace("-", "_") if option.startswith("--") else None


class CustomHelpFormatter(OneSpelling):
    """Shows the options of the features named on the command line; all options if there are none.

    `accelerate launch --use_fsdp --help` omits DeepSpeed, Megatron-LM and TPU.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"max_help_position": 40, **kwargs})

    def add_argument(self, action: argparse.Action) -> None:
        """Add an argument to the help, unless it belongs to another feature."""
        flags = {clean_option(word.partition("=")[0]) for word in sys.argv}
        features = {name for name, feature in FEATURES.items() if feature.switch in flags}
        option = BY_NAME.get(action.dest)
        if not features or option is None or option.feature is None or option.feature in features:
            super().add_argument(action)

    def end_section(self) -> None:
        """Close a heading; argparse prints only headings with content."""
        super().end_section()


def launch_command_parser(subparsers: Any = None) -> CustomArgumentParser:
    """Return the parser of `accelerate launch` with every option of the option table.

    Not a collective.

    Args:
        subparsers: the result of `ArgumentParser.add_subparsers`, or None for a separate parser.

    Example:
        >>> launch_command_parser().parse_args(["--cpu", "--num_processes", "2", "train.py", "--lr", "1"]).training_script
        'train.py'
    """
    add_third_parties()
    parser = make_parser(
        "launch",
        "Start a training script, in one process or several.",
        subparsers,
        launch_command,
        usage="accelerate launch [options of the launcher] training_script [arguments of the script]",
        allow_abbrev=False,
        formatter_class=CustomHelpFormatter,
    )
    add_options(parser)
    parser.add_argument("training_script", help="The script to start.")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="Its arguments.")
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Start the processes that the arguments parsed by `launch_command_parser` describe, and wait for their end.

    For programs: it returns or raises the error. `main` does the same for the console, where one process replaces the
    launcher.

    Not a collective.

    Raises:
        LaunchError: the request cannot be run as written.
        subprocess.CalledProcessError: the script failed in its one process.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: the script failed in one of several processes.
    """
    _run(resolve(args), replace=False)


def console(args: argparse.Namespace, replace: bool | None = None) -> None:
    """Run `accelerate launch` for the console: status 2 if nothing was started, else that of the first failed process.

    `replace` lets one process take the place of this one; by default where this one is the console script.
    """
    plan = or_exit("accelerate launch", resolve, args)
    try:
        _run(plan, _owns_process() if replace is None else replace)
    except LaunchError as error:
        # Errors that only the runner can see: a program that is not installed, machines that disagree.
        print(printable(f"accelerate launch: error: {error}"), file=sys.stderr)
        raise SystemExit(2) from None
    except BaseException as error:
        is_run_error = isinstance(error, RunError)
        status, line = (error.status, str(error)) if is_run_error else failure_of(error)
        if plan["debug"]:
            text = "".join(traceback.format_exception(error))
            print(printable("\n".join(map(masked, text.splitlines()))), file=sys.stderr)
        # A process that failed has said why; of a machine that is lost only the launcher can report.
        runners.print_info(plan, line, always=is_run_error)
        raise SystemExit(status) from None


def _run(plan: LaunchPlan, replace: bool) -> None:
    """Start the processes of a plan, or print what an extension shows in place of that."""
    if shown := runners.asked_for(plan.settings, "show"):
        print(printable(runners.module_of(shown).show(plan)))
    else:
        runners.run(plan, replace=replace)


def _owns_process() -> bool:
    """Whether this process is the console script and nothing else, so that it may be replaced."""
    script = sys.modules["__main__"]
    spec = getattr(script, "__spec__", None)
    name = spec.name if spec else (getattr(script, "__file__", None) or "").replace("\\", "/").rpartition("/")[2]
    ours = name in ("accelerate", "accelerate-launch") or name.startswith("accelerate.commands.")
    return ours and threading.active_count() == 1


def main() -> None:
    """Run the console script `accelerate-launch`; exit statuses are those of `console`."""
    console(launch_command_parser().parse_args())


if __name__ == "__main__":
    main()
