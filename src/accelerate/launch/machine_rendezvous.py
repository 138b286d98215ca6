"""Several machines under torch's elastic launcher, one launcher on each: they join rounds together and watch each other.

Torch's own rendezvous names neither a machine that is cut off (its peers wait until a collective times out) nor one that disagrees,
and lets machines count restarts differently. So machine 0's launcher holds a store (torch's `TCPStore`) at the main address and
port; every other launcher is a client of it, and so are the processes. All of it is polled, so that a signal is answered meanwhile.

- A *round* is one start of all processes: "RUN/0", "RUN/1", ... A machine that wants a restart opens the next round; the others see
  that, stop their processes and join it.
- Each machine writes its record under its number, again and again. Machine 0 alone reads them. When all are there and agree, it begins
  the round: it writes down who takes part and at which port the processes meet; the others look at that key. A record that stands still
  belongs to a launcher that is gone, and its number is free.
- While the processes run, every launcher publishes a heartbeat. Machine 0 sums them up, and the others read the sum. A machine whose
  heartbeat stands still is lost: a cut link sends no message.

Importing this module imports torch.

Source: https://docs.pytorch.org/docs/stable/elastic/customization.html
"""

import json
import random
import signal
import socket
import threading
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

from accelerate._warn import printable
from accelerate.launch import elastic, hardware
from accelerate.launch.errors import LaunchError, RunError, endings_of, follows
from accelerate.launch.plan import Rendezvous
from accelerate.runtime.failure import MACHINES, PREEMPTED
from accelerate.runtime.rendezvous import serve

# How often a launcher looks for the others, many of them more seldom; and how often it reports that it waits.
_LOOK_S = 0.1
_LOOKS_PER_SECOND = 2000
_REPORT_S = 10.0
# How long one request to the store may take while the machines join, and one attempt to reach it.
_ANSWER_S = timedelta(seconds=30)
_CONNECT_S = 5.0
# For how long a record may stand still and its machine is there; after how long it is taken over.
_FRESH_S = 1.0
_STALE_S = 5.0
# How long the processes of this machine have to end by themselves when those of another one have failed.
_FOLLOWING_S = 5.0
# How often a launcher publishes its heartbeat.
_BEAT_S = 1.0
# Characters of what another machine says, and how many missing ones are named.
_LONGEST, _NAMED = 500, 16
# What must be equal on all machines, and the option that says it.
_CHECKS = {"machines": "--num_machines", "processes": "processes of each machine", "restarts": "--max_restarts"}


# What a machine says of itself: its number (`machine`), `host`, `address` and what `_CHECKS` names; an `identity` that differs from
# launcher to launcher; and a `beat`, which counts up while the machine waits.
Record = dict[str, Any]


class FailedElsewhere(RunError):
    """Processes of another machine have failed, or saved their run; `what` is what `Heartbeat.failure` returned."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}. Its messages are there; the processes of this machine were stopped.")
        if is_preempted(what):
            self.status = PREEMPTED


def is_preempted(what: str | None) -> bool:
    """Return whether a machine's line about its failed processes says that they have saved their run."""
    return what is not None and what.endswith(f"exit status {PREEMPTED}")


# -- joining -----------------------------------------------------------------------------------------------------------


