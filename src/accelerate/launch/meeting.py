"""How the launchers of several machines find each other, count off, and notice that one of them is gone.

Machine 0's launcher holds a store (torch's `TCPStore`) at the main address and port; every launcher is a client of it, and so
are their processes. All of it is polled, so that a signal is answered while a launcher waits.

- A *round* is one start of all processes. Its number is how often the run has been restarted.
- In a round, each machine writes down who it is, under its number, and counts while it waits. When all have, the round begins. The
  place of one that has stopped counting is free again.
- Whoever wants a restart opens the next round; the others see that, stop their processes and join it.
- The processes of a round meet at the same store, or, after a restart, at another one of machine 0's.
- Every launcher counts up a key of its own, once a second. A machine whose key stands still is lost: links that are cut send no
  message, so a process that waits for a peer behind one would wait for half an hour.

Importing this module imports torch.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from accelerate.config.exit_status import PREEMPTED
from accelerate.launch import network
from accelerate.launch.errors import LaunchError, RunError

# How often a launcher looks whether the others have come, and how often it says that it is there.
_LOOK_S = 0.1
_BEAT_S = 1.0
# How often a launcher that waits says so.
_TELL_S = 15.0
# How long one question to the store may take while the machines count off.
_ANSWER_S = 30.0
# After how long a machine that has written down its name and does not count any more has lost its place.
_STALE_S = 5.0
# How long somebody who leaves while the others are still awaited takes to cross out its name.
_FAREWELL_S = 2.0


@dataclass(frozen=True)
class Member:
    """A machine of a round.

    Attributes:
        machine: its number.
        host: its name.
        address: the address by which it reaches the others.
        machines: how many machines it was told there are.
        processes: how many processes it runs.
        identity: differs from launcher to launcher.
        restarts: how often it was told that the run may be restarted.
        role: what it calls its processes.
    """

    machine: int
    host: str
    address: str
    machines: int
    processes: int
    identity: str
    restarts: int = 0
    role: str = "default"

    def __str__(self) -> str:
        return f"machine {self.machine} ({self.host}, {self.address})"


class MachineLost(RunError):
    """A machine does not answer any more."""


class Elsewhere(RunError):
    """Processes of another machine have failed, or saved themselves; their messages are there.

    Args:
        what: what `Meeting.failed_elsewhere` returned.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}. Its messages are there; the processes of this machine were stopped.")
        if is_preempted(what):
            self.status = PREEMPTED


