"""Several machines under torch's elastic launcher, one launcher on each: they join rounds together and watch each other.

Torch's own rendezvous names neither a machine that is cut off (its peers wait until a collective times out) nor one that
disagrees, and lets machines count restarts differently. So machine 0's launcher holds a store (torch's `TCPStore`) at the
main address and port, and every other launcher is a client of it. A thread of each launcher, its `Heartbeat`, talks to the
store. The main thread reads the thread's data, so that it still answers signals.

- Each launcher publishes its state repeatedly: its identity, its round, whether it waits for the next one, how its
  processes ended. Only machine 0 reads the states. It publishes one small answer, which all read. A state that does not
  change belongs to a lost machine: a cut link sends no message.
- A *round* is one start of all processes: "RUN/0", "RUN/1", ... A machine that wants a restart waits for the next round; the
  others see that, stop their processes and also wait. When all numbers are present and agree, machine 0 begins the round:
  it writes down the members and the port at which the processes meet.

Importing this module imports torch.

Source: https://docs.pytorch.org/docs/stable/elastic/customization.html
"""

import json
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from accelerate.base._warn import printable
from accelerate.extensions.machines import addresses
from accelerate.launch import elastic
from accelerate.launch.errors import LaunchError, RunError, endings_of, follows
from accelerate.launch.plan import Rendezvous
from accelerate.runtime.failure import MACHINES, PREEMPTED
from accelerate.runtime.rendezvous import serve

# How often a launcher that waits publishes its state, many of them more seldom; and how often it reports that it waits.
_LOOK_S = 0.1
_LOOKS_PER_SECOND = 2000
_REPORT_S = 10.0
# How long one request to the store of machine 0 may take, and one attempt to reach it.
_ANSWER_S = timedelta(seconds=30)
_CONNECT_S = 5.0
# Seconds that a state may be unchanged while its launcher waits; seconds after which one of two equal numbers is refused.
_FRESH_S = 1.0
_STALE_S = 5.0
# Seconds that this machine's processes have to end themselves after those of another machine have failed.
_FOLLOWING_S = 5.0
# How often a launcher publishes its state while its processes run.
_BEAT_S = 1.0
# Characters of another machine's message, and the number of missing machines that are named.
_LONGEST, _NAMED = 500, 16
# torch's messages about a port that another program has.
_IN_USE = re.compile("EADDRINUSE|in use|only one usage", re.I)
# The settings that must be equal on all machines, and their options.
_CHECKS = {"machines": "--num_machines", "processes": "processes of each machine", "restarts": "--max_restarts"}