class MachineRendezvous(StaticTCPRendezvous):
    """The rendezvous of one launcher with those of the other machines.

    A RunError says that machine 0 cannot be looked up or reached. `meet.settings` hold the seconds to wait for the
    others (`join_timeout`, or `timeout`) and those of silence after which a machine is lost (`heartbeat_timeout`).
    Without `meet.machine`, the machine that has the address is 0, and each of the others takes a free number.
    `variables` let the processes talk through the interface that the other machines reach.
    """

    def __init__(self, meet: Rendezvous, processes: int, restarts: int = 0, report: Callable = print) -> None:
        host, port, machines, machine, conf = meet.host, meet.port, meet.machines, meet.machine, meet.settings
        self.join_timeout = float(conf.get("join_timeout", conf.get("timeout", 600)))
        self.heartbeat_timeout = float(conf.get("heartbeat_timeout", 30))
        super().__init__(host, port, machine or 0, machines, "accelerate_machines", self.join_timeout)
        self.host, self.port, self.machines, self.machine, self.report = host, port, machines, machine, report
        address = hardware.local_address(host, port)
        self.variables = hardware.gloo_variables(address)
        self.is_host = machine == 0 or (machine is None and hardware.is_this_machine(host))
        # Machines without a number try them in different orders, so that each finds a free one soon.
        free = random.SystemRandom().sample(range(1, machines), max(machines - 1, 0))
        self._numbers = [0] if self.is_host else free if machine is None else [machine]
        self._record: Record = {"machines": machines, "processes": processes, "restarts": restarts, "beat": 0}
        self._record |= {"host": socket.gethostname(), "address": address, "identity": uuid.uuid4().hex[:12]}
        self._place = f"{host}, port {port}"
        self._pause = max(_LOOK_S, machines / _LOOKS_PER_SECOND)
        self.name, self.round, self.members, self.heartbeat = "", -1, [], None
        self.names: dict[int, str] = {}  # of all machines on machine 0; of that one and this one elsewhere
        # The store of the run and that of a round, which machine 0 holds; and the connections to the first.
        self._server = self._round_server = self._client = self.beat_store = None
        self._seen: dict[str, tuple[str, float]] = {}  # the records, and since when they stand still
        self._connected = self._deadline = self._next_report = 0.0

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round and wait for all machines: a LaunchError if they disagree, a RunError if one is late."""
        self._stop_heartbeat()
        # After a machine was lost, the former connection may hang.
        self._client, self._seen = None, {}
        self._deadline, self._next_report = time.monotonic() + self.join_timeout, time.monotonic() + _REPORT_S
        while (port := self._join()) is None:
            time.sleep(self._pause)
        self.heartbeat = Heartbeat(self)
        self.heartbeat.start()
        store = PrefixStore(f"round/{self.round}", self._client)
        return RendezvousInfo(store, self.machine, self.machines, RendezvousStoreInfo(self.host, port))

    def _join(self) -> int | None:
        """Take one step towards the next round; return the port of its processes if it has begun with this machine."""
        try:
            if self._client is None:
                self._listen() if self.is_host else self._connect()
                # A store looks up who connects. Processes that are forked during that inherit a locked resolver, so the heartbeat
                # connects before the round begins.
                self.beat_store = self._client_within(timedelta(seconds=max(self.heartbeat_timeout, 1.0)))
                self._connected = time.monotonic()
            return self._step(self._client)
        except RunError:
            raise
        except (RuntimeError, OSError, UnicodeError, OverflowError) as error:  # torch's own; no listener, name or port
            self._client, reason = None, _line_of(error)
            if self.is_host:
                raise RunError(f"The store at {self._place}, cannot be used: {reason}") from error
            self._wait(f"machine 0 to answer at {self._place}: {reason}")
            return None

    def _connect(self) -> None:
        # Torch's store does not say why it cannot connect, and is deaf to signals meanwhile.
        socket.create_connection((self.host, self.port), timeout=min(_CONNECT_S, self.join_timeout)).close()
        self._client = self._client_within(_ANSWER_S)

    def _client_within(self, limit: timedelta) -> TCPStore:
        return TCPStore(self.host, self.port, is_master=False, timeout=limit, wait_for_workers=False)

    def _listen(self) -> None:
        if self._server is None:
            try:
                self._server = serve(self.host, self.port, _ANSWER_S)
            except (RuntimeError, ValueError) as error:
                hint = "Choose a free --main_process_port, and let --main_process_ip be an address of machine 0."
                raise RunError(f"Machine 0 cannot listen at {self._place}: {_line_of(error)}. {hint}") from error
            # A new launcher of machine 0 begins a new run, with an empty store.
            self._server.set("round", f"{self._record['identity']}/0")
        self._client = self._server

    def _step(self, store: Store) -> int | None:
        name = store.get("round").decode()
        if name == self.name:  # a machine of the last round opens the next one
            run, _, number = name.partition("/")
            name = store.compare_set("round", name, f"{run}/{int(number) + 1}").decode()
        begun = _value(store, f"begun/{name}")
        if begun is None:
            self._write_record(store, name)
            if self.is_host:
                missing = self._arrange(store, name)
            else:
                missing = store.compare_set(f"missing/{name}", "", "").decode()
                if (host := _value(store, f"member/{name}/0")) is not None:
                    self._check_agreement(json.loads(host))
            if missing or not self.is_host:
                machine = f"machine {missing} of {self.machines} (numbered from 0)" if missing else "machine 0"
                self._wait(f"{machine} to come to {self._place}")
            return None
        begun = json.loads(begun)
        if "problem" in begun:
            raise LaunchError(begun["problem"])
        if self._record["identity"] not in begun["members"]:
            # This launcher is new, the run is not. Only the machines in it may end a round: this one may be one too many.
            self._wait(f"the run at {self._place}, to restart: it has begun without this machine")
            return None
        self.run_id = f"{MACHINES}{name[:12]}"  # torch's name for the folder of logs: machines may share --log_dir
        self.name, self.round, self.members = name, int(name.rpartition("/")[2]), begun["members"]
        if not self.is_host:
            self.names = {0: begun["host"], self.machine: _named(self._record | {"machine": self.machine})}
        return begun["port"]

    def _write_record(self, store: Store, name: str) -> None:
        """Write the record of this machine under its number in the round, or a free one; again, to show that it waits."""
        self._record["beat"] += 1
        for machine in sorted(self._numbers, key=lambda machine: machine != self.machine):
            key = f"member/{name}/{machine}"
            text = json.dumps({**self._record, "machine": machine})
            found = store.compare_set(key, "", text).decode()
            holder = json.loads(found)
            if holder["identity"] == self._record["identity"] or self._stands_still(key, found) > _STALE_S:
                found = store.compare_set(key, found, text).decode()
            if found == text:
                self.machine = machine
                return
        if time.monotonic() - self._connected < 2 * _STALE_S:
            return  # it may be the record of a launcher that has just ended
        if self.machine is None:
            raise LaunchError(f"There are {self.machines} machines already (--num_machines); this is one too many.")
        here = f"--machine_rank is {self.machine} on this machine and on {_named(holder)}"
        raise LaunchError(f"{here}; each needs a number of its own.")

    def _stands_still(self, key: str, text: str) -> float:
        """Return for how long a record has not changed, in seconds."""
        now = time.monotonic()
        if self._seen.get(key, ("",))[0] != text:
            self._seen[key] = text, now
        return now - self._seen[key][1]

    def _arrange(self, store: Store, name: str) -> str:
        """Begin the round on machine 0 if all machines wait for it and agree; return the numbers of those that do not wait."""
        keys = [f"member/{name}/{machine}" for machine in range(self.machines)]
        texts = {machine: store.compare_set(key, "", "").decode() for machine, key in enumerate(keys)}
        here = {
            machine: json.loads(text)
            for machine, text in texts.items()
            if text and (self._stands_still(keys[machine], text) < _FRESH_S or machine == 0)
        }
        for other in here.values():
            try:
                self._check_agreement(other)
            except LaunchError as error:
                store.set(f"begun/{name}", json.dumps({"problem": str(error)}))
                time.sleep(3 * self._pause)  # the store ends with this launcher; the others must read that first
                raise
        absent = [str(machine) for machine in range(self.machines) if machine not in here]
        missing = ", ".join([*absent[:_NAMED], "..."] if len(absent) > _NAMED else absent)
        store.set(f"missing/{name}", missing)
        if not missing:
            self.names = {machine: _named(record) for machine, record in here.items()}
            # Torch leaves the addresses of the last round in a store, so each round but the first one has a store of its own.
            self._round_server = self._server if name.endswith("/0") else serve(self.host, 0, _ANSWER_S)
            for machine in here:
                store.set(f"state/{name}/{machine}", "{}")
            store.set(f"all/{name}", "{}")
            members = [here[machine]["identity"] for machine in sorted(here)]
            begun = {"members": members, "port": self._round_server.port, "host": self.names[0]}
            store.set(f"begun/{name}", json.dumps(begun))
        return missing

    def _check_agreement(self, other: Record) -> None:
        mine = self._record | {"machine": self.machine}
        for name, option in _CHECKS.items():
            if self.machine is not None and mine[name] != other[name]:
                said = f"{mine[name]} on {_named(mine)}, {other[name]} on {_named(other)}"
                raise LaunchError(f"The machines do not agree on {option}: {said}. Give all of them the same.")

    def _wait(self, what: str) -> None:
        """Report what this machine waits for; an error after the deadline."""
        now = time.monotonic()
        if now > self._deadline:
            raise RunError(f"Waited {self.join_timeout:g} s (--rdzv_conf join_timeout) in vain for {what}.")
        if now > self._next_report:
            self.report(f"waiting for {what}")
            self._next_report = now + _REPORT_S

    # -- while the processes run -------------------------------------------------------------------------------------

    def num_nodes_waiting(self) -> int:
        """Return 1 when another machine has opened the next round: torch restarts the processes then."""
        return int(self.heartbeat is not None and self.heartbeat.current != self.name)

    def leave(self, saving: float = 0.0) -> None:
        """End the rendezvous; machine 0, which holds the store, waits for the others, `saving` s where they save."""
        beat = self.heartbeat
        if beat is None:
            return
        beat.publish_end("has left the run")
        beat.publish(left=True)
        started = time.monotonic()
        while self.is_host and beat.left < self.machines - 1:
            saves = saving and not beat.says("lost") and is_preempted(beat.failure())
            if time.monotonic() - started > (saving if saves else 3 * _BEAT_S):
                break
            time.sleep(_LOOK_S)
        self._stop_heartbeat()

    def _stop_heartbeat(self) -> None:
        if self.heartbeat is not None:
            self.heartbeat.stop()
            self.heartbeat = None


def _named(member: Record) -> str:
    return printable(f"machine {member['machine']} ({member['host']}, {member['address']})", _LONGEST)


def _value(store: Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def _line_of(error: BaseException) -> str:
    """Return an error of the system or the store in one line; torch may add where in its code it happened."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.splitlines()[0].rstrip(".")


