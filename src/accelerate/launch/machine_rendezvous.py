"""Several machines under torch's elastic launcher, one launcher on each: they join rounds together and watch each other.

Torch's own rendezvous names neither a machine that is cut off (its peers wait until a collective times out) nor one that disagrees,
and lets machines count restarts differently. So machine 0's launcher holds a store (torch's `TCPStore`) at the main address and
port; every other launcher is a client of it, and so are the processes. All of it is polled, so that a signal is answered meanwhile.

- A *round* is one start of all processes. Its number is how often the run has been restarted.
- Before a round, each machine writes its record under its number, again and again. When all records are there, the round begins. A
  record that stands still belongs to a launcher that is gone, and its number is free.
- A machine that wants a restart opens the next round; the others see that, stop their processes and join it.
- The processes of a round use the same store, or, after a restart, another one of machine 0's.
- Every launcher counts up a key once a second. A machine whose key stands still is lost: a cut link sends no message.

Importing this module imports torch.

Source: https://docs.pytorch.org/docs/stable/elastic/customization.html
"""

import contextlib
import json
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.agent.server import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from accelerate.config.exit_status import PREEMPTED
from accelerate.launch import elastic, heartbeat, network
from accelerate.launch.errors import LaunchError, RunError
from accelerate.launch.failures import endings_of
from accelerate.launch.heartbeat import Heartbeat, MachineLost, Member, line_of

# How often a launcher looks for the others, and how often it reports that it waits.
_LOOK_S = 0.1
_REPORT_S = 15.0
# How long one request to the store may take while the machines join.
_ANSWER_S = 30.0
# After how long a record that stands still is taken over.
_STALE_S = 5.0
# How long a launcher that gives up tries to withdraw its record.
_WITHDRAW_S = 2.0
# How long the processes of this machine have to end by themselves when those of another one have failed.
_FOLLOWING_S = 5.0
_WITHDRAWN = "withdrawn"


class FailedElsewhere(RunError):
    """Processes of another machine have failed, or saved their run; `what` is `Heartbeat.failure`."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}. Its messages are there; the processes of this machine were stopped.")
        if is_preempted(what):
            self.status = PREEMPTED


def is_preempted(what: str) -> bool:
    """Return whether a machine's line about its failed processes says that they have saved their run."""
    return what.endswith(f"exit status {PREEMPTED}")


