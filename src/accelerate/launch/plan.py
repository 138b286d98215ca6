"""The outcome of resolution: what will be started, where each setting comes from, and the environment of a worker."""

import enum
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate.config.options import FEATURES, OPTIONS
from accelerate.config.options.schema import ON, ONE
from accelerate.launch.hardware import Hardware
from accelerate.runtime.ranks import is_of_agent, without_agent


class Source(enum.IntEnum):
    """Who set a value; a higher one wins."""

    MACHINE = 0
    DEFAULT = 1
    FILE = 2
    ENVIRONMENT = 3
    COMMAND_LINE = 4


BACKENDS = ("static", "c10d")
_WORDS = {Source.DEFAULT: "default", Source.COMMAND_LINE: "command line"}


@dataclass(frozen=True)
class Resolved:
    """A value, who set it, and for people the variable, the file or the reason (`detail`)."""

    value: Any
    source: Source = Source.DEFAULT
    detail: str = ""

    @property
    def origin(self) -> str:
        """The source in words."""
        return self.detail or _WORDS.get(self.source, "")


@dataclass(frozen=True)
class Rendezvous:
    """How the processes of a run find each other; port 0 lets the system choose a free one when the run starts.

    Attributes:
        backend: "static" (a store of the launcher) or "c10d" (torch's rendezvous).
        host: the name or address of machine 0.
        settings: further settings of the method.
        machines: how many machines take part.
        machine: the number of this one, from 0; None where the rendezvous numbers them.
    """

    backend: str = "static"
    host: str = "127.0.0.1"
    port: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)
    machines: int = 1
    machine: int | None = 0


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that a runner needs; nothing is decided after it.

    Attributes:
        settings: option name to resolved value, for every option of the table.
        script: the script, module or program.
        num_processes: how many processes there are, on all machines together.
        hardware: the devices that those of this machine may use.
        runner: who starts them: the name of a runner, see `accelerate.launch.runners`.
        extra: further variables of every process, next to those of the options.
        notes: lines of information for the user.
    """

    settings: Mapping[str, Resolved]
    script: str
    script_args: tuple[str, ...]
    num_processes: int
    hardware: Hardware
    on_cpu: bool
    runner: str = "single"
    rendezvous: Rendezvous = Rendezvous()
    extra: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        """Return the value of an option."""
        return self.settings[name].value

    @property
    def local_processes(self) -> int:
        """How many processes run on this machine."""
        return self.num_processes // self.rendezvous.machines

    @property
    def elastic(self) -> bool:
        """Whether torch's elastic launcher supervises the processes; otherwise something else does, or nothing."""
        return self.runner in ("local", "machines")

    @property
    def command(self) -> list[str]:
        """The command line of one process."""
        return self.python_command(unbuffered=self.elastic)

    def python_command(self, unbuffered: bool) -> list[str]:
        """Return the command line of one process. Several processes share a terminal: unbuffered, their lines come out whole."""
        if self["no_python"]:
            return [self.script, *self.script_args]
        python = [sys.executable, "-u"] if unbuffered else [sys.executable]
        return [*python, *(["-m"] if self["module"] else []), self.script, *self.script_args]


def features_on(settings: Mapping[str, Resolved]) -> set[str]:
    """Return the features that the settings ask for."""
    return {name for name, feature in FEATURES.items() if feature.is_on(settings[feature.switch].value)}


def worker_environment(plan: LaunchPlan, base: Mapping[str, str]) -> dict[str, str]:
    """Return the full environment of the processes of a plan, which inherit `base`."""
    if is_of_agent(base):  # a rank has started this launch: the new run is another one
        base = without_agent(base)
    # A switch that is off is passed on by the absence of its variable, which the user's environment may have.
    off = {option.env for option in OPTIONS if option.style in (ON, ONE) and not plan.settings[option.name].value}
    inherited = {name: text for name, text in base.items() if name not in off}
    environment = {**inherited, **exports(plan.settings), **plan.extra}
    selected = plan["gpu_ids"]
    if selected not in (None, "all") and plan.hardware.visible_env and not plan.on_cpu:
        environment[plan.hardware.visible_env] = ",".join(part.strip() for part in str(selected).split(","))
    return environment


def exports(settings: Mapping[str, Resolved], feature: str | None = None) -> dict[str, str]:
    """Return the variables that carry settings to a worker: those of options that every run reads and of features that are on.

    With `feature`, those that it alone reads, whether or not it is on.
    """
    wanted = {feature} if feature else {None, *features_on(settings)}
    variables: dict[str, str] = {}
    for option in OPTIONS:
        if option.feature not in wanted:
            continue
        value = settings[option.name].value
        is_needed = option.exported_if_several is None or (settings[option.exported_if_several].value or 1) > 1
        if value is not None and is_needed:
            variables.update(option.encode(value))
    return variables