# -- the heartbeat -----------------------------------------------------------------------------------------------------


class Heartbeat(threading.Thread):
    """Publishes the state of this machine in a round once a second, and reads what machine 0 says of all.

    It has a connection of its own: a request to a store behind a cut link does not return, so no other thread waits
    for this one. A state is a count that goes up, and words: a machine is `done` or has `left`, its processes have
    `failed`, a machine is `lost` (the last two are lines for the user). While `busy` is held, the store is used: a
    process that is forked meanwhile would inherit torch's own locks, locked.
    """

    def __init__(self, rendezvous: MachineRendezvous) -> None:
        super().__init__(name="accelerate-heartbeat", daemon=True)
        self._names, self._machine, self._machines = rendezvous.names, rendezvous.machine, rendezvous.machines
        self.own = self._names[self._machine]
        self._store, self._timeout = rendezvous.beat_store, rendezvous.heartbeat_timeout
        self._round = self.current = rendezvous.name
        self._wake, self._stopped, self.busy = threading.Event(), False, threading.Lock()
        self._answered, self._broken = time.monotonic(), ""
        self._state: dict[str, Any] = {"beat": 0}
        self._all: dict[str, Any] = {}  # what machine 0 says of all
        # On machine 0: the beat of each, and since when it stands still.
        self._seen = [(0, self._answered)] * self._machines
        self.left = 0  # on machine 0: how many others have left

    def publish(self, **words: Any) -> None:
        """Let the other machines know what is new; what is said already stays."""
        self._state = {**words, **self._state}
        self._wake.set()

    def publish_end(self, how: str) -> None:
        """Let the other machines know that this launcher leaves a run, so that they need not wait until it is missed."""
        if not self._state.keys() & {"done", "failed"}:
            self.publish(lost=f"{self.own} {how}.")

    def says(self, word: str) -> str | None:
        """Return the first line that a machine has published under a word; None if none has."""
        line = self._all.get(word)
        return line if line is None else printable(line, _LONGEST)

    def failure(self) -> str | None:
        """Return which processes of which machine failed first, as a line; None if none did."""
        return self.says("failed")

    def all_done(self) -> bool:
        """Whether the processes of all machines are done."""
        return "done" in self._all

    def lost(self) -> RunError | None:
        """Return the error that names a machine which does not answer; None if all do."""
        if self.all_done():
            return None
        silent = time.monotonic() - self._answered
        why = f"has not answered for {silent:.0f} s" if silent > self._timeout else ""
        why = f"has closed the connection ({self._broken})" if self._broken else why
        line = self.says("lost")
        if line is None and why:
            line = f"{self._names[0]} {why}: it is down, or one of the two machines is cut off."
        return line and RunError(f"{line} The processes of the other machines are ended.")

    def stop(self) -> None:
        """Publish what is left and end; this waits a moment at most, because the store may never answer."""
        self._stopped = True
        self._wake.set()
        self.join(timeout=1.2)

    def run(self) -> None:
        """Exchange states with the store until the thread is stopped or the connection breaks."""
        pause = min(_BEAT_S, self._timeout / 4) / (1 if self._machine else 4)  # what machine 0 sums up is new
        try:
            last = False
            while not last:
                self._wake.clear()
                last = self._stopped
                with self.busy:
                    self._exchange(self._store)
                if not last:
                    self._wake.wait(pause)
        except Exception as error:
            self._broken = _line_of(error)

    def _exchange(self, store: TCPStore) -> None:
        self._state["beat"] += 1
        store.set(f"state/{self._round}/{self._machine}", json.dumps(self._state))
        if self._machine == 0:
            store.set(f"all/{self._round}", json.dumps(self._summed_up(store)))
        former, self._all = self._all, json.loads(store.get(f"all/{self._round}"))
        if self._all.get("beat") != former.get("beat"):
            self._answered = time.monotonic()
        self.current = store.get("round").decode()

    def _summed_up(self, store: TCPStore) -> dict[str, Any]:
        """Read the states of all machines, and return what they come to; machine 0 alone."""
        texts = store.multi_get([f"state/{self._round}/{machine}" for machine in range(self._machines)])
        states, now = [json.loads(text) for text in texts], time.monotonic()
        for machine, state in enumerate(states):
            if state.get("beat", 0) != self._seen[machine][0]:
                self._seen[machine] = state["beat"], now
            silent = now - self._seen[machine][1]
            if silent > self._timeout and "done" not in state and "left" not in state:
                line = f"{self._names[machine]} has not answered for {silent:.0f} s: it or its network is down."
                self.publish(lost=line)
        self.left = sum("left" in state for state in states[1:])
        found = {word: next((state[word] for state in states if word in state), None) for word in ("failed", "lost")}
        found |= {"beat": states[0]["beat"], "done": all("done" in state for state in states) or None}
        return {word: value for word, value in found.items() if value is not None}


