"""Several machines under torch's elastic launcher, one launcher on each. Importing this module imports torch.

Torch's own rendezvous for several machines notices neither a machine that is cut off (its processes' peers wait until a
collective times out) nor agrees on how often the run was restarted (on which the processes' meeting point depends). So the
machines meet by `accelerate.launch.meeting`.

Source: https://pytorch.org/docs/stable/elastic/customization.html
"""

import signal
import time
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig

from accelerate.launch import elastic
from accelerate.launch.meeting import Elsewhere, Meeting, is_preempted
from accelerate.launch.runners.failures import Reporter, endings_of

# The name under which torch finds the rendezvous below.
MACHINES = "accelerate_machines"
# How long the processes of this machine have to end by themselves when those of another one have failed or saved themselves.
_FOLLOWING_S = 5.0
_LOOK_S = 0.05


class MachinesRendezvous(RendezvousHandler):
    """Torch's interface to a `Meeting`.

    Args:
        meeting: the machines.
    """

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return MACHINES

    @property
    def use_agent_store(self) -> bool:
        """True: the processes meet at machine 0's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all machines are there; see `Meeting.join`."""
        store = self.meeting.join()
        place = RendezvousStoreInfo(self.meeting.host, self.meeting.meeting_port)
        return RendezvousInfo(store, self.meeting.machine, self.meeting.machines, place)

    def is_closed(self) -> bool:
        """False: a run is over when its processes are."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 1 when another machine has opened the next round: torch restarts the processes then."""
        return int(self.meeting.reopened())

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return MACHINES

    def shutdown(self) -> bool:
        """Leave the meeting."""
        self.meeting.leave(elastic.ENDING_S)
        return True


class MachineAgent(elastic.Agent):
    """Our agent on one of several machines: it follows what happens on the others."""

    _failed_since: float | None = None
    _meets = False

    @property
    def _meeting(self) -> Meeting:
        return self._worker_group.spec.rdzv_handler.meeting

    def run(self, *args: Any, **kwargs: Any) -> RunResult:
        """Start the processes and watch over them; leave the meeting at the end, which torch does not do after a signal."""
        try:
            return super().run(*args, **kwargs)
        except SignalException as error:
            self._meeting.say_ended(f"was stopped by {signal.Signals(error.sigval).name}")
            raise
        finally:
            self._meeting.leave(elastic.ENDING_S)

    def forward(self, number: int) -> None:
        """Pass a signal on to the processes; while the machines wait for each other, end the launcher.

        Args:
            number: the signal.

        Raises:
            SignalException: there are no processes, or it was sent once more.
        """
        if self._meets:
            self._leave_meeting(number)
        super().forward(number)

    def stop(self, number: int) -> None:
        """End the run because of a signal; see `elastic.Agent.stop`.

        Args:
            number: the signal.

        Raises:
            SignalException: torch's launcher ends the processes then.
        """
        if self._meets:
            self._leave_meeting(number)
        super().stop(number)

    def _leave_meeting(self, number: int) -> None:
        self._meets = False
        raise SignalException(f"got {signal.Signals(number).name}", sigval=signal.Signals(number))

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._meets = True
        try:
            for number in self._received:  # while the processes of the last round were ended
                self._leave_meeting(number)
            super()._rendezvous(worker_group)
        finally:
            self._meets = False
        # Torch counts restarts by machine, and lets the processes meet by that number. Here the round is the number.
        self._remaining_restarts = max(worker_group.spec.max_restarts - self._meeting.round, 0)
        self._failed_since = None

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        # Torch lets the machines exchange through the store what they have told each other already. A machine that has died since
        # would keep the others there, deaf to signals.
        members = [self._meeting.members[number] for number in range(group_world_size)]
        alike = [member.role == spec.role for member in members]
        base, role_base = group_rank * spec.local_world_size, sum(alike[:group_rank]) * spec.local_world_size
        return [
            Worker(
                local_rank=local,
                global_rank=base + local,
                role_rank=role_base + local,
                world_size=group_world_size * spec.local_world_size,
                role_world_size=sum(alike) * spec.local_world_size,
            )
            for local in range(spec.local_world_size)
        ]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        elsewhere, lost = self._meeting.failed_elsewhere(), self._meeting.lost()
        if elsewhere is not None and is_preempted(elsewhere):
            self._remaining_restarts = 0
        # Whoever has failed, or saved itself, leaves; that is no news.
        if lost is not None and (elsewhere is None or self._remaining_restarts):
            return self._give_up(worker_group, lost)
        result = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            return self._failed_here(result, elsewhere)
        if result.state == WorkerState.HEALTHY and elsewhere is not None and not self._remaining_restarts:
            self._failed_since = self._failed_since or time.monotonic()
            if time.monotonic() - self._failed_since > self._patience(elsewhere):
                self._stop_workers(worker_group)
                raise Elsewhere(elsewhere)
        return result

    def _patience(self, elsewhere: str) -> float:
        return elastic.ENDING_S if is_preempted(elsewhere) else _FOLLOWING_S

    def _give_up(self, worker_group: WorkerGroup, lost: Exception) -> RunResult:
        """End the processes of this machine because another machine is lost; go on with a new round if there may be one."""
        if self._forwarded:
            self._stop_workers(worker_group)
            number = signal.Signals(next(iter(self._forwarded)))
            raise SignalException(f"got {number.name}, and a machine has left", sigval=number)
        if not self._remaining_restarts:
            self._stop_workers(worker_group)
            raise lost
        self._meeting.tell(str(lost))
        self._stop_workers(worker_group)
        self._meeting.tell(
            f"waiting up to {self._meeting.join_timeout:g} s for all {self._meeting.machines} machines to be back; start the same "
            "command on the one that is lost"
        )
        self._meeting.forget()
        return RunResult(state=WorkerState.FAILED)

    def _failed_here(self, result: RunResult, elsewhere: str | None) -> RunResult:
        first = endings_of(result.failures)[0]
        if first.follows and not self._remaining_restarts:
            # All of them have lost a peer. The machine where that one ran is about to say so.
            deadline = time.monotonic() + _FOLLOWING_S
            while elsewhere is None and self._meeting.lost() is None and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
                elsewhere = self._meeting.failed_elsewhere()
            if elsewhere is not None:
                raise Elsewhere(elsewhere)
        if elsewhere is None:
            self._meeting.say_failed(f"rank {first.rank} ended with exit status {first.status}")
        elif not self._remaining_restarts and not is_preempted(elsewhere):
            self._meeting.tell(f"{elsewhere}, too; its messages are there")
        return result

    def _exit_barrier(self) -> None:
        """Wait for the other machines, as long as they answer: machine 0 holds the store that all processes use."""
        self._meeting.say_done()
        interval = self._worker_group.spec.monitor_interval
        while not self._meeting.all_done():
            lost, elsewhere = self._meeting.lost(), self._meeting.failed_elsewhere()
            if elsewhere is not None:
                raise Elsewhere(elsewhere)
            if lost is not None:
                raise lost
            time.sleep(interval)