# A launcher publishes: its number (`machine`; None if machine 0 numbers it), `host`, `address` and the settings of `_CHECKS`;
# an `identity` that differs between launchers; a `beat`, which counts up; the name of its last `round`, and whether it
# `waits` for the next one. Words about the round: its processes are `done`, it has `left`, its processes have `failed`, a
# machine is `lost` (the last two are lines for the user).
State = dict[str, Any]


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
    Without `meet.machine`, the first launcher of the machine that has the address is 0, and each of the others gets a free number.
    `variables` let the processes talk through the interface that the other machines reach.
    """

    def __init__(self, meet: Rendezvous, processes: int, restarts: int = 0, report: Callable = print) -> None:
        self.host, self.port, self.machines, self.report = meet.host, meet.port, meet.machines, report
        self.join_timeout = float(meet.settings.get("join_timeout", meet.settings.get("timeout", 600)))
        self.heartbeat_timeout = float(meet.settings.get("heartbeat_timeout", 30))
        rank = meet.machine or 0
        super().__init__(self.host, self.port, rank, self.machines, "accelerate_machines", self.join_timeout)
        address = addresses.local_address(self.host, self.port)
        self.variables = addresses.gloo_variables(address)
        self.may_host = meet.machine is None and addresses.is_this_machine(self.host)
        self.is_host = meet.machine == 0 or self.may_host
        self.machine = 0 if self.is_host else meet.machine
        self.record: State = {"machines": self.machines, "processes": processes, "restarts": restarts, "beat": 0}
        self.record |= {"host": socket.gethostname(), "address": address, "identity": uuid.uuid4().hex[:12]}
        self.said: State = {"round": ""}
        self.place, self.pause = f"{self.host}, port {self.port}", max(_LOOK_S, self.machines / _LOOKS_PER_SECOND)
        self.name, self.round, self.members, self.heartbeat = "", -1, [], None
        self.names: dict[int, str] = {}  # of all machines on machine 0; of that one and this one elsewhere
        # Machine 0 holds the store of the run and that of a round, and the last beat of each launcher with its time.
        self.server = self.round_server = None
        self.seen: dict[str, tuple[int, float]] = {}

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round and wait for all machines: a LaunchError if they disagree, a RunError if one is late."""
        beat = self._start_heartbeat()
        began = reported = time.monotonic()
        while (begun := beat.begun_with_me()) is None:
            current_time = time.monotonic()
            if current_time - began > self.join_timeout:
                limit = f"{self.join_timeout:g} s (--rdzv_conf join_timeout)"
                raise RunError(f"Timed out after {limit} waiting for {beat.awaited()}.")
            if current_time - reported > _REPORT_S:
                reported = current_time
                self.report(f"waiting for {beat.awaited()}")
            if self.may_host and not self.is_host and not self.name and beat.is_refused():
                # The launcher that had the port belonged to a run that is over.
                self.is_host, self.machine = True, 0
                beat = self._start_heartbeat()
            time.sleep(_LOOK_S)
        self.name, self.members = begun["round"], begun["members"]
        self.machine, self.round = self.members.index(self.record["identity"]), int(self.name.rpartition("/")[2])
        # Torch's name for the folder of logs: machines may share --log_dir.
        self.run_id = f"{MACHINES}{self.name[:12]}"
        if not self.is_host:
            self.names = {0: begun["host"], self.machine: _named(self.record | {"machine": self.machine})}
        self.said = {"round": self.name, "machine": self.machine, "waits": False}
        store = PrefixStore(f"round/{self.round}", beat.store)
        return RendezvousInfo(store, self.machine, self.machines, RendezvousStoreInfo(self.host, begun["port"]))

    def _start_heartbeat(self) -> "Heartbeat":
        self._stop_heartbeat()  # after a machine was lost, its connection may hang
        if self.is_host and self.server is None:
            self._listen()
        self.said = {**self.said, "machine": self.machine, "waits": True}
        self.heartbeat = Heartbeat(self)
        self.heartbeat.start()
        return self.heartbeat

    def _listen(self) -> None:
        try:
            self.server = serve(self.host, self.port, _ANSWER_S)
        except (RuntimeError, ValueError) as error:
            if self.may_host and _IN_USE.search(str(error)):  # by another launcher of this machine, which is 0
                self.is_host, self.machine = False, None
                return
            hint = "Choose a free --main_process_port, and let --main_process_ip be an address of machine 0."
            raise RunError(f"Machine 0 cannot listen at {self.place}: {_line_of(error)}. {hint}") from error
        # A new launcher of machine 0 begins a new run, with an empty store.
        self.server.set("answer", json.dumps({"beat": 0, "round": ""}))

    def begin(self, launchers: dict[int, State]) -> str:
        """Begin the next round with the launchers of all machines, by number; return its name. Only machine 0 calls it."""
        self.names = {machine: _named(state) for machine, state in launchers.items()}
        # Torch keeps the addresses of the last round in a store, so each round but the first one has its own store.
        self.round_server = serve(self.host, 0, _ANSWER_S) if self.members else self.server
        self.members = [launchers[machine]["identity"] for machine in sorted(launchers)]
        name = f"{self.record['identity']}/{self.round + 1}"
        begun = {"round": name, "members": self.members, "port": self.round_server.port, "host": self.names[0]}
        self.server.set(f"begun/{name}", json.dumps(begun))
        return name

    def num_nodes_waiting(self) -> int:
        """Return 1 when another machine waits for the next round: torch restarts the processes then."""
        return int(self.heartbeat is not None and self.heartbeat.next_is_open())

    def leave(self, saving: float = 0.0) -> None:
        """End the rendezvous; machine 0, which holds the store, waits for the others, `saving` s where they save."""
        beat = self.heartbeat
        if beat is None:
            return
        beat.publish_end("has left the run")
        beat.publish(left=True)
        started = time.monotonic()
        while self.is_host and beat.others and (self.name or "problem" in beat.answer):
            saves = saving and not beat.says("lost") and is_preempted(beat.failure())
            if time.monotonic() - started > (saving if saves else 3 * _BEAT_S):
                break
            time.sleep(_LOOK_S)
        self._stop_heartbeat()

    def _stop_heartbeat(self) -> None:
        if self.heartbeat is not None:
            self.heartbeat.stop()
            self.heartbeat = None


def _named(state: State) -> str:
    return printable(f"machine {state['machine']} ({state['host']}, {state['address']})", _LONGEST)