class Meeting:
    """One launcher's view of the machines of a run.

    Args:
        host: name or address of machine 0.
        port: the port there.
        machines: how many machines take part.
        machine: the number of this one; None takes a free one, 0 on the machine that has the address.
        processes: how many processes this machine runs.
        join_timeout: how long to wait for the others, in seconds.
        beat_timeout: after how many seconds of silence a machine is lost.
        tell: what prints a line for the user.
        restarts: how often the run may be restarted.
        role: what the processes of this machine are called.
    """

    def __init__(
        self,
        host: str,
        port: int,
        machines: int,
        machine: int | None,
        processes: int,
        join_timeout: float = 600.0,
        beat_timeout: float = 30.0,
        tell: Callable[[str], None] = print,
        restarts: int = 0,
        role: str = "default",
    ) -> None:
        self.host, self.port, self.machines, self.processes = host, port, machines, processes
        self.restarts, self.role = restarts, role
        self.join_timeout, self.beat_timeout, self.tell = join_timeout, beat_timeout, tell
        self.is_host = machine == 0 or (machine is None and network.is_this_machine(host))
        self.machine = 0 if self.is_host else machine
        self._numbered = self.machine is not None
        self.round = -1
        self.members: dict[int, Member] = {}
        self._identity = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:12]}"
        self._server: TCPStore | None = None
        self._rounds: TCPStore | None = None
        self.meeting_port = port
        self._store: Store | None = None
        self._signature: tuple[str, str] | None = None
        self._run = ""  # whose store it is; machine 0 may be started anew, with an empty one
        self._watch: _Watch | None = None

    # -- counting off ----------------------------------------------------------------------------------------------

    def join(self) -> Store:
        """Join the next round and wait until all machines have; every launcher must call it.

        Returns:
            A store that the launchers share in this round.

        Raises:
            LaunchError: the machines do not agree on what is run.
            RunError: somebody did not come in time.
        """
        self._stop_watching()
        deadline, former = time.monotonic() + self.join_timeout, self.round
        try:
            while True:
                try:
                    with self._connected(deadline) as store:
                        self.round = self._next_round(store, deadline)
                        self._sign(store)
                        self._wait_for_all(store, deadline)
                        self._check(store)
                        self.meeting_port = self._open_store(store, deadline)
                        break
                except _Reopened:
                    if self._signature is None:  # not a machine of that round, so not one that may end it
                        self.round = former
        except BaseException:
            self._cross_out()
            raise
        self._signature = None
        self._start_watching()
        return PrefixStore(f"round/{self.round}", self._store)

    def _cross_out(self) -> None:
        """Free the place of this machine, so that the round does not begin without it."""
        signature, self._signature = self._signature, None
        if signature is None or self.is_host or self._store is None:
            return
        with contextlib.suppress(RuntimeError):
            self._store.set_timeout(timedelta(seconds=_FAREWELL_S))
            if (
                not self._store.check([f"begun/{self.round}"])
                and self._store.get(signature[0]).decode() == signature[1]
            ):
                self._store.delete_key(signature[0])
        self._store = None

    @contextlib.contextmanager
    def _connected(self, deadline: float) -> Iterator[Store]:
        """Talk to the store, with a new connection if there is none; a broken one is made anew until the deadline."""
        try:
            if self._store is None:
                self._connect(deadline)
            yield self._store
        except (RuntimeError, ConnectionError, TimeoutError) as error:
            if isinstance(error, RunError):
                raise
            # LaunchError is a ValueError and passes. Torch's own errors of a store are RuntimeErrors.
            self._store = None
            if self.is_host or time.monotonic() > deadline:
                raise RunError(
                    f"The store at {self.host}, port {self.port}, cannot be used: {_line(error)}"
                ) from error
            time.sleep(_LOOK_S)
            raise _Reopened from None

    def _connect(self, deadline: float) -> None:
        limit = timedelta(seconds=_ANSWER_S)
        if self.is_host:
            if self._server is None:
                self._server = self._serve(limit)
                self._server.set("run", self._identity)
            self._store = self._server
        else:
            seconds = round(max(deadline - time.monotonic(), 0.0), 1)
            try:
                network.wait_for(self.host, self.port, seconds, self.tell)
            except TimeoutError as error:
                raise RunError(str(error)) from None
            self._store = TCPStore(self.host, self.port, is_master=False, timeout=limit, wait_for_workers=False)
        run = self._store.get("run").decode()
        if run != self._run:
            self._run, self.round = run, -1

    def _serve(self, limit: timedelta) -> TCPStore:
        try:
            return TCPStore(self.host, self.port, is_master=True, timeout=limit, wait_for_workers=False)
        except (RuntimeError, ValueError) as error:
            raise RunError(
                f"Machine 0 cannot listen at {self.host}, port {self.port}: {_line(error)}. Choose a free --main_process_port, on all "
                "machines, and let --main_process_ip be an address of machine 0."
            ) from error

    def _next_round(self, store: Store, deadline: float) -> int:
        """Return the number of the round to join, opening it if this machine was in the last one."""
        told = False
        while True:
            now = int(store.compare_set("round", "", "0"))
            if not store.check([f"begun/{now}"]):
                return now
            if now == self.round:
                return int(store.compare_set("round", str(now), str(now + 1)))
            # This launcher is new, the run is not. Only the machines in it may end a round: this one may be one too many.
            if not told:
                self.tell("the run has begun without this machine, and lets it in when it restarts")
                told = True
            if time.monotonic() > deadline:
                raise RunError(
                    f"The run at {self.host}, port {self.port}, goes on without this machine, and has not restarted within "
                    f"{self.join_timeout:g} s. Is another launcher of it running here?"
                )
            time.sleep(_LOOK_S)

    def _sign(self, store: Store) -> None:
        """Write down who this is, under its number in the round."""
        numbers = [self.machine] if self._numbered else list(range(1, self.machines))
        numbers.sort(key=lambda number: number != self.machine)  # the same one again, if that can be
        address = network.local_address(self.host, self.port)
        holders: dict[int, str] = {}
        for number in numbers:
            me = Member(
                number,
                socket.gethostname(),
                address,
                self.machines,
                self.processes,
                self._identity,
                self.restarts,
                self.role,
            )
            key, text = f"member/{self.round}/{number}", json.dumps(asdict(me))
            holders[number] = store.compare_set(key, "", text).decode()
            if Member(**json.loads(holders[number])).identity == self._identity:
                self.machine, self._signature = number, (key, text)
                return
        self._free_a_place(store, holders)
        held = Member(**json.loads(holders[numbers[0]]))
        if self._numbered:
            raise LaunchError(
                f"--machine_rank is {self.machine} on this machine ({socket.gethostname()}) and on {held.host} ({held.address}) too. "
                "Give each machine a number of its own."
            )
        raise LaunchError(
            f"There are {self.machines} machines already; this one is one too many. Correct --num_machines."
        )

    def _free_a_place(self, store: Store, holders: Mapping[int, str]) -> None:
        """Strike out machines that have written down their names and are gone.

        Raises:
            _Reopened: a place is free, or the round has begun.
        """
        before = {number: store.add(f"waits/{self.round}/{number}", 0) for number in holders}
        looked = time.monotonic()
        while time.monotonic() - looked < _STALE_S:
            if store.check([f"begun/{self.round}"]):
                raise _Reopened
            time.sleep(_LOOK_S)
        for number, holder in holders.items():
            key = f"member/{self.round}/{number}"
            gone = store.add(f"waits/{self.round}/{number}", 0) == before[number]
            if gone and (not store.check([key]) or store.get(key).decode() == holder):
                store.delete_key(key)
                raise _Reopened

    def _wait_for_all(self, store: Store, deadline: float) -> None:
        keys = [f"member/{self.round}/{number}" for number in range(self.machines)]
        told = time.monotonic()
        while not store.check(keys):
            now = time.monotonic()
            if now > deadline or now - told >= _TELL_S:
                missing = [str(number) for number, key in enumerate(keys) if not store.check([key])]
                line = f"machine {', '.join(missing)} of {self.machines} (numbered from 0)"
                if now > deadline:
                    raise RunError(
                        f"{line} did not come to {self.host}, port {self.port}, within {self.join_timeout:g} s. Start the same "
                        "command there, with its own --machine_rank; --rdzv_conf join_timeout=SECONDS waits longer."
                    )
                self.tell(f"waiting for {line} to come to {self.host}, port {self.port}")
                told = now
            if int(store.get("round")) != self.round:
                raise _Reopened
            store.add(f"waits/{self.round}/{self.machine}", 1)
            time.sleep(_LOOK_S)
        found = [store.get(key) if store.check([key]) else None for key in keys]
        if None in found:  # somebody has left in this very moment
            raise _Reopened
        self.members = {number: Member(**json.loads(text)) for number, text in enumerate(found)}
        if self.members[self.machine].identity != self._identity:
            self._signature = None  # this one was away for so long that it has lost its place
            raise _Reopened

    def _check(self, store: Store) -> None:
        store.set(f"begun/{self.round}", "1")
        mine = self.members[self.machine]
        for other in self.members.values():
            for flag, name, here, there in (
                ("--num_machines", "machines", mine.machines, other.machines),
                ("processes of each machine", "processes", mine.processes, other.processes),
                ("--max_restarts", "restarts", mine.restarts, other.restarts),
            ):
                if here != there:
                    raise LaunchError(
                        f"The machines do not agree on {flag}: {here} on {mine}, {there} on {other}. Give all of them the same "
                        f"--num_machines, --num_processes and --max_restarts ({name} differ)."
                    )

    def _open_store(self, store: Store, deadline: float) -> int:
        """Return the port of the store at which the processes of this round meet.

        Torch leaves the addresses of the last round in a store, so each round but the first one has a store of its own.
        """
        key = f"port/{self.round}"
        if self.is_host:
            limit = timedelta(seconds=_ANSWER_S)
            self._rounds = self._server
            if self.round:
                self._rounds = TCPStore(self.host, 0, is_master=True, timeout=limit, wait_for_workers=False)
            store.set(key, str(self._rounds.port))
        while not store.check([key]):  # a question that waits would leave signals unanswered
            if time.monotonic() > deadline:
                raise RunError(f"Machine 0 at {self.host}, port {self.port}, has not opened the round in time.")
            time.sleep(_LOOK_S)
        return int(store.get(key))

    # -- while the processes run -------------------------------------------------------------------------------------

    def _start_watching(self) -> None:
        self._watch = _Watch(self)
        self._watch.start()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def lost(self) -> MachineLost | None:
        """Return the error that names a machine which does not answer; None if all do."""
        return None if self._watch is None else self._watch.lost()

    def reopened(self) -> bool:
        """Whether another machine has opened the next round."""
        return self._watch is not None and self._watch.round > self.round

    def failed_elsewhere(self) -> str | None:
        """Return what another machine wrote about its failed processes, or None."""
        return None if self._watch is None else self._watch.failure

    def all_done(self) -> bool:
        """Whether all machines have said that their processes are done."""
        return self._watch is not None and len(self._watch.done) == self.machines

    def say_done(self) -> None:
        """Tell the others that the processes of this machine are done."""
        if self._watch is not None:
            self._watch.post(f"done/{self.round}/{self.machine}", "1")

    def say_failed(self, what: str) -> None:
        """Tell the others that processes of this machine have failed, unless another machine has said so before.

        Args:
            what: a line for people.
        """
        if self._watch is not None:
            self._watch.post(f"failed/{self.round}", f"{self.members[self.machine]}: {what}")

    def say_ended(self, what: str) -> None:
        """Tell the others that this launcher leaves the run, so that they need not wait until it is missed.

        Args:
            what: why; the end of a sentence about this machine.
        """
        if self._watch is not None:
            self._watch.post(f"lost/{self.round}", f"{self.members[self.machine]} {what}.")

    def forget(self) -> None:
        """Drop the connection; the next `join` makes a new one. After a machine was lost, the old one may hang."""
        self._stop_watching()
        if not self.is_host:
            self._store = None

    def leave(self, saving: float = 0.0) -> None:
        """End the meeting for this launcher. The store ends with machine 0's, so that one lets the others hear the news first.

        Args:
            saving: how long machine 0 waits for machines whose processes save themselves, in seconds.
        """
        watch = self._watch
        if watch is None:
            return
        if not watch.posted:
            self.say_ended("has left the run")
        watch.post(f"left/{self.round}/{self.machine}", "1")
        others = set(self.members) - {self.machine}
        if self.is_host and others:
            started = time.monotonic()
            while not others <= watch.left:
                saves = saving and not watch.notice and watch.failure is not None and is_preempted(watch.failure)
                if not saves and others <= watch.heard | watch.left:
                    break
                if time.monotonic() - started > (saving if saves else 3 * _BEAT_S):
                    break
                time.sleep(_LOOK_S)
        self._stop_watching()


