"""The outcome of resolution: what will be started, and where each setting comes from."""

import enum
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate.launch.hardware import Hardware


class Source(enum.IntEnum):
    """Who set a value; a higher one wins."""

    MACHINE = 0
    DEFAULT = 1
    FILE = 2
    ENVIRONMENT = 3
    COMMAND_LINE = 4


@dataclass(frozen=True)
class Resolved:
    """A value that knows its source.

    Attributes:
        value: the value.
        source: who set it.
        detail: the variable, the file or the reason, for people.
    """

    value: Any
    source: Source = Source.DEFAULT
    detail: str = ""

    @property
    def origin(self) -> str:
        """The source in words."""
        return self.detail or {Source.DEFAULT: "default", Source.COMMAND_LINE: "command line"}.get(self.source, "")


@dataclass(frozen=True)
class Rendezvous:
    """How the processes of a run find each other.

    Attributes:
        backend: "static" (a store of the launcher) or "c10d" (torch's rendezvous).
        host: where they meet.
        port: at which port; 0 lets the system choose a free one when the run starts.
        settings: further settings of the method.
    """

    backend: str = "static"
    host: str = "127.0.0.1"
    port: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        """Host and port in torch's notation."""
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Machines:
    """The machines of a run, seen from one of them.

    Attributes:
        count: how many take part.
        rank: the number of this one, from 0; None where it is given one when they meet.
        source: who said so: a scheduler's name, or None for the options.
    """

    count: int = 1
    rank: int | None = 0
    source: str | None = None


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that a runner needs; nothing is decided after it.

    Attributes:
        settings: option name to resolved value, for every option of the table.
        script: the script, module or program.
        script_args: its arguments.
        num_processes: how many processes there are, on all machines together.
        hardware: the devices that those of this machine may use.
        on_cpu: they compute on the CPU.
        runner: who starts them: a key of `accelerate.launch.runners.RUNNERS`.
        machines: the machines, and which of them this is.
        rendezvous: how they find each other.
        extra: further variables of every process, beside those of the options.
        notes: lines of information for the user.
    """

    settings: Mapping[str, Resolved]
    script: str
    script_args: tuple[str, ...]
    num_processes: int
    hardware: Hardware
    on_cpu: bool
    runner: str = "single"
    machines: Machines = Machines()
    rendezvous: Rendezvous = Rendezvous()
    extra: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        """Return the value of an option."""
        return self.settings[name].value

    @property
    def local_processes(self) -> int:
        """How many processes run on this machine."""
        return self.num_processes // self.machines.count

    @property
    def elastic(self) -> bool:
        """Whether torch's elastic launcher supervises the processes; otherwise something else does, or nothing."""
        return self.runner in ("local", "machines")

    @property
    def command(self) -> list[str]:
        """The command line of one process."""
        if self["no_python"]:
            return [self.script, *self.script_args]
        # Several processes share a terminal: unbuffered, their lines come out whole and in time.
        python = [sys.executable, "-u"] if self.elastic else [sys.executable]
        return [*python, *(["-m"] if self["module"] else []), self.script, *self.script_args]