def _line_of(error: BaseException) -> str:
    """Return an error of the system or the store in one line; torch may add where in its code it happened."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.splitlines()[0].rstrip(".")


# -- the heartbeat -----------------------------------------------------------------------------------------------------


class Heartbeat(threading.Thread):
    """Publishes the state of this machine, and reads machine 0's answer; on machine 0 it reads all states and computes the answer.

    Only this thread uses the connection to the store: a request over a cut link does not return. While `busy` is held, the
    store is in use: a process forked at that moment would inherit torch's own locks, locked.
    """

    def __init__(self, rendezvous: MachineRendezvous) -> None:
        super().__init__(name="accelerate-heartbeat", daemon=True)
        self._home = rendezvous
        self._wake, self._stopped, self.busy = threading.Event(), False, threading.Lock()
        self.store: TCPStore | None = None
        self._answered, self._broken = time.monotonic(), "no answer yet"
        self.answer: State = {"round": rendezvous.name}
        self._begun: State = {"round": rendezvous.name}
        self.others = 0  # on machine 0: how many launchers are there besides this one
        self._silent: list[str] = []  # on machine 0: the line about the first machine that did not answer

    # -- the main thread asks ----------------------------------------------------------------------------------------

    @property
    def machine_name(self) -> str:
        """The name of this machine."""
        return self._home.names.get(self._home.machine, "")

    def begun_with_me(self) -> State | None:
        """Return who takes part in the next round, and where, once it has begun with this machine; LaunchError if it is refused."""
        home = self._home
        refusal = self.answer.get("problem") or self.answer.get("refused", {}).get(home.record["identity"])
        if refusal:
            raise LaunchError(refusal)
        if home.is_host and self._broken and self.store is None and not self.is_alive():
            raise RunError(f"The store at {home.place}, cannot be used: {self._broken}")
        takes_part = self._begun["round"] != home.name and home.record["identity"] in self._begun["members"]
        return self._begun if takes_part else None

    def awaited(self) -> str:
        """Return a description of the machines that this launcher waits for."""
        place, missing = self._home.place, self.answer.get("missing")
        if self._broken and self._home.may_host:
            return f"machine 0 to answer at {place}, which a program of this machine has: {self._broken}"
        if self._broken:
            return f"machine 0 to answer at {place}: {self._broken}"
        if missing is None:
            # This launcher is new, the run is not. Only the machines in it may end a round: this one may be one too many.
            return f"the run at {place}, to restart: it has begun without this machine"
        return f"machine {missing} of {self._home.machines} (numbered from 0) to come to {place}"

    def is_refused(self) -> bool:
        """Whether nothing listens at the address of machine 0."""
        return "refused" in self._broken

    def next_is_open(self) -> bool:
        """Whether a machine of the round waits for the next one, or that has begun."""
        return "missing" in self.answer or self.answer["round"] != self._home.name

    def publish(self, **words: Any) -> None:
        """Publish new words about this machine; published words stay."""
        self._home.said = {**words, **self._home.said}
        self._wake.set()

    def publish_end(self, how: str) -> None:
        """Let the other machines know that this launcher leaves a run, so that they need not wait until it is missed."""
        if not self._home.said.keys() & {"done", "failed"}:
            self.publish(lost=f"{self.machine_name} {how}.")

    def says(self, word: str) -> str | None:
        """Return the first line that a machine has published under a word; None if none has."""
        lines = self.answer.get(word)
        return printable(lines[0], _LONGEST) if lines else None

    def failure(self) -> str | None:
        """Return a line with the processes and the machine that failed first; None if none did."""
        return self.says("failed")

    def all_done(self) -> bool:
        """Whether the processes of all machines are done."""
        return self.answer.get("done", False)

    def lost(self) -> RunError | None:
        """Return the error that names a machine which does not answer; None if all do."""
        if self.all_done():
            return None
        silent = time.monotonic() - self._answered
        why = f"has not answered for {silent:.0f} s" if silent > self._home.heartbeat_timeout else ""
        why = f"has closed the connection ({self._broken})" if self._broken else why
        line = self.says("lost")
        if line is None and why:
            line = f"{self._home.names[0]} {why}: it is down, or one of the two machines is cut off."
        return line and RunError(f"{line} The processes of the other machines are ended.")

    def stop(self) -> None:
        """Publish the remaining words and end; this waits a moment at most, because the store may never answer."""
        self._stopped = True
        self._wake.set()
        self.join(timeout=1.2)

    # -- the thread --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Exchange states with the store until the thread is stopped, or the connection breaks in a round."""
        home, last = self._home, False
        # Machine 0's answer has changed.
        running = min(_BEAT_S, home.heartbeat_timeout / 4) / (4 if home.is_host else 1)
        while not last:
            self._wake.clear()
            last = self._stopped
            try:
                with self.busy:
                    self._exchange()
            except Exception as error:
                self.store, self._broken = None, _line_of(error)
                if home.is_host or not home.said["waits"]:
                    return
            if not last:
                self._wake.wait(home.pause if home.said["waits"] else running)

    def _exchange(self) -> None:
        home, is_new = self._home, self.store is None
        store = self.store or self._connected()
        home.record["beat"] += 1
        store.set(f"state/{home.record['identity']}", json.dumps(home.record | home.said))
        if is_new:
            store.append("arrived", f"{home.record['identity']} ")
        if home.is_host:
            identities = dict.fromkeys(store.get("arrived").decode().split())
            texts = store.multi_get([f"state/{identity}" for identity in identities])
            store.set("answer", json.dumps(self._answer_to([json.loads(text) for text in texts])))
        answer = json.loads(store.get("answer"))
        if answer["beat"] != self.answer.get("beat"):
            self._answered = time.monotonic()
        self.store, self._broken, self.answer = store, "", answer
        if answer["round"] and answer["round"] != self._begun["round"]:
            self._begun = json.loads(store.get(f"begun/{answer['round']}"))

    def _connected(self) -> TCPStore:
        home = self._home
        if home.is_host:
            return home.server
        # Torch's store does not say why it cannot connect.
        socket.create_connection((home.host, home.port), timeout=min(_CONNECT_S, home.join_timeout)).close()
        limit = timedelta(seconds=max(home.heartbeat_timeout, 1.0))
        return TCPStore(home.host, home.port, is_master=False, timeout=limit, wait_for_workers=False)

    # -- machine 0 only ----------------------------------------------------------------------------------------------

    def _answer_to(self, states: list[State]) -> State:
        """Return the answer to the states of all launchers."""
        home, current_time = self._home, time.monotonic()
        for state in states:
            if state["beat"] != home.seen.get(state["identity"], (None,))[0]:
                home.seen[state["identity"]] = state["beat"], current_time
        silence = {state["identity"]: current_time - home.seen[state["identity"]][1] for state in states}
        gone = {home.record["identity"], *(state["identity"] for state in states if "left" in state)}
        self.others = sum(silent < 3 * _BEAT_S and identity not in gone for identity, silent in silence.items())
        name = self._begun["round"]
        answer: State = {"beat": home.record["beat"], "round": name}
        by_identity = {state["identity"]: state for state in states}
        members = [by_identity[identity] for identity in home.members]
        inside = [state for state in members if state["round"] == name]
        if not members or any(state["waits"] for state in inside):
            fresh = max(_FRESH_S, 3 * home.pause)
            waiting = [state for state in states if silence[state["identity"]] < fresh and state["waits"]]
            answer |= self._arranged([state for state in waiting if state in inside or state not in members])
            if answer["round"] != name:
                return answer
        for machine, state in enumerate(members):
            silent = silence[state["identity"]]
            if silent > home.heartbeat_timeout and not (state in inside and state.keys() & {"done", "left"}):
                line = f"{home.names[machine]} has not answered for {silent:.0f} s: it or its network is down."
                self._silent = self._silent or [line]
        reports = {word: [state[word] for state in inside if word in state] for word in ("failed", "lost", "done")}
        answer["done"] = len(reports["done"]) == len(members)
        return answer | {"failed": reports["failed"][:1], "lost": [*reports["lost"], *self._silent][:1]}

    def _arranged(self, waiting: list[State]) -> State:
        """Number the launchers that wait. Begin the round if all machines are there and agree, else return what keeps it."""
        home, launchers, doubled, refused = self._home, {}, set(), {}
        host_record = home.record | {"machine": 0}
        # Launchers without a number get one of the rest.
        for state in sorted(waiting, key=lambda state: state["machine"] is None):
            free = (number for number in range(1, home.machines) if number not in launchers)
            machine = next(free, None) if state["machine"] is None else state["machine"]
            for name, option in _CHECKS.items():
                if host_record[name] != state[name]:
                    difference = f"{host_record[name]} on {_named(host_record)}, {state[name]} on {_named(state | {'machine': machine})}"
                    return {
                        "problem": f"The machines do not agree on {option}: {difference}. Give all of them the same."
                    }
            if machine is not None and machine not in launchers:
                launchers[machine] = state | {"machine": machine}
            elif state["beat"] * _LOOK_S > _STALE_S:
                why = f"There are {home.machines} machines already (--num_machines); this is one too many."
                if machine is not None:
                    asked = f"--machine_rank is {machine} on this machine and on {_named(launchers[machine])}"
                    why = f"{asked}; each needs its own number."
                refused[state["identity"]] = why
            elif machine is not None:  # which may be the number of a launcher that has just ended
                doubled.add(machine)
        absent = sorted(doubled | ({*range(home.machines)} - launchers.keys()))
        if not absent:
            return {"round": home.begin(launchers)}
        missing = ", ".join([*map(str, absent[:_NAMED]), *(["..."] if len(absent) > _NAMED else [])])
        return {"missing": missing, "refused": refused}


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
        beat.publish(failed=f"{beat.machine_name}: rank {first.rank} ended with exit status {first.status}")
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
