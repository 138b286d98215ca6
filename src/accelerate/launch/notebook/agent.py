"""Torch's agent for processes that run a function. Importing this module imports torch."""

import contextlib
import dataclasses
import os
import signal
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from accelerate.launch import elastic, elastic_machines
from accelerate.launch.notebook import forks
from accelerate.launch.notebook.failures import Endings


class WrittenByWorkers(DefaultLogsSpecs):
    """Files of output that the processes write by themselves, and torch only reads.

    Torch would redirect the descriptor of `sys.stdout`. In a notebook that is another one than 1, or there is none; and on macOS and
    Windows torch redirects nothing.
    """

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files, none of them for torch to redirect to.

        Args:
            envs: the variables of each process.
        """
        files = super().reify(envs)
        return dataclasses.replace(
            files, stdouts=dict.fromkeys(files.stdouts, ""), stderrs=dict.fromkeys(files.stderrs, "")
        )


class _Functions:
    """What differs where processes run a function and no program: torch keeps them in another place."""

    endings: Endings

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with forks.sound():
            started = super()._start_workers(worker_group)
        # Torch keeps a process that is done until all are, with its connections: who waits for it in a collective would wait on.
        # What it returns, None, is in a pipe and outlives it.
        self._pcontext._worker_finished_event.set()
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.endings.look(self._pcontext)
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY and (vanished := self._vanished(worker_group)):
            return RunResult(state=WorkerState.FAILED, failures=vanished)
        return result

    def _started(self) -> dict[int, Any]:
        context = getattr(self._pcontext, "_pc", None)
        return {} if context is None else dict(enumerate(context.processes))

    def _vanished(self, worker_group: WorkerGroup) -> dict[int, ProcessFailure]:
        """Return processes that ended well before their function did (`os._exit(0)`): torch would wait for ever."""
        gone = {}
        for local, process in self._started().items():
            has_result = local in self._pcontext._return_values or not self._pcontext._ret_vals[local].empty()
            if not process.is_alive() and process.exitcode == 0 and not has_result:
                rank = worker_group.workers[local].global_rank
                gone[rank] = ProcessFailure(local, process.pid, 0, self._pcontext.error_files[local])
        return gone

    def _statuses(self) -> dict[int, int | None]:
        return {local: process.exitcode for local, process in self._started().items()}

    def _kill(self) -> None:
        for process in self._started().values():
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)


class FunctionAgent(_Functions, elastic.Agent):
    """The agent of one machine."""


class MachineFunctionAgent(_Functions, elastic_machines.MachineAgent):
    """The agent of one of several machines."""


def observing(agent: type[_Functions], endings: Endings) -> type:
    """Return a class of agents that note how the processes end.

    Args:
        agent: one of the classes of this module.
        endings: where to.
    """
    return type(agent.__name__, (agent,), {"endings": endings})


def files_of_output(directory: str) -> WrittenByWorkers:
    """Return what makes torch print the output of processes, each line with a prefix.

    Args:
        directory: where their files are.
    """
    return WrittenByWorkers(log_dir=directory, tee=Std.ALL)
