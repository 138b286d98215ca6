"""What the agents read of torch's elastic launcher that torch keeps private: the only file that names it. Imports torch.

The methods that an agent overrides (`_start_workers`, `_monitor_workers`, ...) are documented for that purpose, and are not here.

Seen on: torch 2.7.1, 2.9.1, 2.13.0, 2.14.1, 2.15.0 (`make test-versions`).

Source: https://docs.pytorch.org/docs/stable/elastic/agent.html
"""

import os
import subprocess
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext


class OpenAgent(LocalElasticAgent):
    """Torch's agent, with names for the state of the processes that it has started."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if hasattr(self, "_shutdown_timeout"):  # torch's launcher reads the variable
            self._shutdown_timeout = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))

    @property
    def restarts_left(self) -> int:
        """How often torch may still start all processes again."""
        return self._remaining_restarts

    @restarts_left.setter
    def restarts_left(self, count: int) -> None:
        self._remaining_restarts = count

    @property
    def shutdown_timeout(self) -> float:
        """How long processes have to end before torch kills them, in seconds."""
        return getattr(self, "_shutdown_timeout", 30)  # torch's own number where it is no setting yet

    @property
    def processes(self) -> dict[int, Any]:
        """By local rank, the `subprocess.Popen` of a program or the `multiprocessing.Process` of a function."""
        context = self._pcontext
        if isinstance(context, SubprocessContext):
            return {local: handler.proc for local, handler in context.subprocess_handlers.items()}
        return dict(enumerate(context._pc.processes)) if context is not None and context._pc is not None else {}

    @property
    def statuses(self) -> dict[int, int | None]:
        """By local rank, the exit status, minus the number of a signal; None for a process that runs."""
        return {
            local: process.poll() if isinstance(process, subprocess.Popen) else process.exitcode
            for local, process in self.processes.items()
        }

    @property
    def error_files(self) -> Mapping[int, str]:
        """By local rank, where a process leaves its error."""
        return self._pcontext.error_files if self._pcontext is not None else {}

    @property
    def stderr_files(self) -> Mapping[int, str]:
        """By local rank, the file of standard error; empty for none."""
        return self._pcontext.stderrs