# -- the agent ---------------------------------------------------------------------------------------------------------


class MachineAgent(elastic.Agent):
    """The agent of one of several machines: it follows what happens on the others."""

    @property
    def _machines(self) -> MachineRendezvous:
        return self.get_worker_group().spec.rdzv_handler

    def run(self, *args: Any, **kwargs: Any) -> RunResult:
        """Start the processes and watch them; leave the rendezvous at the end, which torch does not do after a signal."""
        try:
            return super().run(*args, **kwargs)
        except SignalException as error:
            if self._machines.heartbeat is not None:
                self._machines.heartbeat.publish_end(f"was stopped by {signal.Signals(error.sigval).name}")
            raise
        finally:
            self._machines.leave(elastic.ENDING_S)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        # Torch counts restarts by machine, and the processes find each other by that count. Here the round is the count.
        self.restarts_left = max(worker_group.spec.max_restarts - self._machines.round, 0)

    def _assign_worker_ranks(self, store: Any, group_rank: int, machines: int, spec: WorkerSpec) -> list[Worker]:
        # Torch lets the machines exchange through the store what their records say already. A machine that has died since would
        # keep the others there, deaf to signals.
        size, total = spec.local_world_size, machines * spec.local_world_size
        ranks = range(group_rank * size, (group_rank + 1) * size)
        return [Worker(rank % size, rank, role_rank=rank, world_size=total, role_world_size=total) for rank in ranks]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        beat = self._machines.heartbeat
        elsewhere, lost = beat.failure(), beat.lost()
        if is_preempted(elsewhere):
            self.restarts_left = 0
        # A machine that has failed, or saved its run, leaves; that is no news.
        if lost is not None and (elsewhere is None or self.restarts_left):
            return self._give_up(worker_group, lost)
        result = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            return self._failed_here(result)
        if result.state == WorkerState.HEALTHY and elsewhere is not None and not self.restarts_left:
            patience = elastic.ENDING_S if is_preempted(elsewhere) else _FOLLOWING_S
            if not self._within("elsewhere", patience):
                self._stop_workers(worker_group)
                raise FailedElsewhere(elsewhere)
        return result

    def _give_up(self, worker_group: WorkerGroup, lost: RunError) -> RunResult:
        """End the processes of this machine because another machine is lost; start a new round if there may be one."""
        self._stop_workers(worker_group)
        for number in self._forwarded:
            raise elastic.stopped_by(number)
        if not self.restarts_left:
            raise lost
        limit = f"{self._machines.join_timeout:g} s"
        self._machines.report(f"{lost} Waiting up to {limit} for it; start the same command there again.")
        return RunResult(state=WorkerState.FAILED)

    def _failed_here(self, result: RunResult) -> RunResult:
        first, beat = endings_of(result.failures)[0], self._machines.heartbeat
        if follows(first.record) and not self.restarts_left:
            # All of them have lost a peer. The machine of that peer is about to report it.
            deadline = time.monotonic() + _FOLLOWING_S
            while beat.failure() is None and beat.lost() is None and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
            if beat.failure() is not None:
                raise FailedElsewhere(beat.failure())
        beat.publish(failed=f"{beat.own}: rank {first.rank} ended with exit status {first.status}")
        return result

    def _exit_barrier(self) -> None:
        """Wait for the other machines, as long as they answer: machine 0 holds the store that all processes use."""
        beat = self._machines.heartbeat
        beat.publish(done=True)
        while not beat.all_done():
            if beat.failure() is not None:
                raise FailedElsewhere(beat.failure())
            if (lost := beat.lost()) is not None:
                raise lost
            time.sleep(_LOOK_S)
