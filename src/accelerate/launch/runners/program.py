"""What the runners share that leave the start of the processes to another program."""

import os
import re
import shutil
from collections.abc import Iterable, Mapping

from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import LaunchPlan, Source
from accelerate.launch.runners import single
from accelerate.launch.secrets import is_secret
from accelerate.runtime.ranks import SCHEMES

# Variables that describe a machine, a login or a terminal; on another machine they would be wrong.
_OF_THIS_MACHINE = frozenset(
    (
        *(
            "HOME",
            "USER",
            "LOGNAME",
            "SHELL",
            "PWD",
            "OLDPWD",
            "SHLVL",
            "_",
            "HOST",
            "HOSTNAME",
            "MAIL",
            "TMPDIR",
            "TMP",
            "TEMP",
        ),
        *(
            "TERM",
            "TERMCAP",
            "DISPLAY",
            "WAYLAND_DISPLAY",
            "XAUTHORITY",
            "COLUMNS",
            "LINES",
            "LS_COLORS",
            "STY",
            "TMUX",
        ),
        *("TMUX_PANE", "EDITOR", "PAGER", "PS1", "GPG_AGENT_INFO"),
    )
)
_PREFIXES_OF_THIS_MACHINE = ("SSH_", "DBUS_", "SUDO_", "XDG_RUNTIME", "XDG_SESSION", "XDG_SEAT", "XDG_VTNR", "VSCODE_")
# What launchers tell the processes that they start. Those of this run get their own.
_OF_LAUNCHERS = (
    "OMPI_COMM_",
    "PMIX_",
    "PMI_",
    "MPI_LOCAL",
    "MV2_COMM_",
    "HYDI_",
    "HYDRA_PROXY",
    "TORCHELASTIC_",
    "GROUP_",
)
_RANKS = frozenset((*SCHEMES[0][1], "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"))
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LOGIN_IN_ADDRESS = re.compile(r"://[^/\s@]*:[^/\s@]*@")
# Of torch's elastic launcher alone.
_ELASTIC = ("max_restarts", "log_dir", "tee", "rdzv_conf")


def find(program: str, environment: Mapping[str, str], otherwise: str) -> str:
    """Return the path of a program.

    Args:
        program: its name.
        environment: the variables with the PATH to look in.
        otherwise: what to do if it is not there, as a sentence.

    Raises:
        LaunchError: it is not on the PATH.
    """
    path = shutil.which(program, path=environment.get("PATH"))
    if path is None:
        raise LaunchError(f"{program} is not on the PATH. {otherwise}")
    return path


def start(command: Iterable[str], environment: Mapping[str, str], replace: bool) -> None:
    """Run a program to its end, or become it.

    Args:
        command: program and arguments.
        environment: all its variables.
        replace: become it, where the system can do that.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    words = list(command)
    if replace and os.name == "posix":
        single.become(words, environment)
    else:
        single.run_child(words, environment)


def refuse_elastic(plan: LaunchPlan, title: str) -> None:
    """Refuse options that only torch's elastic launcher understands.

    Args:
        plan: what is started.
        title: the program that starts the processes instead.

    Raises:
        LaunchError: such an option was given.
    """
    for name in _ELASTIC:
        if plan.settings[name].source > Source.DEFAULT and plan[name] not in (None, 0, "0", ""):
            raise LaunchError(
                f"--{name} is an option of torch's elastic launcher, and {title} starts these processes. Leave it out."
            )


def own(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what another launcher has told this process about its rank.

    Args:
        environment: the variables.
    """
    return {
        name: value for name, value in environment.items() if name not in _RANKS and not name.startswith(_OF_LAUNCHERS)
    }


def handed_on(environment: Mapping[str, str]) -> list[str]:
    """Return which variables processes on other machines should get: all but those that belong to this machine.

    Args:
        environment: the variables.

    Example:
        >>> handed_on({"HOME": "/root", "ACCELERATE_MIXED_PRECISION": "bf16", "HF_TOKEN": "x", "BASH_FUNC_f%%": "y"})
        ['ACCELERATE_MIXED_PRECISION', 'HF_TOKEN']
    """
    return sorted(
        name
        for name in environment
        if _IDENTIFIER.fullmatch(name)
        and name not in _OF_THIS_MACHINE
        and not name.startswith((*_PREFIXES_OF_THIS_MACHINE, "OMPI_"))
    )


def may_be_shown(name: str, value: str) -> bool:
    """Tell whether a variable may stand on a command line, where every user of a machine can read it.

    Args:
        name: the variable.
        value: its value; one with a login in an address may not.

    Example:
        >>> may_be_shown("HF_TOKEN", "x"), may_be_shown("http_proxy", "http://me:pw@proxy"), may_be_shown("LANG", "C")
        (False, False, True)
    """
    return not is_secret(name) and not _LOGIN_IN_ADDRESS.search(value)


def is_root() -> bool:
    """Tell whether this process may do everything on its machine."""
    return hasattr(os, "geteuid") and os.geteuid() == 0
