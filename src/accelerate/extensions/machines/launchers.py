"""Helpers of runners that call the launcher of another program: mpirun, DeepSpeed's, torch_xla, gcloud, SageMaker's SDK."""

import re
import shutil
from collections.abc import Mapping

from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import LaunchPlan, Source
from accelerate.launch.secrets import masked
from accelerate.runtime.ranks import VARIABLES

# Variables that describe a machine, a login or a terminal; on another machine they would be wrong.
_OF_THIS_MACHINE = re.compile(
    r"_|HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|SHLVL|HOST|HOSTNAME|MAIL|TMPDIR|TMP|TEMP|TERM|TERMCAP|DISPLAY|WAYLAND_DISPLAY"
    r"|XAUTHORITY|COLUMNS|LINES|LS_COLORS|STY|TMUX|TMUX_PANE|EDITOR|PAGER|PS1|GPG_AGENT_INFO"
    r"|(SSH_|DBUS_|SUDO_|XDG_RUNTIME|XDG_SESSION|XDG_SEAT|XDG_VTNR|VSCODE_|OMPI_).*"
)
# What launchers write for the processes that they start. Those of this run get their own.
_RANKS = frozenset((*VARIABLES, "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"))
_OF_LAUNCHERS = (
    *("OMPI_COMM_", "PMIX_", "PMI_", "MPI_LOCAL", "MV2_COMM_", "HYDI_", "HYDRA_PROXY"),
    *("TORCHELASTIC_", "GROUP_"),
)
# Options of torch's elastic launcher alone.
_ELASTIC = ("max_restarts", "log_dir", "tee", "rdzv_conf")


def require_program(program: str, environment: Mapping[str, str], otherwise: str) -> None:
    """Refuse to continue without a program on the PATH; `otherwise` says in a sentence what to do."""
    if shutil.which(program, path=environment.get("PATH")) is None:
        raise LaunchError(f"{program} is not on the PATH. {otherwise}")


def refuse_elastic(plan: LaunchPlan, title: str, starts_all: bool = False) -> None:
    """Refuse options that only torch's launcher has, where `title` starts the processes (`starts_all`: all)."""
    if starts_all and plan["machine_rank"]:
        raise LaunchError(f"--machine_rank: {title} starts the processes of all machines. Launch on one machine only.")
    for name in _ELASTIC:
        if plan.settings[name].source > Source.DEFAULT and plan[name] not in (None, 0, "0", ""):
            raise LaunchError(f"--{name} is an option of torch's elastic launcher; {title} starts these processes.")


def without_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what another launcher has written about the rank of this process."""
    others = {name for name in environment if name in _RANKS or name.startswith(_OF_LAUNCHERS)}
    return {name: value for name, value in environment.items() if name not in others}


def handed_on(environment: Mapping[str, str]) -> list[str]:
    """Return which variables processes on other machines should get: all but those that belong to this machine."""
    return sorted(name for name in environment if name.isidentifier() and not _OF_THIS_MACHINE.fullmatch(name))


def may_be_shown(name: str, value: str) -> bool:
    """Return whether a variable may stand on a command line, where every user of a machine can read it."""
    return masked(value, name) == value