def is_preempted(what: str) -> bool:
    """Return whether what a machine wrote about its failed processes says that they have saved themselves.

    Args:
        what: what `Meeting.failed_elsewhere` returned.
    """
    return what.endswith(f"exit status {PREEMPTED}")


def _line(error: BaseException) -> str:
    """Return an error of the store in one line; torch may add where in its code it happened."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


class _Reopened(Exception):
    """The round changed, or the connection, while this machine waited."""


class _Watch(threading.Thread):
    """Counts up this machine's key and looks at those of the others, with a connection of its own.

    A question to a store behind a cut link does not return, so nobody else waits for this thread: `lost` looks at the clock.
    """

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(name="accelerate-heartbeat", daemon=True)
        self._meeting, self._stopped = meeting, threading.Event()
        self._wake = threading.Event()
        self._posts: list[tuple[str, str]] = []  # added to by one thread, taken from by the other: needs no lock
        now = time.monotonic()
        self._answered, self._broken = now, ""
        self._seen = dict.fromkeys(meeting.members, (-1, now))
        self.round, self.failure = meeting.round, None
        self.done: set[int] = set()
        self.heard: set[int] = set()
        self.left: set[int] = set()
        self.notice: str | None = None
        self.posted = False

    def stop(self) -> None:
        """Let the thread end; it is not waited for longer than a moment, because its question may never be answered."""
        self._wake.set()
        deadline = time.monotonic() + 1.0
        while self._posts and self.is_alive() and not self._broken and time.monotonic() < deadline:
            time.sleep(0.01)
        self._stopped.set()
        self._wake.set()
        self.join(timeout=0.2)

    def post(self, key: str, value: str) -> None:
        """Have a key written, if nobody has written it before."""
        self.posted = True
        self._posts.append((key, value))
        self._wake.set()

    def run(self) -> None:
        meeting = self._meeting
        try:
            limit = timedelta(seconds=max(meeting.beat_timeout, 1.0))
            store = TCPStore(meeting.host, meeting.port, is_master=False, timeout=limit, wait_for_workers=False)
            beat = 0
            while not self._stopped.is_set():
                beat += 1
                self._once(store, beat)
                self._answered = time.monotonic()
                self._wake.wait(min(_BEAT_S, meeting.beat_timeout / 4))
                self._wake.clear()
        except Exception as error:
            self._broken = _line(error)

    def _once(self, store: TCPStore, beat: int) -> None:
        meeting, number = self._meeting, self._meeting.round
        others = sorted(meeting.members)
        posts = list(self._posts)
        for key, value in posts:
            store.compare_set(key, "", value)
        store.set(f"beat/{number}/{meeting.machine}", str(beat))
        now = time.monotonic()
        for other in others:
            key = f"beat/{number}/{other}"
            count = int(store.get(key)) if store.check([key]) else -1
            if count != self._seen[other][0]:
                self._seen[other] = (count, now)
            for word, who in (("done", self.done), ("heard", self.heard), ("left", self.left)):
                if other not in who and store.check([f"{word}/{number}/{other}"]):
                    who.add(other)
        for other in others:
            silent = now - self._seen[other][1]
            if other not in self.done | self.left and silent > meeting.beat_timeout:
                why = f"has not answered for {silent:.0f} s: it is down, or its network is."
                store.compare_set(f"lost/{number}", "", f"{meeting.members[other]} {why}")
        for key in (f"lost/{number}", f"failed/{number}"):
            if store.check([key]):
                text = store.get(key).decode()
                if key.startswith("lost"):
                    self.notice = text
                else:
                    self.failure = text
        if self.failure or self.notice or len(self.done) == meeting.machines:
            store.set(f"heard/{number}/{meeting.machine}", "1")
        self.round = int(store.get("round"))
        del self._posts[: len(posts)]

    def lost(self) -> MachineLost | None:
        """See `Meeting.lost`."""
        meeting = self._meeting
        if len(self.done) == meeting.machines:
            return None
        if self.notice is not None:
            return MachineLost(f"{self.notice} The processes of the other machines are ended.")
        silent = time.monotonic() - self._answered
        if self._broken or silent > meeting.beat_timeout:
            why = (
                f"has closed the connection ({self._broken})"
                if self._broken
                else f"has not answered for {silent:.0f} s"
            )
            return MachineLost(
                f"{meeting.members[0]} {why} at {meeting.host}, port {meeting.port}: it is down, or one of the two machines is cut "
                f"off. The processes of this machine ({meeting.members[meeting.machine].host}) are ended."
            )
        return None
