"""The outcome of resolution: what will be started, and where each setting comes from."""

import enum
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate.config.options import BY_NAME
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
class LaunchPlan:
    """Everything that a runner needs; nothing is decided after it.

    Attributes:
        settings: option name to resolved value, for every option of the table.
        script: the script, module or program.
        script_args: its arguments.
        num_processes: how many processes to start.
        hardware: the devices they may use.
        on_cpu: they compute on the CPU.
        elastic: torch's elastic launcher supervises them; otherwise the one process is started directly.
        rendezvous: how they find each other.
        notes: lines of information for the user.
    """

    settings: Mapping[str, Resolved]
    script: str
    script_args: tuple[str, ...]
    num_processes: int
    hardware: Hardware
    on_cpu: bool
    elastic: bool
    rendezvous: Rendezvous = Rendezvous()
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        """Return the value of an option."""
        return self.settings[name].value

    @property
    def command(self) -> list[str]:
        """The command line of one process."""
        if self["no_python"]:
            return [self.script, *self.script_args]
        # Several processes share a terminal: unbuffered, their lines come out whole and in time.
        python = [sys.executable, "-u"] if self.elastic else [sys.executable]
        return [*python, *(["-m"] if self["module"] else []), self.script, *self.script_args]

    def describe(self) -> str:
        """Return what would be started and where each setting comes from, as text."""
        where = "the CPU" if self.on_cpu else self.hardware.device
        lines = [
            f"command: {' '.join(self.command)}",
            f"processes: {self.num_processes} on {where} ({self.settings['num_processes'].origin})",
            f"started by: {'the elastic launcher of torch' if self.elastic else 'replacing this process'}",
        ]
        if self.elastic:
            port = self.rendezvous.port or "chosen by the system"
            lines.append(f"meeting point: {self.rendezvous.host}, port {port} ({self.rendezvous.backend})")
        lines.append("settings:")
        for name, resolved in self.settings.items():
            tells_worker = BY_NAME[name].env is not None and BY_NAME[name].feature is None
            if resolved.source is not Source.DEFAULT or (tells_worker and resolved.value is not None):
                lines.append(f"  {name} = {resolved.value!r} ({resolved.origin})")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])