class MachineRendezvous(StaticTCPRendezvous):
    """The rendezvous of one launcher with those of the other machines.

    Args:
        host: name or address of machine 0.
        port: the port there.
        machines: how many machines take part.
        machine: the number of this one; None takes a free one, 0 on the machine that has the address.
        processes: how many processes this machine runs.
        join_timeout: how long to wait for the others, in seconds.
        heartbeat_timeout: after how many seconds of silence a machine is lost.
        report: prints a line for the user.
        restarts: how often the run may be restarted.
        role: the role of the processes of this machine.
    """

    def __init__(
        self,
        host: str,
        port: int,
        machines: int,
        machine: int | None,
        processes: int,
        join_timeout: float = 600.0,
        heartbeat_timeout: float = 30.0,
        report: Callable[[str], None] = print,
        restarts: int = 0,
        role: str = "default_role",
    ) -> None:
        super().__init__(host, port, machine or 0, machines, "accelerate_machines", join_timeout)
        self.host, self.port, self.machines, self.machine = host, port, machines, machine
        self.join_timeout, self.heartbeat_timeout, self.report = join_timeout, heartbeat_timeout, report
        self.is_host = machine == 0 or (machine is None and network.is_this_machine(host))
        self._numbers = [0] if self.is_host else [machine] if machine is not None else list(range(1, machines))
        identity = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:12]}"
        self._record = {"machines": machines, "processes": processes, "restarts": restarts, "role": role}
        self._record |= {"host": socket.gethostname(), "identity": identity}
        self.round, self.members, self.heartbeat = -1, [], None
        self._server: TCPStore | None = None
        self._round_server: TCPStore | None = None
        self._client: TCPStore | None = None
        self._run = ""  # whose store it is: machine 0 may be started anew, with an empty one
        self._written: tuple[int, str, str] | None = None  # the round, the key and the record of this machine
        self._seen: dict[str, tuple[str, float]] = {}  # records of other machines under wanted numbers, and since when
        self._beat, self._next_report = 0, 0.0

    # -- joining -----------------------------------------------------------------------------------------------------

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round and wait until all machines have.

        Raises:
            LaunchError: the machines do not agree on what is run.
            RunError: a machine did not come in time.
        """
        self._stop_heartbeat()
        # After a machine was lost, the former connection may hang.
        self._client, self._written, self._seen = None, None, {}
        deadline, self._next_report = time.monotonic() + self.join_timeout, time.monotonic() + _REPORT_S
        try:
            while not self._join(deadline):
                time.sleep(_LOOK_S)
            port = self._open_store(deadline)
        except BaseException:
            self._withdraw()
            raise
        self.heartbeat = Heartbeat(self)
        self.heartbeat.start()
        store = PrefixStore(f"round/{self.round}", self._client)
        return RendezvousInfo(store, self.machine, self.machines, RendezvousStoreInfo(self.host, port))

    def _join(self, deadline: float) -> bool:
        """Take one step towards the next round; return whether it has begun with this machine."""
        try:
            if self._client is None:
                self._connect(deadline)
            return self._step(self._client, deadline)
        except (
            RuntimeError,
            ConnectionError,
            TimeoutError,
        ) as error:  # torch's own errors of a store are RuntimeErrors
            if isinstance(error, RunError):
                raise
            self._client = None
            if self.is_host or time.monotonic() > deadline:
                raise RunError(
                    f"The store at {self.host}, port {self.port}, cannot be used: {line_of(error)}"
                ) from error
            return False

    def _connect(self, deadline: float) -> None:
        limit = timedelta(seconds=_ANSWER_S)
        if self.is_host:
            if self._server is None:
                self._server = self._serve()
                self._server.set("run", self._record["identity"])
            self._client = self._server
        else:
            network.wait_for(self.host, self.port, round(max(deadline - time.monotonic(), 0.0), 1), self.report)
            self._client = TCPStore(self.host, self.port, is_master=False, timeout=limit, wait_for_workers=False)
        self._record["address"] = network.local_address(self.host, self.port)
        run = self._client.get("run").decode()
        if run != self._run:
            self._run, self.round = run, -1

    def _serve(self) -> TCPStore:
        try:
            return _server(self.host, self.port)
        except (RuntimeError, ValueError) as error:
            raise RunError(
                f"Machine 0 cannot listen at {self.host}, port {self.port}: {line_of(error)}. Choose a free --main_process_port, on all "
                "machines, and let --main_process_ip be an address of machine 0."
            ) from error

    def _step(self, store: Store, deadline: float) -> bool:
        number = int(store.compare_set("round", "", "0"))
        if number == self.round:  # a machine of the last round opens the next one
            number = int(store.compare_set("round", str(number), str(number + 1)))
        keys = [f"member/{number}/{machine}" for machine in range(self.machines)]
        if not store.check([f"begun/{number}"]):
            self._write_record(store, number)
            if not store.check(keys):
                self._wait(store, keys, deadline)
                return False
        records = [text.decode() for text in store.multi_get(keys)]
        if _WITHDRAWN in records:
            self._wait(store, keys, deadline)
            return False
        members = [Member(**json.loads(text)) for text in records]
        if self._record["identity"] not in [member.identity for member in members]:
            # This launcher is new, the run is not. Only the machines in it may end a round: this one may be one too many.
            self._wait_for_restart(deadline)
            return False
        store.set(f"begun/{number}", "1")
        self.round, self.members, self._written = number, members, None
        self._check_agreement()
        return True

    def _write_record(self, store: Store, number: int) -> None:
        """Write the record of this machine under its number in the round, or a free one; again, to show that it waits."""
        self._beat += 1
        now, held = time.monotonic(), []
        for machine in sorted(self._numbers, key=lambda machine: machine != self.machine):
            key = f"member/{number}/{machine}"
            text = json.dumps({**self._record, "machine": machine, "beat": self._beat})
            found = store.compare_set(key, "", text).decode()
            holder = None if found == _WITHDRAWN else Member(**json.loads(found))
            first, since = self._seen.setdefault(key, (found, now))
            stale = found == first and now - since > _STALE_S
            if holder is None or holder.identity == self._record["identity"] or stale:
                found = found if found == text else store.compare_set(key, found, text).decode()
                if found == text:
                    self.machine, self._written = machine, (number, key, text)
                    store.set(f"state/{number}/{machine}", "{}")
                    return
            elif now - since > _STALE_S:
                held.append(holder)
        if len(held) < len(self._numbers):
            return
        if len(self._numbers) > 1 or self.machine is None:
            raise LaunchError(
                f"There are {self.machines} machines already; this one is one too many. Correct --num_machines."
            )
        raise LaunchError(
            f"--machine_rank is {self.machine} on this machine ({socket.gethostname()}) and on {held[0].host} ({held[0].address}) too. "
            "Give each machine a number of its own."
        )

    def _wait(self, store: Store, keys: list[str], deadline: float) -> None:
        """Report which machines have not come; an error after the deadline."""
        now = time.monotonic()
        if now <= min(deadline, self._next_report):
            return
        missing = [
            str(machine)
            for machine, key in enumerate(keys)
            if not store.check([key]) or store.get(key).decode() == _WITHDRAWN
        ]
        line = f"machine {', '.join(missing)} of {self.machines} (numbered from 0)"
        if now > deadline:
            raise RunError(
                f"{line} did not come to {self.host}, port {self.port}, within {self.join_timeout:g} s. Start the same command there, "
                "with its own --machine_rank; --rdzv_conf join_timeout=SECONDS waits longer."
            )
        self.report(f"waiting for {line} to come to {self.host}, port {self.port}")
        self._next_report = now + _REPORT_S

    def _wait_for_restart(self, deadline: float) -> None:
        if self._next_report != float("inf"):
            self.report("the run has begun without this machine, and lets it in when it restarts")
            self._next_report = float("inf")
        if time.monotonic() > deadline:
            raise RunError(
                f"The run at {self.host}, port {self.port}, goes on without this machine, and has not restarted within "
                f"{self.join_timeout:g} s. Is another launcher of it running here?"
            )

    def _check_agreement(self) -> None:
        mine = self.members[self.machine]
        for other in self.members:
            for flag, name in (
                ("--num_machines", "machines"),
                ("processes of each machine", "processes"),
                ("--max_restarts", "restarts"),
            ):
                here, there = getattr(mine, name), getattr(other, name)
                if here != there:
                    if self.is_host:
                        time.sleep(
                            3 * _LOOK_S
                        )  # the store ends with this launcher; the others must read the records first
                    raise LaunchError(
                        f"The machines do not agree on {flag}: {here} on {mine}, {there} on {other}. Give all of them the same "
                        f"--num_machines, --num_processes and --max_restarts ({name} differ)."
                    )

    def _open_store(self, deadline: float) -> int:
        """Return the port of the store that the processes of this round use.

        Torch leaves the addresses of the last round in a store, so each round but the first one has a store of its own.
        """
        key = f"port/{self.round}"
        if self.is_host:
            self._round_server = _server(self.host, 0) if self.round else self._server
            self._client.set(key, str(self._round_server.port))
        while not self._client.check([key]):  # a request that waits would leave signals unanswered
            if time.monotonic() > deadline:
                raise RunError(f"Machine 0 at {self.host}, port {self.port}, has not opened the round in time.")
            time.sleep(_LOOK_S)
        return int(self._client.get(key))

    def _withdraw(self) -> None:
        """Free the number of this machine, so that the round does not begin without it."""
        if self._written is None or self.is_host or self._client is None:
            return
        _, key, text = self._written
        with contextlib.suppress(RuntimeError):
            self._client.set_timeout(timedelta(seconds=_WITHDRAW_S))
            self._client.compare_set(key, text, _WITHDRAWN)

    # -- while the processes run -------------------------------------------------------------------------------------

    def num_nodes_waiting(self) -> int:
        """Return 1 when another machine has opened the next round: torch restarts the processes then."""
        return int(self.heartbeat is not None and self.heartbeat.round > self.round)

    def leave(self, saving: float = 0.0) -> None:
        """End the rendezvous for this launcher. The store ends with machine 0's, so that one waits until the others have the news.

        Args:
            saving: how long machine 0 waits for machines whose processes save their run, in seconds.
        """
        beat = self.heartbeat
        if beat is None:
            return
        if not beat.has_reported:
            beat.report_end("has left the run")
        beat.publish(left=True)
        others = set(range(self.machines)) - {self.machine}
        started = time.monotonic()
        while self.is_host and not others <= beat.machines_that("left"):
            saves = saving and not beat.notice and beat.failure is not None and is_preempted(beat.failure)
            if not saves and others <= beat.machines_that("heard") | beat.machines_that("left"):
                break
            if time.monotonic() - started > (saving if saves else 3 * heartbeat.BEAT_S):
                break
            time.sleep(_LOOK_S)
        self._stop_heartbeat()

    def _stop_heartbeat(self) -> None:
        if self.heartbeat is not None:
            self.heartbeat.stop()
            self.heartbeat = None


def _server(host: str, port: int) -> TCPStore:
    limit = timedelta(seconds=_ANSWER_S)
    return TCPStore(host, port, None, True, limit, wait_for_workers=False, **elastic.without_libuv())


class MachineAgent(elastic.Agent):
    """The agent of one of several machines: it follows what happens on the others."""

    _failed_since: float | None = None

    @property
    def _machines(self) -> MachineRendezvous:
        return self.get_worker_group().spec.rdzv_handler

    def run(self, *args: Any, **kwargs: Any) -> RunResult:
        """Start the processes and watch them; leave the rendezvous at the end, which torch does not do after a signal."""
        try:
            return super().run(*args, **kwargs)
        except SignalException as error:
            if self._machines.heartbeat is not None:
                self._machines.heartbeat.report_end(f"was stopped by {signal.Signals(error.sigval).name}")
            raise
        finally:
            self._machines.leave(elastic.ENDING_S)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        # Torch counts restarts by machine, and the processes find each other by that count. Here the round is the count.
        self._remaining_restarts = max(worker_group.spec.max_restarts - self._machines.round, 0)
        self._failed_since = None

    def _assign_worker_ranks(self, store: Any, group_rank: int, machines: int, spec: WorkerSpec) -> list[Worker]:
        # Torch lets the machines exchange through the store what their records say already. A machine that has died since would
        # keep the others there, deaf to signals.
        size, roles = spec.local_world_size, [member.role for member in self._machines.members]
        role_base = roles[:group_rank].count(spec.role) * size
        return [
            Worker(
                local_rank=local,
                global_rank=group_rank * size + local,
                role_rank=role_base + local,
                world_size=machines * size,
                role_world_size=roles.count(spec.role) * size,
            )
            for local in range(size)
        ]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        elsewhere, lost = self._machines.heartbeat.failure, self._machines.heartbeat.lost()
        if elsewhere is not None and is_preempted(elsewhere):
            self._remaining_restarts = 0
        # A machine that has failed, or saved its run, leaves; that is no news.
        if lost is not None and (elsewhere is None or self._remaining_restarts):
            return self._give_up(worker_group, lost)
        result = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            return self._failed_here(result, elsewhere)
        if result.state == WorkerState.HEALTHY and elsewhere is not None and not self._remaining_restarts:
            self._failed_since = self._failed_since or time.monotonic()
            patience = elastic.ENDING_S if is_preempted(elsewhere) else _FOLLOWING_S
            if time.monotonic() - self._failed_since > patience:
                self._stop_workers(worker_group)
                raise FailedElsewhere(elsewhere)
        return result

    def _give_up(self, worker_group: WorkerGroup, lost: MachineLost) -> RunResult:
        """End the processes of this machine because another machine is lost; start a new round if there may be one."""
        may_restart = self._remaining_restarts and not self._forwarded
        if may_restart:
            self._machines.report(str(lost))
        self._stop_workers(worker_group)
        if not may_restart:
            for number in self._forwarded:
                raise elastic.stopped_by(number)
            raise lost
        self._machines.report(
            f"waiting up to {self._machines.join_timeout:g} s for all {self._machines.machines} machines to be back; start the same "
            "command on the one that is lost"
        )
        return RunResult(state=WorkerState.FAILED)

    def _failed_here(self, result: RunResult, elsewhere: str | None) -> RunResult:
        first, beat = endings_of(result.failures)[0], self._machines.heartbeat
        if first.follows and not self._remaining_restarts:
            # All of them have lost a peer. The machine of that peer is about to report it.
            deadline = time.monotonic() + _FOLLOWING_S
            while beat.failure is None and beat.lost() is None and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
            elsewhere = beat.failure
            if elsewhere is not None:
                raise FailedElsewhere(elsewhere)
        if elsewhere is None:
            beat.report_failure(f"rank {first.rank} ended with exit status {first.status}")
        elif not self._remaining_restarts and not is_preempted(elsewhere):
            self._machines.report(f"{elsewhere}, too; its messages are there")
        return result

    def _exit_barrier(self) -> None:
        """Wait for the other machines, as long as they answer: machine 0 holds the store that all processes use."""
        beat = self._machines.heartbeat
        beat.report_done()
        while not beat.all_done():
            lost = beat.lost()
            if beat.failure is not None:
                raise FailedElsewhere(beat.failure)
            if lost is not None:
                raise lost
            time.sleep(_LOOK_S)