_handler: list[MachinesRendezvous] = []
_registered: set[str] = set()


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return _handler.pop()  # nobody else keeps it: the port is free when the run is over


def make_config(
    meeting: Meeting, local_address: str, log_dir: str, tee: str | Mapping[int, int] = "0", **rest: Any
) -> LaunchConfig:
    """Return the settings of torch's elastic launcher for one of several machines.

    Args:
        meeting: the machines.
        local_address: the address of this one that the others reach.
        log_dir: as in `elastic.make_config`.
        tee: as in `elastic.make_config`.
        rest: further fields of `torch.distributed.launcher.api.LaunchConfig`.
    """
    if MACHINES not in _registered:
        rendezvous_handler_registry.register(MACHINES, _create)
        _registered.add(MACHINES)
    _handler[:] = [MachinesRendezvous(meeting)]
    return LaunchConfig(
        min_nodes=meeting.machines,
        max_nodes=meeting.machines,
        nproc_per_node=meeting.processes,
        run_id=MACHINES,
        rdzv_endpoint=f"{meeting.host}:{meeting.port}",
        rdzv_backend=MACHINES,
        local_addr=local_address,
        logs_specs=elastic.logs_specs(log_dir, tee),
        **elastic.own_signals(),
        **rest,
    )


def start(
    config: LaunchConfig,
    program: str,
    arguments: tuple[str, ...],
    environment: Mapping[str, str],
    verbose: bool,
    reporter: Reporter,
) -> None:
    """Start the processes of this machine and wait for those of all; the arguments are those of `elastic.start`.

    Raises:
        MachineLost: a machine does not answer any more, and there is no restart left.
        Elsewhere: processes of another machine have failed.
        RunError: not all machines came.
    """
    elastic.start(config, program, arguments, environment, verbose, MachineAgent, reporter)
